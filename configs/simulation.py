"""Tables of the simulation: the engine without a model, and the environment of ``staleflow simulate``."""

from typing import Annotated, Literal

from msgspec import Meta, field

from staleflow.configs.section import (
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Processes,
    Section,
    Share,
    Text,
)


class Simulated(Section, frozen=True, kw_only=True):
    """The engine without a model: a step of ``n`` samples takes ``k1 * kv + max(k2, k3 * n) + k4`` seconds, and tokens
    are random.
    """

    lengths: Literal["lognormal", "power_law", "bimodal", "uniform", "trace"] = "lognormal"
    """Distribution of the number of tokens of a trajectory; always capped at ``rollout.max_new_tokens``."""
    mean_tokens: PositiveFloat = 64.0
    """``lognormal``, ``bimodal``: mean of the (short) lengths."""
    sigma: Annotated[float, Meta(ge=0, le=3)] = 0.8
    """``lognormal``, ``bimodal``: standard deviation of the logarithm."""
    min_tokens: Positive = 1
    """``power_law``, ``uniform``: minimum length."""
    max_tokens: NonNegative = 0
    """``uniform``: maximum length; 0: ``rollout.max_new_tokens``."""
    tail: PositiveFloat = 1.5
    """``power_law``: P(more than x) = (min_tokens / x) ** tail. At 2 and below only the cap bounds the variance."""
    long_tokens: PositiveFloat = 1024.0
    """``bimodal``: mean of the long lengths."""
    long_share: Share = 0.1
    """``bimodal``: share of trajectories that are long."""
    trace: Text = ""
    """``trace``: a .jsonl or .parquet file with one trajectory a row."""
    trace_column: Text = "tokens"
    """``trace``: the column with the number of tokens."""
    prompt_share: Share = 0.5
    """Share of the spread of lengths (the variance of the position in the distribution) that the prompt determines and
    a ranker could predict. The rest differs between the trajectories of one prompt."""
    k1: NonNegativeFloat = 1e-9
    """Seconds a step for each token in the KV cache."""
    k2: NonNegativeFloat = 1e-3
    """Minimum seconds of a step."""
    k3: NonNegativeFloat = 1e-5
    """Seconds a step for each running sample."""
    k4: NonNegativeFloat = 0.0
    """Seconds of overhead a step."""


class Fleet(Section, frozen=True, kw_only=True):
    """A number of identical engines."""

    count: Processes
    """Number of engines."""
    kind: Text = ""
    """Name of the kind in plans, such as ``h20``; "": ``kind-1`` for the first kind, and so on."""
    price: NonNegativeFloat = 0.0
    """Price of one engine for an hour, in any currency; 0: free."""
    speed: PositiveFloat = 1.0
    """Speed as a multiple of ``[rollout.simulated]``, or of the engine of the cost file."""
    compute: NonNegativeFloat = 0.0
    """Speed of arithmetic (``k3`` and prefill) as such a multiple, for engines with relatively fast or slow memory;
    0: as ``speed``."""
    slots: NonNegative = 0
    """Number of samples decoded at once; 0: ``rollout.max_inflight``."""
    kv_tokens: NonNegative = 0
    """Capacity of the KV cache in tokens; 0: ``simulation.kv_tokens``."""
    remote: bool = False
    """The engines pull weights over a network: ``pull.network_gib_s`` of the cost file is added."""
    preemptible: bool = False
    """The provider takes the engines away as ``[simulation.preemption]`` describes."""


class Occurrence(Section, frozen=True, kw_only=True):
    """An event of one engine."""

    at_s: NonNegativeFloat
    """Seconds of virtual time after the start."""
    engine: NonNegative
    """Number of the engine, from 0; a number beyond the fleet's may only ``join``."""
    what: Literal["join", "leave", "crash", "hang", "return"]
    """``leave``: the engine detaches. ``crash``: it ends without detaching. ``hang``: it stops working, but still
    reports. ``return``: it resumes after a hang; after leaving or crashing it returns as a new process."""


class Preemption(Section, frozen=True, kw_only=True):
    """Losses of the engines of a ``simulation.fleet`` with ``preemptible``; without a fleet, of all engines."""

    per_min: NonNegativeFloat = 0.0
    """Mean number of losses of each engine in a minute, exponentially distributed and drawn from the seed; 0.1: ten
    percent of the engines a minute. 0: none."""
    announced: Share = 1.0
    """Share of the losses that are announced: the engine gets a SIGTERM, ``notice_s`` before it is killed. The others
    crash."""
    notice_s: NonNegativeFloat = 30.0
    """Seconds from the announcement to the loss. ``rollout.handover_s`` decides how the engine uses them."""
    return_s: NonNegativeFloat = 60.0
    """Seconds from the loss until another engine of the kind attaches in its place."""


class Simulation(Section, frozen=True, kw_only=True):
    """The environment of ``staleflow simulate``. It has ``rollout.workers`` engines, and train steps take
    ``simulated_step_s``.
    """

    costs: Text = ""
    """TOML file with measured costs of scheduler, trajectory servers, wire, weights, engines, rewards, trainer and
    checkpoints; "": only the constants below and ``simulated_step_s`` cost time. ``python -m bench.costs`` writes one.
    Its tables replace the constants of the same names."""
    model_gib: NonNegativeFloat = 0.0
    """Size of a version of the weights in GiB, by which the cost file charges transfers and checkpoints."""
    pull_s: NonNegativeFloat = 0.0
    """Seconds from the order to load a version until its bytes are at the engine, which continues meanwhile."""
    load_s: NonNegativeFloat = 0.0
    """Seconds for which the engine pauses to load weights."""
    reward_s: NonNegativeFloat = 0.0
    """Seconds from the push of a group until it may be trained."""
    filter_share: Share = 0.0
    """Share of groups that the filter releases after their reward, at random."""
    prompt_tokens: NonNegative = 0
    """Number of tokens of each prompt, which are in the KV cache while its trajectory runs."""
    kv_tokens: NonNegative = 0
    """Capacity of an engine's KV cache in tokens; 0: unlimited. When it is full, the newest sample is preempted."""
    prefill_s: NonNegativeFloat = 0.0
    """Seconds to prefill one token of a prompt, or of a trajectory that continues here; the whole engine waits."""
    rows: Positive = 1 << 20
    """Number of prompts of the source."""
    known_lengths: bool = False
    """Take the exact lengths of the prompts as expected lengths from the start, instead of the predictions of
    ``coordination.ranker``: the upper bound of what ranking can achieve."""
    turns: Positive = 1
    """Number of turns of a trajectory; its tokens are divided evenly among them."""
    tool_s: NonNegativeFloat = 0.0
    """Mean seconds of a tool call between two turns, exponentially distributed."""
    report_s: PositiveFloat = 1.0
    """Seconds between two reports of an engine without events."""
    publish: Literal["end", "start"] = "end"
    """Time at which a step's version is published. ``end``: when the step is trained, as in a real run. ``start``: when
    its batch is sealed, as in the StaleFlow authors' own simulator; a trajectory then has one step more. For
    comparisons only."""
    fleet: list[Fleet] = field(default_factory=list[Fleet])
    """Engines of several kinds; empty: ``rollout.workers`` identical ones."""
    trainer_price: NonNegativeFloat = 0.0
    """Price of the trainer's hardware for an hour; 0: ``launch.trainer_price`` of each of ``launch.trainer_nodes``."""
    preemption: Preemption = field(default_factory=Preemption)
    """Losses of preemptible engines."""
    events: list[Occurrence] = field(default_factory=list[Occurrence])
    """Events of engines during the run, in any order."""
