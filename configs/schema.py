"""What a run looks like: every key, its unit, its bounds and what it changes.

Decoded by ``load`` from TOML with unknown keys forbidden. Frozen: nothing changes a configuration after it was read.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from staleflow.configs.launch import Launch
from staleflow.configs.metrics import Metrics
from staleflow.configs.section import (
    MOST,
    Calls,
    Groups,
    Mebibytes,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Processes,
    Seconds,
    Section,
    Seed,
    Share,
    Text,
)
from staleflow.configs.simulation import Simulated, Simulation
from staleflow.protocols.consistency.limits import MAX_STALENESS, Bound, OnOverdue

Durability = Literal["process", "power"]
DeltaKind = Literal["off", "raw", "compressed"]
Preset = Literal["", "areal", "prime-rl", "slime", "staleflow", "verl"]


class Model(Section, frozen=True, kw_only=True):
    """The policy: a model directory as ``save_pretrained`` writes it, tokenizer included."""

    path: Text = ""
    """Model directory. Empty: ``build`` makes one in the run directory."""
    build: Text = ""
    """``module:function`` or ``file.py:function``, called as ``build(directory, seed=..., **options)`` once a run."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of ``build``."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What engines and the trainer compute in; published weights keep it."""


class Prompts(Section, frozen=True, kw_only=True):
    """Where prompts come from. One of ``path`` and ``source``."""

    path: Text = ""
    """A .jsonl or .parquet file, one prompt a row."""
    source: Text = ""
    """Import path of a callable that returns an iterable of rows (dicts): ``source(seed=..., **options)``."""
    eval_path: Text = ""
    """Held-out prompts, as ``path``."""
    eval_source: Text = ""
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
    """The stage that every run has: ``reward(prompt, completion, **columns) -> float``, sync or async, in processes of
    its own. What ``rollout.filter`` does not want after it goes through no stage that needs it."""

    run: Text
    """``module:function`` or ``file.py:function``. May be empty where the environment returns the reward."""
    workers: Processes = 1
    """Processes started by ``staleflow run``; more may attach."""
    timeout_s: Seconds = 10.0
    """Of one call; a call that takes longer is killed and counts as failed."""
    retries: NonNegative = 2
    """More tries for a sample whose call raised or hung; then another worker tries its group, and at last it is
    released."""
    concurrency: Calls = 1024
    """Calls of an ``async def`` that one worker has under way at once, of which a group takes ``rollout.group_size``;
    any other function is called once at a time. A judge that answers in a second gives so many rewards a second and
    worker: a lower number spares its endpoint, and may make the reward the limit of the run."""
    batch: Groups = 16
    """Groups of a trajectory server that a worker has at least; with an ``async def`` as many as ``concurrency`` has
    calls for. In the place of each that is done it takes another one."""
    probe: bool = True
    """Call the function once before the run starts: on the first prompt, with the completion ``42`` and 0 for each
    column of ``needs``. A call that raises, takes longer than ``timeout_s`` or returns no finite number refuses the
    start. Turn it off where a call has effects or costs of its own. Not done where the environment returns numbers."""
    needs: list[Text] = field(default_factory=list[Text])
    """Columns of a value a sample, ``stage/column``, that it waits for and gets as keyword arguments by their names."""


class Stage(Section, frozen=True, kw_only=True):
    """A stage of the user's own: ``run(group, **options) -> {column: values}``, sync or async, in processes of its own.

    Stages whose needs are there work at the same time. A group trains once every stage is done with it.
    """

    name: Text
    """Lower-case letters, digits and ``_``; with a number behind it the name of its workers."""
    run: Text
    """``module:function`` or ``file.py:function``. Called with one ``clients.stage.group.Group``."""
    makes: list[Text]
    """Its columns, float32: ``score`` holds a value a sample, ``values:token`` one a completion token."""
    needs: list[Text] = field(default_factory=list[Text])
    """Columns of other stages, ``stage/column``, that it waits for and gets. None: it starts with the push."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of ``run``."""
    workers: Processes = 1
    """Processes started by ``staleflow run``; more may attach."""
    concurrency: Calls = 1024
    """Calls of an ``async def``, one a group, that one worker has under way at once; any other function is called once
    at a time. A lower number spares what it asks, and may make the stage the limit of the run."""
    batch: Groups = 16
    """Groups of a trajectory server that a worker has at least; with an ``async def`` at least ``concurrency``, all of
    them under way. In the place of each that is done it takes another one."""
    timeout_s: Seconds = 60.0
    """Of one call; a call that takes longer is killed and counts as failed."""
    retries: NonNegative = 2
    """More tries for a group whose call raised, hung or gave too little; then another worker tries it, and at last it
    is released."""


class Environment(Section, frozen=True, kw_only=True):
    """User code that makes a trajectory of several turns; without it a trajectory is one answer to the prompt.

    A class with ``async def rollout(self, client, row)``, in processes of its own. One call is one sample: it speaks to
    the policy through ``client`` (the calls of ``openai.AsyncOpenAI``) and returns the reward, several numbers by name
    (``reward`` among them, or not), or None: then ``reward.run`` scores the text of the whole completion and gets other
    numbers as keyword arguments, named as no column of it. ``prompts.chat_template`` has no effect on what it writes.
    """

    run: Text = ""
    """``module:Class`` or ``file.py:Class``; empty: plain prompts."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of the class; one object a process plays all of its episodes."""
    processes: Processes = 1
    """A rollout worker's, and the trainer's while it evaluates; episodes run side by side in each."""
    concurrency: Calls = 1024
    """Episodes that one process plays at once; others wait. A crash ends all of a process, and those beside the guilty
    one are played again: fewer at once lose less by it, and more processes keep the engine busy all the same."""
    timeout_s: Seconds = 120.0
    """Of one episode, waiting for the engine included; then its group is released."""
    max_turns: NonNegative = 0
    """Calls an episode may make, each of at most ``rollout.max_new_tokens``; 0 sets no limit."""
    memory_mb: Mebibytes = 4096
    """Most private memory of one process, in MiB; what asks for more gets a MemoryError."""


class Reference(Section, frozen=True, kw_only=True):
    """The stage of the KL term, when ``trainer.algorithm.kl_coef`` is above 0: a frozen model's log-probabilities."""

    path: Text = ""
    """Model directory, with the policy's tokens. Empty: the model that the run begins with."""
    workers: Processes = 1
    """Processes started by ``staleflow run``, each with a copy of the model; more may attach."""
    batch: Groups = 16
    """Groups that a worker takes at once; its forward passes have ``trainer.micro_tokens`` padded tokens."""
    timeout_s: Seconds = 60.0
    """Of one group; a worker that takes longer loses what it has to another one."""
    threads: Processes = 1
    """Torch threads of a worker."""


class Critic(Section, frozen=True, kw_only=True):
    """The stage of ``trainer.algorithm.advantage = "gae"``: a value model that learns from the groups it judges."""

    path: Text = ""
    """Model directory of its backbone, with the policy's tokens. Empty: the model that the run begins with."""
    lr: PositiveFloat = 1e-5
    """Of its AdamW."""
    batch: Groups = 8
    """Groups that it takes at once, and groups of one step of its own; passes have ``trainer.micro_tokens``."""
    timeout_s: Seconds = 60.0
    """Of one group, learning included."""
    threads: Processes = 1
    """Torch threads."""


class Staleness(Section, frozen=True, kw_only=True):
    """The promise."""

    max_staleness: Annotated[int, Meta(ge=0, le=MAX_STALENESS)] = 2
    """Versions between a trajectory's oldest token and the step that trains it. 0 waits for every batch; more keeps
    engines busy while the trainer works, at the price of older data. A status has a row for each, hence the limit."""
    bound: Bound = Bound.TRAJECTORY
    """``trajectory``: every token of a trained group obeys the bound. ``token``: every trained token does, older ones
    are masked, and no long trajectory ever holds up a step."""
    on_overdue: OnOverdue = OnOverdue.WAIT
    """What happens to the groups that keep a waiting trainer from its batch (trajectory bound). ``wait``: nothing, the
    trainer waits and no token is lost. ``truncate``: they end with the tokens they have. ``retry``: they begin anew
    with the newest version. ``drop``: they are thrown away, and their prompts are dealt again a batch later. All but
    ``wait`` favour short answers: ``staleness/length_bias`` says how much."""
    min_trainable: Share = 0.0
    """Token bound: a group with a smaller trainable share is dropped."""


class Redundancy(Section, frozen=True, kw_only=True):
    """Over-admission against stragglers; the surplus is thrown away."""

    groups: Annotated[float, Meta(ge=1, le=8)] = 1.0
    """Live groups admitted, as a multiple of what the bound admits."""
    samples: Annotated[float, Meta(ge=1, le=8)] = 1.0
    """Samples started a group, as a multiple of ``group_size``; the last ones are aborted."""


class Vllm(Section, frozen=True, kw_only=True):
    """The vLLM engine. The KV cache takes what the weights leave of a GPU's share, or ``kv_cache_mb`` on a CPU."""

    max_model_len: NonNegative = 0
    """Most tokens of prompt and completion together; 0: the model's own context. Fewer leave room for more requests."""
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Share of each GPU's memory, weights included; less where a trainer shares the GPU."""
    tensor_parallel: Processes = 1
    """GPUs that share one instance's model."""
    kv_cache_mb: Mebibytes = 512
    """Size of the KV cache in MiB, on a CPU only."""
    prefix_caching: bool = True
    """Samples of one prompt read it once. Never shared between versions."""
    enforce_eager: bool = False
    """No compilation and no CUDA graphs: a faster start and slower tokens. Always so on a CPU."""


class Rollout(Section, frozen=True, kw_only=True):
    """Instances that write trajectories."""

    engine: Literal["transformers", "vllm", "simulated"] = "transformers"
    """What writes. ``transformers``: continuous batching on CPUs or one GPU. ``vllm``: vLLM, an extra. ``simulated``:
    sleeps by the cost model of ``[rollout.simulated]`` and writes random tokens; needs neither model nor torch."""
    workers: Processes = 1
    """Processes started by ``staleflow run``; more may attach."""
    gpus: list[NonNegative] = field(default_factory=list[NonNegative])
    """GPUs of the workers that ``staleflow run`` starts, shared out over them in order; empty: all there are."""
    group_size: Groups = 8
    """Trajectories a prompt."""
    max_inflight: Groups = 64
    """Samples that one instance decodes at once."""
    max_new_tokens: Positive = 64
    """Longest completion in tokens; one that reaches it is cut off, and trained unless ``trainer.mask_truncated``."""
    temperature: Annotated[float, Meta(ge=0.001, le=1000)] = 1.0
    """Of the sampling; log-probabilities are those of the distribution sampled from. With vLLM at least 0.01."""
    on_update: Literal["keep", "recompute", "drain"] = "keep"
    """In-flight samples when a new version comes. ``keep``: go on with the new weights (a new segment) over the KV
    cache of the old ones. ``recompute``: the same, read in anew by the new weights first. ``drain``: end first."""
    filter: Literal["", "none", "zero_spread"] = ""
    """Groups released after the reward. ``zero_spread``: those whose samples all have the same reward, which teach
    nothing if the advantage is against the group. Empty: these with ``grpo``, ``dr_grpo`` and ``rloo``, else none."""
    threads: Processes = 1
    """Torch threads of an instance."""
    redundancy: Redundancy = field(default_factory=Redundancy)
    simulated: Simulated = field(default_factory=Simulated)
    vllm: Vllm = field(default_factory=Vllm)


class Coordination(Section, frozen=True, kw_only=True):
    """Who generates what, when, with which weights. None of it touches the promise of ``[staleness]``."""

    routing: Literal["cost_model", "least_loaded", "round_robin", "sticky"] = "cost_model"
    """Which instance gets the next group. ``cost_model``: where it adds most tokens a second, by a model fitted to each
    instance's own reports; long groups first, onto the least loaded. ``least_loaded``: the smallest share of its
    capacity in use. ``round_robin``: in turn. ``sticky``: where its prompt was before, for prefix caches."""
    min_gain: Share = 0.0
    """``cost_model``: a group waits while it would add less than this share of what it adds to an idle instance. Higher
    keeps engines fast and groups fresh, and starts fewer; 0 starts whatever there is a place for."""
    sync: Literal["greedy", "threshold", "idle"] = "greedy"
    """When an instance loads newer weights. ``greedy``: at once. ``threshold``: when at most ``sync_threshold`` samples
    run on it. ``idle``: when none does. The later, the fewer loads, and the older what it writes."""
    sync_threshold: Positive = 8
    """Running samples at which ``threshold`` loads."""
    migration: Literal["none", "idle", "throughput"] = "none"
    """Groups under way that go on elsewhere. ``idle``: from instances where samples queue to instances with nothing to
    do. ``throughput``: also when one is ``migration_gap`` times slower than another."""
    migration_gap: Annotated[float, Meta(ge=1, le=MOST)] = 2.0
    """Ratio of two instances' tokens a second a sample from which ``throughput`` moves groups; lower moves more."""
    composition: Literal["iid", "length_clustered"] = "iid"
    """Which prompts share a step. ``iid``: the next ones. ``length_clustered``: ones of like expected length, so that
    the long ones stall few steps rather than all of them; correlates length within a step."""
    lookahead: Groups = 20
    """``length_clustered``: batches of prompts put in order together, at most 1048576 groups. More sorts better, and
    correlates more."""
    ranker: Literal["none", "history", "learned"] = "history"
    """How lengths are expected. ``history``: what the prompt had before. ``learned``: also a model of the prompt's
    features, for those not seen yet."""
    admission: Literal["fill", "just_in_time"] = "just_in_time"
    """How many groups are started. ``fill``: as many as the bound admits, at once. ``just_in_time``: as many as keep
    instances busy and the trainer fed: fresher data, fewer masked tokens under the token bound, and where long groups
    stall the steps a faster run, since a later version is also a later deadline."""


class Algorithm(Section, frozen=True, kw_only=True):
    """From rewards to gradients. A key that means nothing with the chosen loss is left at its default."""

    advantage: Text = "grpo"
    """``grpo``, ``dr_grpo``, ``rloo``: against the group. ``reinforce_pp``: against the batch. ``gae``: against a
    critic, token by token; starts the critic stage. Or the import path of ``f(rewards [N], group_ids [N]) -> [N]``,
    tensors; with an argument ``stages`` it gets the stages' columns of one value a sample too."""
    loss: Text = "ppo_clip"
    """``ppo_clip``, ``gspo``, ``cispo``, ``aipo``, ``m2po``, ``opsm``; all but the first bound the ratio to the engine,
    so they need no ``correction``. Or the import path of ``f(logprobs, old, behavior, advantages, row) -> loss``,
    tensors over the trained tokens of some whole trajectories; the mean over the batch's tokens is trained. With an
    argument ``stages`` it gets their columns of one value a token too."""
    ratio_to: Literal["old", "behavior"] = "old"
    """What PPO's ratio refers to. ``old``: the weights that the step begins with; the clip is idle and ``correction``
    answers for staleness. ``behavior``: the engine's; the clip answers for it, and stale tokens lose their gradient."""
    clip_low: PositiveFloat = 0.2
    """PPO ratio is clipped below 1 - ``clip_low``."""
    clip_high: PositiveFloat = 0.2
    """PPO ratio is clipped above 1 + ``clip_high``."""
    dual_clip: NonNegativeFloat = 0.0
    """Second clip, for negative advantages: a ratio above it (3, say) pushes no harder. 0 switches it off."""
    correction: Literal["none", "tis", "decoupled", "masked_is", "masked_is_sequence"] = "tis"
    """What becomes of the weight k = trainer/engine of each token. ``none``: 1, old data is taken for new. ``tis``: k
    up to ``tis_cap``. ``decoupled``: k, without bias and without bound. ``masked_is``: k, and tokens outside of
    ``mask_low`` to ``mask_high`` are left out (IcePop). ``masked_is_sequence``: the product over the trajectory, up to
    ``sequence_cap``, and trajectories above it are left out."""
    tis_cap: PositiveFloat = 2.0
    """Largest weight; lower loses more of what old data says, higher makes gradients noisier."""
    mask_low: NonNegativeFloat = 0.5
    """Weights below it are 0. A narrow band up to ``mask_high`` learns from less, and from what is nearly its own."""
    mask_high: PositiveFloat = 5.0
    """Weights above it are 0."""
    sequence_cap: PositiveFloat = 2.0
    """Products above it are 0. Products of long trajectories spread widely: expect many."""
    gspo_low: PositiveFloat = 3e-4
    """The length-normalised ratio of a trajectory is clipped below 1 - ``gspo_low``. Staleness moves it by far more
    than one step's mini-batches do: widen both bounds with ``staleness.max_staleness``."""
    gspo_high: PositiveFloat = 4e-4
    """The same ratio is clipped above 1 + ``gspo_high``."""
    cispo_low: PositiveFloat = 1.0
    """The weight is at least 1 - ``cispo_low``; 1 is no bound. A token keeps its gradient in any case."""
    cispo_high: PositiveFloat = 4.0
    """The weight is at most 1 + ``cispo_high``."""
    aipo_cap: PositiveFloat = 4.0
    """Largest weight; 2 to 10 are usual."""
    m2_threshold: PositiveFloat = 0.04
    """Largest mean of the squared log-ratio over what PPO could clip (good tokens grown likelier, bad ones less
    likely); the farthest of these are left out until it holds. Costs a second forward pass."""
    opsm_delta: PositiveFloat = 0.01
    """Bad trajectories that the model has moved away from by more than this, in nats a token, are left out."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the divergence from the reference model; starts the reference stage. 0: no such term, no such stage."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """Its estimator: ``k2`` has the gradient of KL, ``k1`` the same with an unbiased value, ``k3`` one that pushes less
    where the model has grown surer than the reference."""
    kl_in_reward: bool = False
    """Take ``kl_coef`` x (engine - reference) log-probabilities off each token's reward instead (``gae``,
    ``reinforce_pp``)."""
    gamma: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Discount a token (``gae``)."""
    gae_lambda: Share = 1.0
    """1 trusts what was earned, without bias; 0 trusts the critic, without noise (``gae``)."""


class Trainer(Section, frozen=True, kw_only=True):
    """The process that learns."""

    backend: Literal["torch", "ddp", "fsdp", "deepspeed", "simulated"] = "torch"
    """``torch`` is one process; ``ddp`` has a whole model on each of ``nproc`` ranks, ``fsdp`` (FSDP2) and
    ``deepspeed`` (ZeRO, an extra) shard it. ``simulated`` sleeps ``simulated_step_s`` and publishes a few bytes; for
    trying the service without torch."""
    nproc: Annotated[int, Meta(ge=1, le=64)] = 1
    """Ranks on this machine, one GPU each where there are any; each trains its share of every batch's groups."""
    gpus: list[NonNegative] = field(default_factory=list[NonNegative])
    """GPUs of the trainer that ``staleflow run`` starts, one a rank; empty: all of this machine's."""
    zero_stage: Annotated[int, Meta(ge=0, le=3)] = 2
    """What DeepSpeed shards: 1 optimizer state, 2 gradients too, 3 weights too; 0 nothing. 0 and 1 for float32 only."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: a third more time, far less memory."""
    packing: bool = False
    """Trajectories of a pass one behind the other in one row, without padding; ``micro_tokens`` are real ones then."""
    steps: Positive = 100
    """Train steps of the whole run. The only key that ``--resume`` may change; a falling ``lr_schedule`` follows it."""
    batch_size: Groups = 8
    """Groups a step."""
    streaming: bool = False
    """Train a step's groups as they come, while its batch still fills: hides a step's computing behind the rollout of
    its longest groups. The same step, but for the cut into passes, which is by groups in their order then. For
    algorithms that need no more than a group at once."""
    stream_groups: Groups = 1
    """``streaming``: groups trained at once, one at least a rank. Fewer start earlier; more fill passes better."""
    mask_truncated: bool = False
    """Leave trajectories that were cut off, by their length or by the service, out of the loss (DAPO's overlong
    filtering). Their rewards still count in their group's mean."""
    micro_tokens: Positive = 16_384
    """Padded tokens of one forward and backward pass; the gradients of a step's passes add up."""
    lr: PositiveFloat = 1e-6
    """AdamW's learning rate after the warm-up. The higher, the more a version of age costs."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay of the first and second moment, each from 0 up to but not including 1."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's, a step and unit of learning rate, off each weight matrix."""
    warmup_steps: NonNegative = 0
    """Steps of linear learning-rate warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: as it is, or down to ``lr_min_share`` of it at the last step."""
    lr_min_share: Share = 0.0
    """Share of ``lr`` that the schedule ends at."""
    grad_clip: PositiveFloat = 1.0
    """Largest L2 norm of the gradient."""
    checkpoint_every: Positive = 20
    """Steps between checkpoints. Sooner when a trajectory server is half full."""
    keep_checkpoints: Positive = 2
    """Newest checkpoints kept, version 0 being the first. Where the newest is damaged, the run resumes from the one
    before. Costs the disk of so many, and of the payload of `keep_checkpoints` times `checkpoint_every` steps (of 16
    checkpoints at most, of two while a trajectory server is half full). 1: no fallback."""
    eval_every: NonNegative = 0
    """Steps between evaluations on the held-out prompts; 0: at the start and at the end only."""
    eval_prompts: NonNegative = 256
    """Held-out prompts used; 0 switches evaluation off."""
    threads: Processes = 1
    """Torch threads."""
    simulated_step_s: NonNegativeFloat = 0.1
    """Seconds of a train step with ``backend = "simulated"`` and in ``staleflow simulate``."""
    algorithm: Algorithm = field(default_factory=Algorithm)


class Scheduler(Section, frozen=True, kw_only=True):
    """The ledger's process."""

    bind: Text = ""
    """``tcp://host:port`` or ``ipc://path``; empty: a socket in the run directory."""
    lease_s: Seconds = 30.0
    """A worker not heard from for this long loses its leases."""
    durability: Durability = "process"
    """What an acknowledged transition survives: ``kill -9``, or a power failure too (synced before the answer)."""
    map_mb: Mebibytes = 1024
    """Size of its LMDB map; writes are refused at 90 %."""
    max_workers_per_key: Positive = 4096
    """Live processes that may attach with one key (without keys: in all). More are refused ``busy``."""


class Trajectories(Section, frozen=True, kw_only=True):
    """The processes that hold payload."""

    shards: Annotated[int, Meta(ge=1, le=64)] = 1
    """Trajectory servers; a group lives at one of them, chosen by its number. More where one process cannot keep up."""
    bind: list[Text] = field(default_factory=list[Text])
    """One address a shard; empty: sockets in the run directory."""
    durability: Durability = "process"
    """What an acknowledged push survives: ``kill -9``, or a power failure too (synced before the answer)."""
    map_mb: Mebibytes = 4096
    """Payload that each shard holds, in its LMDB map and in slabs together; pushes are refused at 90 %. That must hold
    the shard's part of ``staleness.max_staleness`` + 1 batches of groups: if it does not, the run can come to a stand.
    What was consumed since the last checkpoint comes on top; where it has no room, a checkpoint is written early."""
    mapped: bool = True
    """Workers on a shard's host write payload into files (slabs) in its folder, which the trainer maps; the shard only
    checks it. Turn it off where the run directory is on a disk of another machine."""


class Parameters(Section, frozen=True, kw_only=True):
    """The process that holds weights."""

    bind: Text = ""
    """``tcp://host:port`` or ``ipc://path``; empty: a socket in the run directory."""
    transport: Literal["server", "direct"] = "server"
    """How engines get a new version. `server`: from this process, through a file that both see, or in chunks. `direct`:
    from the trainer's rank 0 itself, through a process group of torch.distributed (NCCL between GPUs, else gloo), while
    that is the newest version; then, and whenever it fails, as with `server`. Costs the trainer a version more in main
    memory, and has no keys. What a version is, and whether its bytes are right, this process says either way."""
    direct_bind: Text = ""
    """`direct`: ``tcp://host:port`` where the trainer meets engines of other hosts; empty: a free port of loopback."""
    durability: Durability = "process"
    """What a published version survives: ``kill -9``, or a power failure too (synced before it counts)."""
    keep_versions: Positive = 2
    """Newest versions kept even if nobody uses them, as long as budget and disk have room for the next one."""
    budget_mb: Annotated[int, Meta(ge=0, le=1 << 22)] = 0
    """MiB of all versions together; 0: what the disk holds. Where a new version would not fit, older ones go that
    nobody uses, whatever ``keep_versions`` says; a publish waits while all are in use. At least two versions must
    fit."""
    chunk_kb: Annotated[int, Meta(ge=1, le=1 << 17)] = 4096
    """Bytes of one chunk to a reader on another host, in KiB: at most half of the largest message."""
    delta: DeltaKind = "compressed"
    """What a reader on another host may get instead of a whole version: the bits that changed since the one it has,
    through zstd, or raw (three times the bytes, for a third less work). It asks only where its link is so slow that
    this is faster, and keeps one version in memory for it, which the server keeps too. `off`: always whole versions."""


class Security(Section, frozen=True, kw_only=True):
    """Who may connect over TCP. Sockets in the run directory are guarded by the modes of their files."""

    keys: Text = ""
    """Folder made by ``staleflow keygen``: every TCP connection is encrypted, and each key may do what its role may.
    A process takes its role's file there, or in the folder that the environment's STALEFLOW_KEY names (it may name the
    file, too). Empty: no keys, and servers bind to loopback only."""
    insecure: bool = False
    """Let servers bind beyond loopback without keys: whoever reaches them can read, change and end the run."""


class Config(Section, frozen=True, kw_only=True):
    """A whole run."""

    name: Text = "run"
    """Of run directories (``runs/NAME-TIMESTAMP``) and all that shows the run: letters, digits, ``.``, ``_``, ``-``."""
    preset: Preset = ""
    """Rule of a system that people know, for every key that neither the file nor an override sets. Named by an
    override it comes before the file. ``configs/presets`` has them."""
    seed: Seed = 0
    """Of the prompt order, the model's build, sampling and the trainer; at most what numpy's generator takes."""
    model: Model = field(default_factory=Model)
    prompts: Prompts
    environment: Environment = field(default_factory=Environment)
    reward: Reward
    reference: Reference = field(default_factory=Reference)
    critic: Critic = field(default_factory=Critic)
    stage: list[Stage] = field(default_factory=list[Stage])
    """More stages, in any order."""
    staleness: Staleness = field(default_factory=Staleness)
    rollout: Rollout = field(default_factory=Rollout)
    coordination: Coordination = field(default_factory=Coordination)
    trainer: Trainer = field(default_factory=Trainer)
    scheduler: Scheduler = field(default_factory=Scheduler)
    trajectories: Trajectories = field(default_factory=Trajectories)
    parameters: Parameters = field(default_factory=Parameters)
    security: Security = field(default_factory=Security)
    metrics: Metrics = field(default_factory=Metrics)
    launch: Launch = field(default_factory=Launch)
    simulation: Simulation = field(default_factory=Simulation)
