"""Estimate the memory of every process of a run, and compare it with that of its GPU or of the machine. Pure.

Weights, gradients and moments are counted from the sizes of the model; passes are measured (``clients.memory``). Sums
are those of the worst moment: AdamW's moments exist from the first step on.
"""

from collections.abc import Iterator, Mapping

import msgspec

from staleflow.clients.memory.question import Measured
from staleflow.configs.placement import GPUs, Placement
from staleflow.configs.pools import workers
from staleflow.configs.schema import Config
from staleflow.configs.stages import stages
from staleflow.configs.version_store import in_memory, room_for
from staleflow.protocols.wire.stages import CRITIC, REFERENCE

RUNTIME_BYTES = 512 << 20
"""Memory of a process beside its tensors: the CUDA context and its libraries, or torch itself in main memory."""
SAMPLING_BYTES = 16
"""Bytes for each logit that the ``transformers`` engine samples from: four float32 arrays exist at once."""
ZERO_BUCKET = 500_000_000
"""DeepSpeed's default number of elements of a communication buffer."""
VERSIONS = "parameters"
"""Process of the versions that lie in main memory."""
WIDTH = {"float32": 4, "bfloat16": 2}
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "kv_cache", "buffers")


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one process on one device."""

    process: str
    gpu: int | None = None
    """None: main memory."""
    weights: int = 0
    """With float32 copies of weights in another dtype."""
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    kv_cache: int = 0
    buffers: int = 0
    """Gathered layers, buffers of collectives, and the runtime itself."""

    @property
    def total(self) -> int:
        return sum(getattr(self, part) for part in PARTS)


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU or the main memory, with the processes on it."""

    gpu: int | None
    free: int
    """Bytes that were free before the run; 0: unknown."""
    uses: list[Use]

    @property
    def needed(self) -> int:
        return sum(use.total for use in self.uses)

    @property
    def fits(self) -> bool:
        """True as well if the free memory is unknown."""
        return not self.free or self.needed <= self.free


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a run on one machine."""

    prompt_tokens: int
    """Assumed length of a prompt."""
    measured: Measured
    devices: list[Device]
    unknown: list[str]
    """Processes and passes that the plan leaves out, each with the reason."""


def plan(
    config: Config,
    measured: Measured,
    placement: Placement,
    *,
    prompt_tokens: int,
    free: Mapping[int | None, int],
    totals: Mapping[int, int],
) -> Plan:
    """Return the plan. ``free``: bytes of each GPU, and of the main memory (None); ``totals``: sizes of the GPUs."""
    prompt = min(prompt_tokens, (measured.context or 1 << 62) - 1)
    unknown = [f"{problem}: not estimated" for problem in measured.problems]
    uses: list[Use] = []
    if config.trainer.backend != "simulated" and not config.trainer.run:
        uses += trainer(config, measured, placement.trainer)
    elif config.trainer.run:
        unknown.append("the trainer: its code is that of trainer.run")
    for number, (worker, gpus) in enumerate(zip(workers(config), placement.rollout, strict=True)):
        uses += engine(worker, measured, number, gpus, totals)
        if worker.rollout.engine not in ("transformers", "vllm", "simulated"):
            unknown.append(f"rollout-{number}: engine {worker.rollout.engine} has memory of its own")
    uses += models(config, measured, placement)
    if in_memory(config.parameters, measured.trained_weights, free.get(None, 0)):
        uses.append(Use(process=VERSIONS, weights=room_for(config.parameters, measured.trained_weights)))
    devices = [
        Device(gpu=gpu, free=free.get(gpu, 0), uses=[use for use in uses if use.gpu == gpu])
        for gpu in sorted({use.gpu for use in uses}, key=lambda gpu: (gpu is None, gpu or 0))
    ]
    return Plan(prompt_tokens=prompt, measured=measured, devices=devices, unknown=unknown)


def trainer(config: Config, measured: Measured, gpus: GPUs) -> Iterator[Use]:
    """Yield each rank, and in main memory what it keeps beside its GPU."""
    settings, ranks = config.trainer, config.trainer.nproc
    width, trained = WIDTH[config.model.dtype], measured.trained
    kept = {"weights": measured.weights + 4 * measured.narrow, "gradients": 4 * trained, "optimizer": 8 * trained}
    if settings.optimizer == "adamw_8bit":
        kept["optimizer"] = 2 * trained
    elsewhere = dict[str, int]()
    """Bytes of each rank in main memory, if the rank has a GPU."""
    buffers = 0
    bucket = min(ZERO_BUCKET, trained) * width
    match settings.backend, settings.zero_stage:
        case "ddp", _:
            buffers = measured.trained_weights  # one bucket for each gradient
        case "fsdp", _:
            kept = {part: nbytes // ranks for part, nbytes in _float32(trained).items()}
            # The root stays gathered during a pass, with two layers; gradients are reduced in float32.
            buffers = measured.outside * (2 * width + 4) + measured.layer * (3 * width + 4)
        case "deepspeed", 1:
            kept |= {"weights": 4 * trained + 4 * trained // ranks, "optimizer": 8 * trained // ranks}
            buffers = bucket
        case "deepspeed", 2:
            kept = {part: nbytes // ranks for part, nbytes in _float32(trained).items()}
            kept["weights"] += width * trained
            buffers = 2 * bucket
        case "deepspeed", 3:
            kept = {part: nbytes // ranks for part, nbytes in _float32(trained).items()}
            kept["weights"] += width * trained // ranks
            buffers = measured.outside * 2 * width + measured.layer * 2 * width + 2 * bucket
        case _:
            pass
    if settings.offload != "none" and gpus:
        on_gpu = {"weights": measured.weights, "gradients": width * trained} if settings.offload == "optimizer" else {}
        elsewhere = {"weights": kept["weights"] - on_gpu.get("weights", 0)} | {
            part: kept[part] for part in ("gradients", "optimizer")
        }
        kept = on_gpu
    passes = {"activations": int(measured.activations * fill(config, measured)), "logits": measured.logits}
    in_pass = sum(passes.values())
    for rank in range(ranks):
        needs = kept | passes | {"buffers": buffers + RUNTIME_BYTES}
        if settings.eval_prompts and rank == 0 and (cache := _cache(config, measured)) > in_pass:
            needs |= {"activations": 0, "logits": 0, "kv_cache": cache}  # the evaluation, not a pass, is the peak
        name = f"trainer rank {rank}" if ranks > 1 else "trainer"
        yield Use(process=name, gpu=gpus[rank] if gpus else None, **needs)
        if elsewhere:
            yield Use(process=f"{name}, offloaded", **elsewhere)
    copies = 0
    if settings.minibatches * settings.epochs > 1:
        state = {**kept, **elsewhere}
        copies += state["weights"] + state["optimizer"]
    if config.parameters.transport == "direct":
        copies += measured.trained_weights
    if copies:
        yield Use(process="trainer, copies", buffers=copies)


def fill(config: Config, measured: Measured) -> float:
    """Return the tokens of a full pass over those of the measured one: shorter completions fill passes completely."""
    if measured.complete or not measured.pass_tokens:
        return 1.0
    return max(1.0, config.trainer.micro_tokens / measured.pass_tokens)


def engine(config: Config, measured: Measured, number: int, gpus: GPUs, totals: Mapping[int, int]) -> Iterator[Use]:
    """Yield a rollout worker on each of its GPUs, or in main memory."""
    name, rollout = f"rollout-{number}", config.rollout
    if rollout.engine == "transformers":
        yield Use(
            process=name,
            gpu=gpus[0] if gpus else None,
            weights=measured.weights,
            kv_cache=_cache(config, measured),
            activations=measured.prefill,
            logits=rollout.max_inflight * measured.vocabulary * SAMPLING_BYTES,
            buffers=RUNTIME_BYTES,
        )
    elif rollout.engine == "vllm" and not gpus:
        cache = rollout.vllm.kv_cache_mb << 20
        yield Use(process=name, weights=measured.weights, kv_cache=cache, buffers=RUNTIME_BYTES)
    elif rollout.engine == "vllm":
        for gpu in gpus:
            reserved = int(rollout.vllm.gpu_memory_utilization * totals.get(gpu, 0))
            weights = measured.weights // rollout.vllm.tensor_parallel
            yield Use(process=name, gpu=gpu, weights=weights, kv_cache=max(0, reserved - weights))


def models(config: Config, measured: Measured, placement: Placement) -> Iterator[Use]:
    """Yield the workers of the reference and of the critic."""
    used = stages(config)
    if REFERENCE in used:
        for number, gpus in enumerate(placement.stages.get(REFERENCE, ())):
            yield Use(
                process=f"{REFERENCE}-{number}",
                gpu=gpus[0] if gpus else None,
                weights=measured.reference_parameters * WIDTH[config.reference.dtype or config.model.dtype],
                activations=measured.reference_pass,
                buffers=RUNTIME_BYTES,
            )
    if CRITIC in used:
        for number, gpus in enumerate(placement.stages.get(CRITIC, ())):
            yield Use(
                process=f"{CRITIC}-{number}",
                gpu=gpus[0] if gpus else None,
                **_float32(measured.critic_parameters),
                activations=measured.critic_pass,
                buffers=RUNTIME_BYTES,
            )


def _float32(parameters: int) -> dict[str, int]:
    return {"weights": 4 * parameters, "gradients": 4 * parameters, "optimizer": 8 * parameters}


def _cache(config: Config, measured: Measured) -> int:
    """Return the bytes of the ``transformers`` engine's cache once it has its largest capacity."""
    return config.rollout.max_inflight * measured.kv_capacity * measured.kv_token


def remedy(config: Config, device: Device) -> str:
    """Return the keys to change for a device that is too small: those of its largest part."""
    use, part = max(((use, part) for use in device.uses for part in PARTS), key=lambda pair: getattr(*pair))
    if use.process == VERSIONS:
        return 'set parameters.store to "disk"'
    shared = len(device.uses) > 1
    if use.process.startswith("rollout"):
        if config.rollout.engine == "vllm":
            return "lower rollout.vllm." + ("kv_cache_mb" if device.gpu is None else "gpu_memory_utilization")
        return "lower rollout.max_inflight or rollout.max_new_tokens"
    if part in ("activations", "logits"):
        micro = f"lower trainer.micro_tokens ({config.trainer.micro_tokens})"
        if part == "logits":
            return f"{micro} or trainer.logit_chunk ({config.trainer.logit_chunk})"
        return micro if config.trainer.gradient_checkpointing else f"{micro}, or set trainer.gradient_checkpointing"
    if use.process.startswith((REFERENCE, CRITIC)):
        return f"give {use.process} a GPU of its own, or set {use.process.partition('-')[0]}.path to a smaller model"
    if part == "kv_cache":
        return "lower rollout.max_inflight, which is also the evaluation's, or set trainer.eval_prompts to 0"
    apart = "give the trainer GPUs of its own (trainer.gpus), or " if shared and device.gpu is not None else ""
    return (
        f'{apart}train an adapter (model.lora.rank), or shard over more ranks (trainer.backend "fsdp", trainer.nproc)'
    )
