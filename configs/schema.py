"""What a run looks like: every key, its unit, its bounds and what it changes.

Decoded by ``load`` from TOML with unknown keys forbidden. Frozen: nothing changes a configuration after it was read.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from staleflow.protocols.consistency.limits import Bound, OnOverdue

NonNegative = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Durability = Literal["process", "power"]


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every table of the file."""


class Model(Section, frozen=True, kw_only=True):
    """The policy: a model directory as ``save_pretrained`` writes it, tokenizer included."""

    path: str = ""
    """Model directory. Empty: ``build`` makes one in the run directory."""
    build: str = ""
    """``module:function`` or ``file.py:function``, called as ``build(directory, seed=..., **options)`` once a run."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of ``build``."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What engines and the trainer compute in; published weights keep it."""


class Prompts(Section, frozen=True, kw_only=True):
    """Where prompts come from. One of ``path`` and ``source``."""

    path: str = ""
    """A .jsonl or .parquet file, one prompt a row."""
    source: str = ""
    """Import path of a callable that returns an iterable of rows (dicts): ``source(seed=..., **options)``."""
    eval_path: str = ""
    """Held-out prompts, as ``path``."""
    eval_source: str = ""
    """Held-out prompts, as ``source``."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of ``source`` and ``eval_source``."""
    columns: dict[str, str] = field(default_factory=dict[str, str])
    """Renames: staleflow's name = the file's name, e.g. ``prompt = "question"``. Other columns keep theirs."""
    chat_template: bool = False
    """Put each prompt through the tokenizer's chat template as one user message."""
    epochs: NonNegative = 0
    """Passes over the rows; 0 repeats until the trainer is done."""


class Reward(Section, frozen=True, kw_only=True):
    """The first stage: ``reward(prompt, completion, **columns) -> float``, sync or async, in processes of its own."""

    run: str
    """``module:function`` or ``file.py:function``."""
    workers: Positive = 1
    timeout_s: PositiveFloat = 10.0
    """Of one call; a call that takes longer is killed and counts as failed."""
    retries: NonNegative = 2
    """More tries for a sample whose call raised or hung; then its group is released."""
    batch: Positive = 16
    """Groups that a worker takes at once."""


class Staleness(Section, frozen=True, kw_only=True):
    """The promise."""

    max_staleness: NonNegative = 2
    """Versions between a trajectory's oldest token and the step that trains it. 0 waits for every batch; more keeps
    engines busy while the trainer works, at the price of older data."""
    bound: Bound = Bound.TRAJECTORY
    """``trajectory``: every token of a trained group obeys the bound. ``token``: every trained token does, older ones
    are masked, and no long trajectory ever holds up a step."""
    on_overdue: OnOverdue = OnOverdue.WAIT
    """What happens to the groups that keep a waiting trainer from its batch (trajectory bound)."""
    min_trainable: Share = 0.0
    """Token bound: a group with a smaller trainable share is dropped."""


class Redundancy(Section, frozen=True, kw_only=True):
    """Over-admission against stragglers; the surplus is thrown away."""

    groups: Annotated[float, Meta(ge=1, le=8)] = 1.0
    """Live groups admitted, as a multiple of what the bound admits."""
    samples: Annotated[float, Meta(ge=1, le=8)] = 1.0
    """Samples started a group, as a multiple of ``group_size``; the last ones are aborted."""


class Simulated(Section, frozen=True, kw_only=True):
    """The engine without a model: time by the cost model ``T(n, kv)`` of DESIGN section 4, random tokens."""

    mean_tokens: PositiveFloat = 64.0
    """Lognormal lengths: mean."""
    sigma: Annotated[float, Meta(ge=0, le=3)] = 0.8
    """Lognormal lengths: standard deviation of the logarithm."""
    k1: Annotated[float, Meta(ge=0)] = 1e-9
    """Seconds a token of KV cache costs each step."""
    k2: Annotated[float, Meta(ge=0)] = 1e-3
    """Least seconds of a step."""
    k3: Annotated[float, Meta(ge=0)] = 1e-5
    """Seconds a running sample costs each step."""
    k4: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds of overhead a step."""


class Rollout(Section, frozen=True, kw_only=True):
    """Instances that write trajectories."""

    engine: Literal["transformers", "simulated"] = "transformers"
    workers: Positive = 1
    """Processes started by ``staleflow run``; more may attach."""
    group_size: Positive = 8
    """Trajectories a prompt."""
    max_inflight: Positive = 64
    """Samples that one instance decodes at once."""
    max_new_tokens: Positive = 64
    temperature: PositiveFloat = 1.0
    routing: Literal["least_loaded", "round_robin"] = "least_loaded"
    """Which instance gets the next group."""
    on_update: Literal["keep", "drain"] = "keep"
    """In-flight samples when a new version comes: go on with the new weights (a new segment), or end first."""
    filter: Literal["none", "zero_spread"] = "zero_spread"
    """Groups released after the stages: those whose samples all have the same reward teach nothing."""
    threads: Positive = 1
    """Torch threads of an instance."""
    redundancy: Redundancy = field(default_factory=Redundancy)
    simulated: Simulated = field(default_factory=Simulated)


class Algorithm(Section, frozen=True, kw_only=True):
    """From rewards to gradients."""

    advantage: Literal["grpo"] = "grpo"
    loss: Literal["ppo_clip"] = "ppo_clip"
    clip_low: PositiveFloat = 0.2
    """PPO ratio is clipped below 1 - ``clip_low``."""
    clip_high: PositiveFloat = 0.2
    """PPO ratio is clipped above 1 + ``clip_high``."""
    tis_cap: Annotated[float, Meta(ge=0)] = 2.0
    """Truncated importance sampling: the weight trainer/engine of each token is capped here; 0 switches it off."""


class Trainer(Section, frozen=True, kw_only=True):
    """The process that learns."""

    backend: Literal["torch", "simulated"] = "torch"
    """``simulated`` sleeps ``simulated_step_s`` and publishes a few bytes; for trying the service without torch."""
    steps: Positive = 100
    """Train steps of the whole run."""
    batch_size: Positive = 8
    """Groups a step."""
    micro_tokens: Positive = 16_384
    """Padded tokens of one forward and backward pass."""
    lr: PositiveFloat = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    warmup_steps: NonNegative = 0
    """Steps of linear learning-rate warm-up."""
    grad_clip: PositiveFloat = 1.0
    """Largest L2 norm of the gradient."""
    checkpoint_every: Positive = 20
    """Steps between checkpoints; consumed payload is kept that long. One comes early when a trajectory server's map is
    half full."""
    keep_checkpoints: Positive = 2
    eval_every: NonNegative = 0
    """Steps between evaluations on the held-out prompts; 0: at the start and at the end only."""
    eval_prompts: NonNegative = 256
    """Held-out prompts used; 0 switches evaluation off."""
    threads: Positive = 1
    """Torch threads."""
    simulated_step_s: Annotated[float, Meta(ge=0)] = 0.1
    algorithm: Algorithm = field(default_factory=Algorithm)


class Scheduler(Section, frozen=True, kw_only=True):
    """The ledger's process."""

    bind: str = ""
    """``tcp://host:port`` or ``ipc://path``; empty: a socket in the run directory."""
    lease_s: PositiveFloat = 30.0
    """A worker not heard from for this long loses its leases."""
    durability: Durability = "process"
    """What an acknowledged transition survives: ``kill -9``, or a power failure too (synced before the answer)."""
    map_mb: Positive = 1024
    """Size of its LMDB map; writes are refused at 90 %."""


class Trajectories(Section, frozen=True, kw_only=True):
    """The processes that hold payload."""

    shards: Annotated[int, Meta(ge=1, le=64)] = 1
    bind: list[str] = field(default_factory=list[str])
    """One address a shard; empty: sockets in the run directory."""
    durability: Durability = "process"
    map_mb: Positive = 4096
    """Size of each shard's LMDB map; pushes are refused at 90 %."""


class Parameters(Section, frozen=True, kw_only=True):
    """The process that holds weights."""

    bind: str = ""
    durability: Durability = "process"
    keep_versions: Positive = 2
    """Newest versions kept even if nobody uses them."""
    chunk_kb: Positive = 4096
    """Bytes of one chunk to a reader on another host, in KiB."""


class Config(Section, frozen=True, kw_only=True):
    """A whole run."""

    name: str = "run"
    seed: NonNegative = 0
    """Of the prompt order, the model's build, sampling and the trainer."""
    model: Model = field(default_factory=Model)
    prompts: Prompts
    reward: Reward
    staleness: Staleness = field(default_factory=Staleness)
    rollout: Rollout = field(default_factory=Rollout)
    trainer: Trainer = field(default_factory=Trainer)
    scheduler: Scheduler = field(default_factory=Scheduler)
    trajectories: Trajectories = field(default_factory=Trajectories)
    parameters: Parameters = field(default_factory=Parameters)
