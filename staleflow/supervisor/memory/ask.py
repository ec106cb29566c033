"""Obtain a plan: find the model, measure its passes in a process of their own, and read the free memory."""

import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

import msgspec

from staleflow.clients.memory.question import Measured, Question
from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.hub import locate_model
from staleflow.configs.placement import place
from staleflow.configs.schema import Config
from staleflow.configs.stages import stages
from staleflow.process.main_memory import available
from staleflow.protocols.wire.stages import CRITIC, REFERENCE
from staleflow.supervisor.memory.plan import Plan, plan

PROMPT_TOKENS = 512
"""Assumed length of a prompt, which no key gives."""
TIMEOUT_S = 300.0
LARGE_MODEL_BYTES = 1 << 30
"""Weights from which a run prints its plan. The plan takes seconds, mostly the import of torch; loading a smaller model
takes less."""
_GPU_MEMORY = """
import torch
for gpu in range(torch.cuda.device_count()):
    print("memory", *torch.cuda.mem_get_info(gpu))
"""


def model_directory(config: Config, run_dir: Path | None = None) -> Path | None:
    """Return the policy's model directory; None if the run has yet to build it. ``ConfigError`` if it is missing."""
    if run_dir is not None and (run_dir / "model").is_dir():
        return run_dir / "model"
    if not config.model.path:
        return None
    directory = locate_model(config.model.path)
    if not (directory / "config.json").is_file():
        raise ConfigError("model.path", config.model.path, "a memory plan needs the config.json of the model in it")
    return directory


def is_large(directory: Path) -> bool:
    """Return whether a run with this model prints its plan."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors")) >= LARGE_MODEL_BYTES


def plan_of(
    config: Config,
    directory: Path,
    gpus: int,
    *,
    prompt_tokens: int = PROMPT_TOKENS,
    gpu_bytes: int = 0,
) -> Plan:
    """Return the plan of a run with ``gpus`` GPUs of ``gpu_bytes`` each; 0: those of this machine.

    ``ConfigError`` if the models cannot be built.
    """
    used = stages(config)
    measured = measure(
        Question(
            config=config,
            directory=str(directory.resolve()),
            reference=_stage_model(config.reference.path, directory) if REFERENCE in used else "",
            critic=_stage_model(config.critic.path, directory) if CRITIC in used else "",
            prompt_tokens=prompt_tokens,
            gpu=gpus > 0,
        )
    )
    memory = dict.fromkeys(range(gpus), (gpu_bytes, gpu_bytes)) if gpu_bytes else gpu_memory() if gpus else {}
    free: dict[int | None, int] = {None: available()}
    free |= {gpu: nbytes for gpu, (nbytes, _) in memory.items()}
    totals = {gpu: total for gpu, (_, total) in memory.items()}
    return plan(config, measured, place(config, gpus), prompt_tokens=prompt_tokens, free=free, totals=totals)


def _stage_model(path: str, policy: Path) -> str:
    return str(locate_model(path) if path else policy.resolve())


def measure(question: Question) -> Measured:
    """Measure in a process of its own, so that this one does not import torch."""
    command = [sys.executable, "-m", "staleflow.clients.memory.measure"]
    what = ("memory plan", question.directory)
    try:
        done = subprocess.run(
            command, input=msgspec.json.encode(question), capture_output=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(*what, f"building the model without weights took over {TIMEOUT_S:g} s") from None
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(done.stdout.rpartition(b"\n")[2], type=Measured)
    last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2] or f"exit code {done.returncode}"
    raise ConfigError(*what, f"the model must be one that transformers can build from its config.json: {last}")


@cache
def gpu_memory() -> Mapping[int, tuple[int, int]]:
    """Return the free and the total bytes of each GPU of this machine; empty if torch cannot read them."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _GPU_MEMORY], capture_output=True, text=True, timeout=120, check=False
        )
    except subprocess.TimeoutExpired:
        return {}
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("memory ")]
    return {gpu: (int(free), int(total)) for gpu, (_, free, total) in enumerate(lines)}
