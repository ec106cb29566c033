"""``[trainer]``: backend, batches, memory, optimizer, checkpoints and held-out evaluation."""

from typing import Annotated, Literal

from msgspec import Meta, field

from staleflow.configs.algorithm import Algorithm
from staleflow.configs.section import (
    Groups,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    Share,
    Text,
    Threads,
)


class Trainer(Section, frozen=True, kw_only=True):
    """The training process."""

    run: Text = ""
    """Import path of a function ``f(run_dir)`` that trains in place of the built-in trainer, with ``staleflow.connect``
    and a ``TrainerClient``. It replaces ``backend``, evaluation and ``algorithm``; other keys of this section have an
    effect if it reads them. Empty: the built-in trainer."""
    backend: Literal["torch", "ddp", "fsdp", "deepspeed", "simulated"] = "torch"
    """``torch`` is one process; ``ddp`` keeps a whole model on each of ``nproc`` ranks, ``fsdp`` (FSDP2) and
    ``deepspeed`` (ZeRO, an extra) shard it. ``simulated`` sleeps ``simulated_step_s`` and publishes a few bytes, to try
    the service without torch. ``--resume`` may change it between ``torch``, ``ddp`` and ``fsdp``."""
    nproc: Annotated[int, Meta(ge=1, le=64)] = 1
    """Number of ranks on this machine, one GPU each if there are any. Each fetches some groups of every batch, and they
    exchange trajectories until each has about as many tokens. ``--resume`` may change it, except with ``deepspeed``."""
    gpus: list[NonNegative] = field(default_factory=list[NonNegative])
    """GPUs of the trainer that ``staleflow run`` starts, one for each rank; empty: the last GPUs of the machine that
    ``rollout.gpus`` does not name. ``--resume`` may change it."""
    zero_stage: Annotated[int, Meta(ge=0, le=3)] = 2
    """State that DeepSpeed shards: 0 nothing, 1 optimizer state, 2 also gradients, 3 also weights. 0 and 1 for float32
    only."""
    gradient_checkpointing: bool | Literal["selective"] = False
    """Recompute activations in the backward pass instead of storing them. ``true``: all of a layer but its input, for a
    third more time and far less memory. ``"selective"``: all but the results of matrix products and attention, for a
    few percent more time and about half of the memory."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """State of a GPU's trainer that is kept in main memory instead. ``optimizer`` (``backend = "torch"``): float32
    weights, gradients and moments, so that the GPU has only the weights in ``model.dtype`` and one pass's gradients, 4
    bytes a parameter in bfloat16. The CPU takes the step, and gradients are copied after each pass. ``parameters``
    (``backend = "fsdp"``): also the shards of the weights, which are copied for each layer. No effect on a CPU."""
    offload_activations: bool = False
    """Copy what the backward pass needs to main memory in the forward pass, and back when it is needed: less memory on
    the GPU, and slower by the time of the copies. With ``gradient_checkpointing = true`` these are the inputs of the
    layers, and copies are short. No effect on a CPU. Not with ``backend = "deepspeed"``."""
    packing: bool = False
    """Concatenate the trajectories of a pass in one row, without padding; ``micro_tokens`` then counts real tokens. No
    effect on a model for which ``share_prompts`` is in use."""
    share_prompts: bool = True
    """Compute the prompt of a group once, not once for each sample, and without padding; ``micro_tokens`` then counts
    the remaining tokens. The gradient is the same up to rounding. The trainer tests its model at the start: one with
    sliding windows, recurrent layers or attention biases trains without shared prompts, and the log has the reason. No
    effect with an ``attention`` other than ``auto`` and ``sdpa``, which it replaces."""
    attention: Literal["auto", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "eager"] = "auto"
    """Attention of the trained model, by its name in ``transformers``. ``sdpa`` computes each trajectory of a packed
    pass alone; ``eager``, and models that need it, use a dense mask of the pass's tokens squared. ``flash_attention_2``
    and ``flash_attention_3`` need their packages, a GPU and bfloat16; ``flex_attention`` needs a GPU. ``auto``: the
    model's default, or ``flash_attention_2`` for packing where it can be used."""
    compile: bool = False
    """Compile the decoder layers with ``torch.compile``: faster on a GPU, after a minute at the start. Lengths do not
    matter: shapes are dynamic. Needs a C compiler, on a CPU a C++ compiler. The start compares a small pass with an
    uncompiled one, and a model that cannot be compiled trains without, with a warning. Not with ``backend =
    "deepspeed"``, nor with ``gradient_checkpointing = "selective"``."""
    logit_chunk: NonNegative = 8192
    """Maximum number of completion tokens whose logits exist at a time. A pass with more computes them again, chunk by
    chunk, in its backward pass, for less memory and up to a tenth more time. 0: all at once."""
    steps: Positive = 100
    """Number of train steps of the whole run. ``--resume`` may change it; a falling ``lr_schedule`` follows it."""
    batch_size: Groups = 8
    """Number of groups for each step."""
    minibatches: Groups = 1
    """Number of optimizer updates in one pass over a step's batch, each on its share of the groups; at most
    ``batch_size``. With more than one update in a step (``minibatches`` times ``epochs``), PPO's ratio is that of the
    current policy to the policy at the start of the step. This costs one more forward pass over the batch, and a copy
    of weights and optimizer in main memory: 12 to 16 bytes a parameter. The step still publishes one version,
    and ``lr_schedule`` and ``warmup_steps`` still count steps."""
    epochs: Annotated[int, Meta(ge=1, le=64)] = 1
    """Number of passes over a step's batch, each with its groups in another order. Every group still belongs to one
    step only."""
    streaming: bool = False
    """Train the groups of a step as they arrive, while the batch still fills, so that computing overlaps with the
    rollout of the longest groups. The step is the same except for its division into passes, which then follows the
    order of the groups. Only for algorithms that need no more than one group at a time, and for steps of one update."""
    stream_groups: Groups = 1
    """``streaming``: number of groups trained at once, at least one for each rank. Fewer start earlier; more fill
    passes better."""
    mask_truncated: bool = False
    """Exclude trajectories that were cut off, by their length or by the service, from the loss (DAPO's overlong
    filtering). Their rewards still count in the mean of their group."""
    micro_tokens: Positive = 16_384
    """Number of padded tokens of one forward and backward pass; the gradients of a step's passes are summed. The first
    time that a pass is out of memory, the step starts again with half of it, which then applies until the process ends
    (not with ``fsdp``, ``deepspeed`` or ``streaming``, where the run ends)."""
    lr: PositiveFloat = 1e-6
    """Learning rate of AdamW after the warm-up. The higher it is, the more each version of staleness costs."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """``adamw``: AdamW with moments in float32, 8 bytes a parameter. ``adamw_8bit``: torchao's (an extra), with moments
    in 8 bits and a scale for each block of 256, 2 bytes a parameter; tensors below 4096 values keep float32. Updates
    are less exact, weights are not. Only with ``torch`` and ``ddp``."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's first and second moment, each at least 0 and below 1."""
    adam_eps: PositiveFloat = 1e-8
    """Term in the denominator of AdamW's update. A weight whose gradient is small beside it hardly moves."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of AdamW, applied to each weight matrix for each step, scaled by the learning rate."""
    warmup_steps: NonNegative = 0
    """Number of steps of linear learning-rate warm-up."""
    critic_warmup: NonNegative = 0
    """Number of first steps in which the policy does not change, while the critic of ``gae`` learns from their batches;
    the learning-rate warm-up and schedule start after them. Groups of the first ``staleness.max_staleness`` steps after
    it still have values from within it. 0: the critic starts at 0, which is right for ``gae_lambda`` 1 (the returns
    are then the advantages) and wrong below."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or falling to ``lr_min_share`` of ``lr`` at the last step."""
    lr_min_share: Share = 0.0
    """Share of ``lr`` at the end of the schedule."""
    router_aux_coef: Annotated[float, Meta(ge=-1, le=1)] = -1.0
    """Weight of the loss that balances the experts of a mixture of experts, beside the policy loss. It acts on every
    token of the trained trajectories, prompts included. Negative: the model's ``router_aux_loss_coef`` if its
    configuration sets ``output_router_logits``, else 0."""
    router_replay: bool = False
    """Train a mixture of experts with the experts that the engine chose (rollout routing replay, R3): each router
    selects the recorded experts for the tokens of a completion, and weighs them by its own logits, so that its gradient
    remains. Adds the column ``routed_experts``, one byte for each MoE layer and expert of a token. Only with
    ``rollout.engine`` ``transformers`` or one of your own, and without ``compile``."""
    grad_clip: PositiveFloat = 1.0
    """Maximum L2 norm of the gradient."""
    checkpoint_every: Positive = 20
    """Number of steps between checkpoints, and between snapshots of the critic of ``gae``. Sooner if a trajectory
    server is half full."""
    async_checkpoints: bool = True
    """Write a checkpoint while the next steps train. They wait only for the copy that is written: each rank copies its
    part of the optimizer to main memory, and rank 0 the model: 12 to 14 bytes a parameter in all. A rank without room
    for its copy writes before it trains. A kill meanwhile costs the steps since the checkpoint before. A stop, a drain
    and the end of the run wait for the checkpoint. False: training waits for every checkpoint."""
    overlap_publish: bool = True
    """Train the next step while a version is being published. The step waits only before its optimizer changes weights
    that are still read. Needs ``staleness.max_staleness`` of at least 1 to save time; with 0 no batch comes before the
    version is published. Weights of a GPU are copied to main memory first; with ``fsdp`` and ZeRO-3 each rank copies
    its part. Without room for the copy, training waits. A kill meanwhile costs the step whose version was not
    published. False: training waits until each version is stored."""
    keep_checkpoints: Positive = 2
    """Number of newest checkpoints to keep; version 0 is the first. If the newest one is damaged, the run resumes from
    the one before; 1 leaves no fallback. Costs disk for as many checkpoints, and for the payload of `keep_checkpoints`
    times `checkpoint_every` steps (of at most 16 checkpoints, and of two while a trajectory server is half full)."""
    max_mismatch: NonNegativeFloat = 0.5
    """Maximum divergence in nats a token between engine and trainer on tokens of the same weights. The first batch that
    has such tokens is compared, and above this value the run ends before it publishes anything of it: the two do not
    compute the same model, or do not sample at the same temperature. 0: never."""
    eval_every: NonNegative = 0
    """Number of steps between evaluations on the held-out prompts; 0: at the start and at the end only."""
    eval_prompts: NonNegative = 256
    """Number of held-out prompts to use; 0 disables evaluation."""
    threads: Threads = 0
    """Number of torch threads of each rank. 0: its share of the cores of the machine. Ranks, rollout workers, reference
    models and the critic that ``staleflow run`` starts get equal shares of at least 1, and the ranks the remainder;
    with ``staleness.max_staleness = 0`` trainer and engines take turns, and each side shares all cores. The start of
    the run prints the shares. More threads than cores slow all processes down. On machines that ``staleflow launch``
    starts, 0 is 1; in a process that you start, torch chooses, and follows ``OMP_NUM_THREADS``."""
    simulated_step_s: NonNegativeFloat = 0.1
    """Seconds of a train step with ``backend = "simulated"`` and in ``staleflow simulate``."""
    algorithm: Algorithm = field(default_factory=Algorithm)
