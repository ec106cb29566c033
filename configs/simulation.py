"""Tables of what is simulated: the engine without a model, and the world round it in ``staleflow simulate``."""

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
    """The engine without a model: a step of ``n`` samples takes ``k1 * kv + max(k2, k3 * n) + k4`` seconds, tokens are
    random."""

    lengths: Literal["lognormal", "power_law", "bimodal", "uniform", "trace"] = "lognormal"
    """Distribution of a trajectory's tokens; whatever it is, at most ``rollout.max_new_tokens``."""
    mean_tokens: PositiveFloat = 64.0
    """``lognormal``, ``bimodal``: mean of the (short) lengths."""
    sigma: Annotated[float, Meta(ge=0, le=3)] = 0.8
    """``lognormal``, ``bimodal``: standard deviation of the logarithm."""
    min_tokens: Positive = 1
    """``power_law``, ``uniform``: the shortest."""
    max_tokens: NonNegative = 0
    """``uniform``: the longest; 0: ``rollout.max_new_tokens``."""
    tail: PositiveFloat = 1.5
    """``power_law``: P(more than x) = (min_tokens / x) ** tail. At 2 and below the variance has no end but the cap."""
    long_tokens: PositiveFloat = 1024.0
    """``bimodal``: mean of the long lengths."""
    long_share: Share = 0.1
    """``bimodal``: share of trajectories that are long."""
    trace: Text = ""
    """``trace``: a .jsonl or .parquet file, one trajectory a row."""
    trace_column: Text = "tokens"
    """``trace``: the column with its tokens."""
    prompt_share: Share = 0.5
    """Share of a length's spread (the variance of its place in the distribution) that is the prompt's: what a ranker
    could know. The rest differs between the trajectories of one prompt."""
    k1: NonNegativeFloat = 1e-9
    """Seconds a token of KV cache costs each step."""
    k2: NonNegativeFloat = 1e-3
    """Least seconds of a step."""
    k3: NonNegativeFloat = 1e-5
    """Seconds a running sample costs each step."""
    k4: NonNegativeFloat = 0.0
    """Seconds of overhead a step."""


class Fleet(Section, frozen=True, kw_only=True):
    """Some engines alike."""

    count: Processes
    """How many of them."""
    speed: PositiveFloat = 1.0
    """Times as fast as ``[rollout.simulated]`` says."""
    slots: NonNegative = 0
    """Samples decoded at once; 0: ``rollout.max_inflight``."""
    kv_tokens: NonNegative = 0
    """Tokens that its KV cache holds; 0: ``simulation.kv_tokens``."""


class Occurrence(Section, frozen=True, kw_only=True):
    """Something that happens to an engine."""

    at_s: NonNegativeFloat
    """Seconds of virtual time after the start."""
    engine: NonNegative
    """Its number, from 0; one beyond the fleet's may only ``join``."""
    what: Literal["join", "leave", "crash", "hang", "return"]
    """``leave``: with a goodbye. ``crash``: without. ``hang``: it stands still, but is heard. ``return``: it goes on
    where it hung; one that left or crashed comes back as a new process."""


class Simulation(Section, frozen=True, kw_only=True):
    """The world of ``staleflow simulate``. Engines are ``rollout.workers``, the trainer takes ``simulated_step_s``."""

    pull_s: NonNegativeFloat = 0.0
    """From the order to load a version to its bytes at the engine, which goes on meanwhile."""
    load_s: NonNegativeFloat = 0.0
    """The engine stands still while it takes weights."""
    reward_s: NonNegativeFloat = 0.0
    """From a pushed group to one that may train."""
    filter_share: Share = 0.0
    """Groups that the filter releases after their reward, at random."""
    prompt_tokens: NonNegative = 0
    """Tokens of each prompt, in the KV cache as long as its trajectory runs."""
    kv_tokens: NonNegative = 0
    """Tokens that an engine's KV cache holds; 0 has no end. When it is full the newest sample gives up its place."""
    prefill_s: NonNegativeFloat = 0.0
    """Seconds to read one token of a prompt, or of a trajectory that goes on; the whole engine waits."""
    rows: Positive = 1 << 20
    """Prompts of the source."""
    known_lengths: bool = False
    """Expected lengths are what the prompts tell, exactly and from the beginning, in place of what
    ``coordination.ranker`` finds out: the most that ranking can give."""
    turns: Positive = 1
    """Turns of a trajectory; its tokens are shared out over them alike."""
    tool_s: NonNegativeFloat = 0.0
    """Mean seconds at a tool between two turns, exponentially distributed."""
    report_s: PositiveFloat = 1.0
    """Seconds between two reports of an engine that nothing happens to."""
    publish: Literal["end", "start"] = "end"
    """When a step's version is out. ``end``: when it is trained, as it is. ``start``: when its batch is there, as the
    StaleFlow authors' own simulator has it; a trajectory then has one step more. For comparisons only."""
    fleet: list[Fleet] = field(default_factory=list[Fleet])
    """Engines of several kinds; empty: ``rollout.workers`` alike."""
    events: list[Occurrence] = field(default_factory=list[Occurrence])
    """What happens to engines while it runs, in any order."""
