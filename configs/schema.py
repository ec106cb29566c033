"""Schema of the configuration: every key with its unit, its bounds and its effect.

``load`` decodes it from TOML and rejects unknown keys. The structs are frozen: a configuration never changes after it
was read.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from staleflow.configs.columns import Column
from staleflow.configs.elastic import Elastic
from staleflow.configs.evals import EvalSet
from staleflow.configs.launch import Launch
from staleflow.configs.lora import Lora
from staleflow.configs.metrics import Metrics
from staleflow.configs.section import (
    MOST,
    Calls,
    Groups,
    Lines,
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
    StopString,
    Text,
    Threads,
)
from staleflow.configs.simulation import Simulated, Simulation
from staleflow.configs.trainer import Trainer
from staleflow.protocols.consistency.limits import MAX_STALENESS, Bound, OnOverdue

Durability = Literal["process", "power"]
DeltaKind = Literal["off", "raw", "compressed"]
VersionStore = Literal["auto", "memory", "disk"]
Preset = Literal["", "areal", "prime-rl", "slime", "staleflow", "verl"]


class Model(Section, frozen=True, kw_only=True):
    """The policy: a model directory as written by ``save_pretrained``, including the tokenizer."""

    path: Text = ""
    """Model directory, or the hub id ``org/name`` of a model in the local Hugging Face cache. Nothing is downloaded.
    Empty: ``build`` creates one in the run directory."""
    build: Text = ""
    """Import path of a function that creates the model directory: ``module:function`` or ``file.py:function``, called
    once a run as ``build(directory, seed=..., **options)``."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of ``build``."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which engines and the trainer compute; published weights have it too."""
    matmul_precision: Literal["highest", "high"] = "highest"
    """Precision of float32 matrix products on a GPU, in trainer, engines, reference models and critic, by its name in
    ``torch.set_float32_matmul_precision``. ``high``: TF32, several times as fast on NVIDIA GPUs since Ampere; its
    mantissa has 10 bits (float32 23, bfloat16 7). No effect on what computes in bfloat16, nor on hardware without TF32,
    such as most CPUs. A vLLM server that you start takes it from ``VLLM_FLOAT32_MATMUL_PRECISION``."""
    lora: Lora = field(default_factory=Lora)

    @property
    def weights_key(self) -> str:
        """Return the key by which a new run starts from a checkpoint of this one."""
        return "model.lora.path" if self.lora.rank else "model.path"

    def starting_from(self, checkpoint: str) -> str:
        """Return the overrides with which a new run starts from a checkpoint of this one."""
        built = bool(self.build) and not self.lora.rank
        return f"{self.weights_key}={checkpoint}" + (" model.build= model.options={}" if built else "")


class PromptSource(Section, frozen=True, kw_only=True):
    """One of several sources of prompts. Set exactly one of ``path`` and ``source``."""

    path: Text = ""
    """A .jsonl or .parquet file, as ``prompts.path``."""
    source: Text = ""
    """Import path of a callable, as ``prompts.source``."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of ``source``."""
    weight: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    """Share of the prompts that come from this source, relative to the others'."""


class Prompts(Section, frozen=True, kw_only=True):
    """The source of the prompts. Set exactly one of ``path``, ``source``, ``sources`` and ``submitted``."""

    path: Text = ""
    """A .jsonl or .parquet file with one prompt a row; or ``hf://ORGANIZATION/NAME``, a dataset in the local cache of
    the Hugging Face hub: its files whose names begin with ``train``, or those of ``hf://ORGANIZATION/NAME/PATTERN``.
    Each machine with a trajectory server or a trainer needs the same snapshot in its cache."""
    source: Text = ""
    """Import path of a callable that returns an iterable of rows (dicts), called as ``source(seed=..., **options)``."""
    sources: list[PromptSource] = field(default_factory=list[PromptSource])
    """Several sources in place of one, mixed by their weights. A pass over the rows has every row at least once, and
    repeats rows of the sources that would otherwise have less than their share."""
    submitted: bool = False
    """Clients submit the rows while the run is active, each for one group (``staleflow.PromptClient``). The run waits
    while there are none. ``epochs`` has no effect."""
    max_pending: Groups = 4096
    """``submitted``: maximum number of rows that no rollout worker has taken yet. Further submissions wait."""
    max_row_bytes: Annotated[int, Meta(ge=1, le=8 << 20)] = 1 << 20
    """``submitted``: maximum size of a row in bytes; larger ones are refused. Rows lie in the scheduler's store until
    no checkpoint needs them, see ``scheduler.map_mb``."""
    eval_path: Text = ""
    """File of held-out prompts, in the format of ``path``."""
    eval_source: Text = ""
    """Import path of a source of held-out prompts, called like ``source``."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of ``source`` and ``eval_source``."""
    columns: dict[str, str] = field(default_factory=dict[str, str])
    """Renames of columns: staleflow's name = the file's name, e.g. ``prompt = "question"``. Other columns keep their
    names."""
    chat_template: bool = False
    """Format each prompt with the tokenizer's chat template, as one user message; or the messages of the row, in the
    column ``messages`` or ``prompt``, with the tools in its column ``tools``. The reward then gets the messages, and
    the text of the last user's message as ``prompt``."""
    system: Lines = ""
    """``chat_template``: system message of each prompt that has none of its own; empty: none."""
    epochs: NonNegative = 0
    """Number of passes over the rows; 0 repeats them until the trainer has finished."""


class RewardFunction(Section, frozen=True, kw_only=True):
    """One of several reward functions, each in a process of its own. Its mean over a step is the metric
    ``reward/NAME``.
    """

    run: Text
    """Import path, ``module:function`` or ``file.py:function``, of a function as in ``reward.run``."""
    weight: Annotated[float, Meta(ge=-MOST, le=MOST)] = 1.0
    """Factor of its value in the reward, which is the sum of all. 0 only records the value."""
    name: Text = ""
    """Name of its column, ``reward/NAME``, and of its metric: lower-case letters, digits and ``_``. Empty: the
    function's name."""


class Reward(Section, frozen=True, kw_only=True):
    """The stage of every run: ``reward(prompt, completion, **columns) -> float``, sync or async, in processes of its
    own. A function with an argument ``completions`` scores a group in one call and returns a list, as in TRL. Groups
    that ``rollout.filter`` releases after it skip the stages that need the reward.
    """

    run: Text = ""
    """Import path, ``module:function`` or ``file.py:function``. It may be empty if ``functions`` are set, or if the
    environment returns the reward. A function that names them also gets ``completion_ids`` (list),
    ``completion_tokens`` (their number) and ``finish_reason`` (``stop``, ``length`` or ``interrupted``)."""
    functions: list[RewardFunction] = field(default_factory=list[RewardFunction])
    """Several functions in place of ``run``; the reward is their weighted sum. They are not called, and their columns
    are 0, for groups whose environment returns the reward."""
    workers: Processes = 1
    """Number of processes that ``staleflow run`` starts; more may attach."""
    timeout_s: Seconds = 10.0
    """Maximum seconds of one call, for one sample or one list of them. A call that exceeds it is killed and counts as
    failed."""
    retries: NonNegative = 2
    """Number of retries for a sample whose call raised or timed out. After them the group has failed one try of three:
    other workers make the next tries, and after the third the group is released."""
    concurrency: Calls = 1024
    """Maximum number of concurrent calls of an ``async def`` in one worker; a group takes ``rollout.group_size`` of
    them. Any other function runs one call at a time. With a judge that replies in one second, each worker computes this
    many rewards a second: a lower number spares the judge's endpoint, and may make the reward the bottleneck of the
    run."""
    batch: Groups = 16
    """Minimum number of groups per trajectory server that a worker prefetches; with an ``async def``, as many as
    ``concurrency`` allows calls for. Each finished group is replaced by another one."""
    probe: bool = True
    """Call the function once before the run starts, on the first prompt, with the completion ``42`` and 0 for each
    column of ``needs``. The run does not start if the call raises, exceeds ``timeout_s`` or returns no finite number.
    Turn it off if a call has side effects or costs. Skipped if an environment returns numbers."""
    needs: list[Text] = field(default_factory=list[Text])
    """Columns with one value for each sample, ``stage/column``, that the reward waits for. It gets them as keyword
    arguments by their column names."""


class Stage(Section, frozen=True, kw_only=True):
    """A stage defined by the user: ``run(group, **options) -> {column: values}``, sync or async, in processes of its
    own.

    Stages run concurrently once the columns they need exist. A group is trained only after every stage has finished it.
    """

    name: Text
    """Lower-case letters, digits and ``_``. Its workers are named after it, followed by a number."""
    run: Text
    """Import path, ``module:function`` or ``file.py:function``. Called with one ``clients.stage.group.Group``."""
    makes: list[Text]
    """Columns that the stage makes, float32: ``score`` has one value for each sample, ``values:token`` one for each
    completion token."""
    needs: list[Text] = field(default_factory=list[Text])
    """Columns of other stages, ``stage/column``, that the stage waits for and gets. Empty: it starts at the push."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of ``run``."""
    workers: Processes = 1
    """Number of processes that ``staleflow run`` starts; more may attach."""
    concurrency: Calls = 1024
    """Maximum number of concurrent calls of an ``async def`` in one worker, one call a group. Any other function runs
    one call at a time. A lower number spares the service that the stage calls, and may make the stage the bottleneck of
    the run."""
    batch: Groups = 16
    """Minimum number of groups per trajectory server that a worker prefetches; with an ``async def`` at least
    ``concurrency``, all in progress. Each finished group is replaced by another one."""
    timeout_s: Seconds = 60.0
    """Maximum seconds of one call. A call that exceeds it is killed and counts as failed."""
    retries: NonNegative = 2
    """Number of retries for a group whose call raised, timed out or returned too little. After them the group has
    failed one try of three: other workers make the next tries, and after the third the group is released."""


class Environment(Section, frozen=True, kw_only=True):
    """User code that produces a trajectory of several turns; without it a trajectory is one completion of the prompt.

    A class with ``async def rollout(self, client, row)``, in processes of its own. One call produces one sample: it
    calls the policy through ``client`` (the API of ``openai.AsyncOpenAI``) and returns the reward, several numbers by
    name (with or without ``reward``), or None. Without a reward, ``reward.run`` scores the text of the whole completion
    and gets the other numbers as keyword arguments; their names must differ from the row's columns.
    ``prompts.chat_template`` has no effect on messages of the environment.
    """

    run: Text = ""
    """Import path, ``module:Class`` or ``file.py:Class``; empty: plain prompts."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of the class. Each process has one object, which plays all episodes of the process."""
    processes: Processes = 1
    """Number of processes of each rollout worker, and of the trainer during evaluation. Each plays episodes
    concurrently."""
    concurrency: Calls = 1024
    """Maximum number of episodes that one process plays at once; others wait. A crash ends all episodes of its process,
    and the innocent ones are replayed: fewer at once lose less work, and more processes keep the engine busy all the
    same."""
    timeout_s: Seconds = 120.0
    """Maximum seconds of one episode, including time spent waiting for the engine. After it the group is released."""
    max_turns: NonNegative = 0
    """Maximum number of calls in an episode, each of at most ``rollout.max_new_tokens``; 0 sets no limit."""
    memory_mb: Mebibytes = 4096
    """Maximum private memory of one process, in MiB. An allocation beyond it raises MemoryError."""
    tool_parser: Literal["auto", "hermes", "llama3_json", "mistral"] = "auto"
    """Format in which the model writes tool calls. ``hermes``: Hermes, Qwen. ``llama3_json``: Llama 3.1 to 3.3.
    ``mistral``: Mistral. ``auto``: the one that the chat template shows; without one, calls with tools are refused."""
    reasoning_parser: Literal["auto", "think", "none"] = "auto"
    """Separation of reasoning from the content of chat answers. ``think``: text up to ``</think>`` is returned as
    ``reasoning_content``. ``none``: it stays in the content. ``auto``: ``think`` if the chat template has that tag."""
    sampling_arguments: Literal["refuse", "override"] = "refuse"
    """Treatment of a call that requests sampling that the run cannot train: ``temperature``, ``top_p``, ``seed`` or
    penalties other than the run's, or ``max_tokens`` above ``rollout.max_new_tokens``. ``refuse``: error 400 that names
    the argument. ``override``: sample with the values of the run, for agents that set their own."""
    branches: Literal["refuse", "first", "last"] = "refuse"
    """Treatment of a call that does not continue the conversation of its episode: edited history, a second
    conversation, ``n`` above 1. ``refuse``: error 400 that names the difference. Otherwise it is answered, and one
    conversation is trained: ``first``: the one that the first call began; ``last``: the one that was answered last."""
    host: Text = "127.0.0.1"
    """Address that the HTTP server of the episodes binds. Other than loopback lets agents in containers and on other
    hosts call the policy: plain HTTP, with a random key for each episode; use it in a network that you trust."""
    port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    """Port of that server; 0: any free port. Workers on one machine take the first free one of 64 ports from it on."""
    advertise: Text = ""
    """Host name or address in ``client.base_url``. Empty: ``host``; for ``0.0.0.0`` and ``::`` the machine's name."""


class Reference(Section, frozen=True, kw_only=True):
    """The stage of the KL term, if ``trainer.algorithm.kl_coef`` is above 0: log-probabilities of a frozen model."""

    path: Text = ""
    """Model directory or hub id, with the policy's vocabulary. Empty: the initial model of the run."""
    dtype: Literal["", "float32", "bfloat16"] = ""
    """Dtype of the model. Empty: ``model.dtype``, so that rounding cancels where the two models agree. ``bfloat16``
    halves its memory beside a float32 policy; each log-probability then differs by some hundredths, also at step 0."""
    workers: Processes = 1
    """Number of processes that ``staleflow run`` starts, each with a copy of the model; more may attach."""
    batch: Groups = 16
    """Number of groups that a worker takes at once. Its forward passes have ``trainer.micro_tokens`` padded tokens."""
    timeout_s: Seconds = 60.0
    """Maximum seconds of one group. A worker that exceeds it loses its groups to another one."""
    threads: Threads = 0
    """Number of torch threads of a worker. 0: its share of the cores, see ``trainer.threads``."""


class Critic(Section, frozen=True, kw_only=True):
    """The stage of ``trainer.algorithm.advantage = "gae"``: a value model that learns from the groups it scores."""

    path: Text = ""
    """Model directory or hub id of the backbone, with the policy's vocabulary. Empty: the initial model of the run."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which it computes; weights, gradients and optimizer are float32 in any case. ``bfloat16`` halves its
    activations and is several times as fast on a GPU; values are rounded to two or three digits."""
    lr: PositiveFloat = 1e-5
    """Learning rate of its AdamW."""
    batch: Groups = 8
    """Number of groups that it takes at once, which is also the batch of its own train step. Its passes have
    ``trainer.micro_tokens`` padded tokens."""
    timeout_s: Seconds = 60.0
    """Maximum seconds of one group, including learning."""
    threads: Threads = 0
    """Number of torch threads. 0: its share of the cores, see ``trainer.threads``."""


class Staleness(Section, frozen=True, kw_only=True):
    """The staleness bound, which every trained batch obeys."""

    max_staleness: Annotated[int, Meta(ge=0, le=MAX_STALENESS)] = 2
    """Maximum number of versions between a trajectory's oldest token and the step that trains it. 0 is on-policy:
    generation and training take turns. Higher values keep engines busy while the trainer works, and train on older
    data. The status has one row for each version, hence the limit."""
    bound: Bound = Bound.TRAJECTORY
    """Unit of the bound. ``trajectory``: every token of a trained group obeys it. ``token``: every trained token obeys
    it, older tokens are masked, and a long trajectory never delays a step."""
    on_overdue: OnOverdue = OnOverdue.WAIT
    """Policy for groups that keep a waiting trainer from its batch (trajectory bound). ``wait``: the trainer waits and
    no token is lost. ``truncate``: they end with the tokens they have. ``retry``: they restart with the newest version.
    ``drop``: they are released, and their prompts are scheduled again a batch later. All but ``wait`` favour short
    completions; the metric ``staleness/length_bias`` shows by how much."""
    min_trainable: Share = 0.0
    """Token bound: minimum share of trainable tokens; a group with a smaller share is dropped."""


class Redundancy(Section, frozen=True, kw_only=True):
    """Over-admission against stragglers; the surplus is discarded."""

    groups: Annotated[float, Meta(ge=1, le=8)] = 1.0
    """Maximum number of live groups, as a multiple of the number that the bound admits."""
    samples: Annotated[float, Meta(ge=1, le=8)] = 1.0
    """Number of samples started for each group, as a multiple of ``group_size``; the last ones to finish are
    aborted."""


class Vllm(Section, frozen=True, kw_only=True):
    """The vLLM engine. The KV cache takes the part of the GPU share that the weights leave, or ``kv_cache_mb`` on a
    CPU.
    """

    max_model_len: NonNegative = 0
    """Maximum number of tokens of prompt and completion together; 0: the model's own context. A lower limit leaves room
    for more requests."""
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Share of each GPU's memory, including weights. Lower it where a trainer shares the GPU."""
    tensor_parallel: Processes = 1
    """Number of processes that share the model of one instance, each with a GPU, or with at least one core of a CPU."""
    kv_cache_mb: Mebibytes = 512
    """Size of the KV cache in MiB, on a CPU only."""
    prefix_caching: bool = True
    """Prefill the prompt once for all samples of a group. The cache is never shared between versions."""
    enforce_eager: bool = False
    """Disable compilation and CUDA graphs: a faster start and slower tokens. Always on with a CPU."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Other arguments of vLLM's engine, by the names of its ``AsyncEngineArgs``: ``quantization = "fp8"``. Names that
    the installed vLLM does not have are refused, and those that other keys set. vLLM checks the values."""


class VllmServer(Section, frozen=True, kw_only=True):
    """The engine ``vllm_server``: a running vLLM server on the worker's host, whose weights only this worker may
    change."""

    url: Text = "http://127.0.0.1:8000"
    """Address of the server, ``http://host:port``. If it has an API key, set VLLM_API_KEY for the worker."""


class Rollout(Section, frozen=True, kw_only=True):
    """Instances that generate trajectories."""

    engine: Text = "transformers"
    """Engine that generates. ``transformers``: continuous batching on CPUs or one GPU. ``vllm``: vLLM, an extra.
    ``vllm_server``: a vLLM server that you started. ``simulated``: sleeps by the cost model of ``[rollout.simulated]``
    and returns random tokens; needs neither model nor torch. Or the import path of a class of your own,
    ``module:Class`` or ``file.py:Class``, called as ``Class(directory, config, **engine_options)`` in each rollout
    worker with the model directory."""
    engine_options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of your own engine class."""
    workers: Processes = 1
    """Number of processes that ``staleflow run`` starts; more may attach."""
    gpus: list[NonNegative] = field(default_factory=list[NonNegative])
    """GPUs of the workers that ``staleflow run`` starts, distributed over them in order; empty: those that the trainer
    does not have, or all if it has all."""
    group_size: Groups = 8
    """Number of trajectories for each prompt."""
    max_inflight: Groups = 64
    """Number of samples that one instance decodes at once."""
    max_new_tokens: Positive = 64
    """Maximum length of a completion in tokens. A completion that reaches it is cut off, and trained unless
    ``trainer.mask_truncated`` is set."""
    temperature: Annotated[float, Meta(ge=0.001, le=1000)] = 1.0
    """Sampling temperature. Log-probabilities are those of the distribution sampled from. With vLLM at least 0.01."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Sample from the smallest set of most likely tokens whose probabilities add up to at least this (nucleus
    sampling); 1: from all. The trainer does not truncate: below 1 the importance weights of all tokens are biased, and
    the run starts with a warning. Engines apply ``repetition_penalty``, ``frequency_penalty``, ``presence_penalty``,
    ``temperature``, ``min_p``, ``top_k`` and ``top_p`` in this order."""
    top_k: NonNegative = 0
    """Sample from this number of most likely tokens; 0: from all. Biases importance weights as ``top_p`` does."""
    min_p: Share = 0.0
    """Sample from tokens that are at least this share as likely as the most likely token; 0: from all. Biases
    importance weights as ``top_p`` does."""
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    """Penalty of tokens that the prompt or the completion contain already: their positive scores are divided by it,
    negative ones multiplied. 1: none; values below 1 reward repetition. Biases importance weights as ``top_p`` does."""
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    """Subtracted from the score of each token as often as the completion contains it already (in an environment: the
    answer of this call). 0: none; negative values reward repetition. Biases importance weights as ``top_p`` does. With
    vLLM, a sample that moves to another worker starts over."""
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    """Subtracted once from the score of each token that the completion contains already; otherwise as
    ``frequency_penalty``."""
    stop: Annotated[list[StopString], Meta(max_length=16)] = field(default_factory=list[StopString])
    """Strings that end a completion, at most 16. The token that completes one is the last token of the completion; it
    is trained and part of the text that the reward gets."""
    on_update: Literal["keep", "recompute", "drain"] = "keep"
    """Treatment of samples in flight when a new version arrives. ``keep``: continue with the new weights (a new
    segment) on the KV cache of the old ones. ``recompute``: the same, after a prefill with the new weights. ``drain``:
    finish them with the old weights first."""
    handover_s: NonNegativeFloat = 0.0
    """Seconds for which a rollout worker that gets a SIGTERM hands its unfinished groups, with their tokens, over to
    other workers before it leaves; groups that finish meanwhile are pushed. At most the notice of a preemptible
    machine. What is left then is generated again elsewhere. Under a supervisor (``staleflow run``, ``launch``) at
    most 3 s. 0: it leaves at once. Episodes of an environment never move."""
    filter: Literal["", "none", "zero_spread"] = ""
    """Groups to release after the reward. ``zero_spread``: groups whose samples all have the same reward, which teach
    nothing if the advantage is relative to the group. Empty: ``zero_spread`` with ``grpo``, ``dr_grpo`` and ``rloo``,
    else ``none``."""
    weights_from: Literal["server", "mirror"] = "server"
    """Source of new versions for workers that cannot map the file of the parameter server. ``server``: the parameter
    server, or a relay. ``mirror``: the store of ``parameters.mirror``, and ``server`` while it lacks the version, is
    slow or fails."""
    threads: Threads = 0
    """Number of torch threads of an instance. 0: its share of the cores, see ``trainer.threads``."""
    pool: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Workers of several kinds in place of ``workers``, as tables ``[[rollout.pool]]``. Each has ``workers`` (default
    1) and values of its own for ``engine``, ``engine_options``, ``max_inflight``, ``threads``, ``gpus``, ``vllm``,
    ``vllm_server`` and ``simulated``; other values are those of ``[rollout]``. Pools without ``gpus`` share
    ``rollout.gpus`` in order."""
    elastic: Elastic = field(default_factory=Elastic)
    redundancy: Redundancy = field(default_factory=Redundancy)
    simulated: Simulated = field(default_factory=Simulated)
    vllm: Vllm = field(default_factory=Vllm)
    vllm_server: VllmServer = field(default_factory=VllmServer)


class Coordination(Section, frozen=True, kw_only=True):
    """Strategies for assigning groups to instances and for loading weights. They never affect the bound of
    ``[staleness]``.
    """

    routing: Literal["cost_model", "least_loaded", "round_robin", "sticky"] = "cost_model"
    """Choice of the instance for the next group. ``cost_model``: where it adds most tokens a second, by a model fitted
    to each instance's own reports; long groups first, onto the least loaded. ``least_loaded``: the smallest share of
    its capacity in use. ``round_robin``: in turn. ``sticky``: where its prompt was before, for prefix caches."""
    min_gain: Share = 0.0
    """``cost_model``: a group waits while it would add less than this share of its gain on an idle instance. Higher
    values keep engines fast and groups fresh, and start fewer groups; 0 fills every free place."""
    sync: Literal["greedy", "threshold", "idle"] = "greedy"
    """Time at which an instance loads newer weights. ``greedy``: at once. ``threshold``: when at most
    ``sync_threshold`` of its samples are left. ``idle``: when none is left. Later loads are fewer loads, and older
    data."""
    sync_threshold: Positive = 8
    """Number of remaining samples at which ``threshold`` loads."""
    migration: Literal["none", "idle", "throughput"] = "none"
    """Migration of groups in progress to another instance. ``idle``: from instances where samples queue to idle
    instances. ``throughput``: also when one instance is ``migration_gap`` times slower than another."""
    migration_gap: Annotated[float, Meta(ge=1, le=MOST)] = 2.0
    """Ratio of two instances' tokens a second for each sample from which ``throughput`` moves groups; lower moves
    more."""
    composition: Literal["iid", "length_clustered"] = "iid"
    """Choice of the prompts of a step. ``iid``: the next ones. ``length_clustered``: prompts of similar expected
    length, so that the long ones stall few steps rather than all of them; this correlates length within a step."""
    lookahead: Groups = 20
    """``length_clustered``: number of batches of prompts that are sorted together, at most 1048576 groups. More sorts
    better, and correlates more."""
    ranker: Literal["none", "history", "learned"] = "history"
    """Source of expected lengths. ``none``: no expectation. ``history``: earlier completions of the prompt.
    ``learned``: also a model of the prompt's features, for prompts not seen before."""
    admission: Literal["fill", "just_in_time"] = "just_in_time"
    """Number of groups to start. ``fill``: all that the bound admits, at once. ``just_in_time``: as many as keep
    instances busy and the trainer supplied. That gives fresher data, fewer masked tokens under the token bound, and a
    faster run where long groups stall the steps, because a later version is also a later deadline."""


class Scheduler(Section, frozen=True, kw_only=True):
    """The process of the ledger."""

    bind: Text = ""
    """Address to bind: ``tcp://host:port`` or ``ipc://path``; empty: a socket in the run directory."""
    lease_s: Seconds = 30.0
    """Seconds without a report after which a worker loses its leases."""
    durability: Durability = "process"
    """Failures that an acknowledged transition survives: ``process``: ``kill -9``; ``power``: also a power failure
    (synced before the reply)."""
    map_mb: Mebibytes = 1024
    """Size of the LMDB map in MiB; writes are refused at 90 %."""
    max_workers_per_key: Positive = 4096
    """Maximum number of live processes that are attached with one key (without keys: in total). More are refused with
    ``busy``."""


class Trajectories(Section, frozen=True, kw_only=True):
    """The processes that store the payload."""

    shards: Annotated[int, Meta(ge=1, le=64)] = 1
    """Number of trajectory servers. A group's number decides its server. Use more where one process cannot keep up."""
    bind: list[Text] = field(default_factory=list[Text])
    """One address for each shard; empty: sockets in the run directory."""
    durability: Durability = "process"
    """Failures that an acknowledged push survives: ``process``: ``kill -9``; ``power``: also a power failure (synced
    before the reply)."""
    map_mb: Mebibytes = 4096
    """Maximum payload of each shard in MiB, in its LMDB map and in slabs together; pushes are refused at 90 %. It must
    fit the shard's part of ``staleness.max_staleness`` + 1 batches of groups, otherwise the run can stall. Groups
    consumed since the last checkpoint are kept in addition; if they do not fit, a checkpoint is written early."""
    mapped: bool = True
    """Let workers on a shard's host write payload into files (slabs) in its folder, which the trainer maps; the shard
    only checks it. Turn it off if the run directory is on another machine's disk."""


class Parameters(Section, frozen=True, kw_only=True):
    """The process that stores the weights."""

    bind: Text = ""
    """Address to bind: ``tcp://host:port`` or ``ipc://path``; empty: a socket in the run directory."""
    transport: Literal["server", "direct"] = "server"
    """Path of a new version to the engines. `server`: from this process, through a file that both map, or in chunks.
    `direct`: from the trainer's rank 0, through a process group of torch.distributed (NCCL between GPUs, else gloo),
    while that version is the newest; for older versions, and after any failure, as with `server`. `direct` costs the
    trainer the main memory of one version and supports no keys. Manifests and checksums come from this process either
    way."""
    direct_bind: Text = ""
    """`direct`: address where the trainer meets engines of other hosts, ``tcp://host:port``; empty: a free port of
    loopback."""
    durability: Durability = "process"
    """Failures that a published version survives: ``process``: ``kill -9``; ``power``: also a power failure (synced
    before it counts)."""
    store: VersionStore = "auto"
    """Place of the versions, and of a relay's. `disk`: the run directory; the kernel writes each version back to the
    disk. `memory`: a folder of this user in /dev/shm, removed at the end of the run. It survives ``kill -9``; after a
    reboot the trainer publishes the version of its checkpoint again. `auto`: memory if all versions (`keep_versions` +
    3) take at most half of the free memory and fit into /dev/shm, else disk; also disk with `durability` ``power``."""
    keep_versions: Positive = 2
    """Number of newest versions to keep even if unused, as long as budget and disk have room for the next one."""
    budget_mb: Annotated[int, Meta(ge=0, le=1 << 22)] = 0
    """Maximum size of all versions together, in MiB; 0: the free space of the disk. If a new version would not fit,
    older unused ones are deleted, regardless of ``keep_versions``; a publish waits while all are in use. At least two
    versions must fit."""
    mirror: Text = ""
    """Object store or shared folder to which every published version is copied, ``s3://BUCKET/PREFIX`` or
    ``file:///FOLDER`` (an extra); the run uses a folder of its own below it. Rollout workers with
    ``rollout.weights_from = "mirror"`` and readers outside the run load from there. Endpoint and credentials come from
    the environment of each process. The mirror never delays a publish; if it is slow, it skips versions. Empty: no
    mirror."""
    chunk_kb: Annotated[int, Meta(ge=1, le=1 << 17)] = 4096
    """Size of one chunk to a reader on another host, in KiB: at most half of the largest message."""
    delta: DeltaKind = "compressed"
    """Encoding of deltas, which a reader on another host may request instead of a whole version: the bits that changed
    since the version it has, compressed by zstd, or raw (three times the bytes for a third less work). A reader
    requests deltas only where its link is slow enough for them to be faster; it then keeps one version in memory, which
    the server keeps too. `off`: always whole versions."""


class Security(Section, frozen=True, kw_only=True):
    """Access over TCP. Sockets in the run directory are protected by their file modes."""

    keys: Text = ""
    """Folder created by ``staleflow keygen``. With it every TCP connection is encrypted, and each key permits only the
    operations of its role. A process reads its role's file there, or in the folder (or the file) named by the
    environment variable STALEFLOW_KEY. Empty: no keys, and servers bind to loopback only."""
    insecure: bool = False
    """Let servers bind beyond loopback without keys. Any host that reaches them can then read, change and end the
    run."""


class Config(Section, frozen=True, kw_only=True):
    """The configuration of a whole run."""

    name: Text = "run"
    """Name of the run, used in run directories (``runs/NAME-TIMESTAMP``) and wherever the run is shown: letters,
    digits, ``.``, ``_``, ``-``."""
    preset: Preset = ""
    """Staleness rule of a known system, for every key that neither the file nor an override sets. A preset named by an
    override takes precedence over the file. The presets are in ``configs/presets``."""
    seed: Seed = 0
    """Seed of the prompt order, the model's build, sampling and the trainer; at most 4294967295, the limit of NumPy's
    generator."""
    model: Model = field(default_factory=Model)
    prompts: Prompts
    environment: Environment = field(default_factory=Environment)
    reward: Reward
    reference: Reference = field(default_factory=Reference)
    critic: Critic = field(default_factory=Critic)
    stage: list[Stage] = field(default_factory=list[Stage])
    """Additional stages, in any order."""
    column: list[Column] = field(default_factory=list[Column])
    """Typed columns that rollout workers push with their groups."""
    eval: list[EvalSet] = field(default_factory=list[EvalSet])
    """Sets of held-out prompts."""
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
