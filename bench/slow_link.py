"""Real engines behind a slow link: weights to a second site through a relay, whole, as deltas, and as LoRA adapters.

Each run is ``staleflow launch`` over three network namespaces, as on three machines: the servers, the trainer, and an
engine with a relay. The engine's link has a limited rate in both directions (and 20 ms of delay, if the kernel has
netem), or no limit, as in the local run. Engine and trainer are real. The output has the train steps per minute, the
median time from the publication of a version until the engine has loaded it, and the bytes that the engine's host
received per step. Needs root, iproute2 and, for SmolLM2, the extras that ``configs/smollm2.toml`` names.

    python -m bench.slow_link [--mbit 20] [--steps 20] [--run quickstart-delta]...
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from staleflow.configs.imports import load_object
from staleflow.configs.loading.load import load
from tests.process.hosts import Hosts, possible

CONFIGS: Final = Path(__file__).parent.parent / "configs"
MACHINES: Final = ("launch.rollout_nodes=1", "launch.trainer_nodes=1", "launch.relays=all", "launch.gpus_per_node=0")
COMMON: Final = ("rollout.workers=1", "trainer.eval_prompts=0", "trainer.checkpoint_every=1000", "rollout.filter=none")
SETTLED: Final = 2
"""Steps before the first measured one: version 0 is large, and the model is loaded meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A configuration, and how its weights travel."""

    what: str
    config: str
    overrides: tuple[str, ...]
    model: str
    slow: bool


def _quickstart(what: str, delta: str, *, slow: bool) -> Way:
    settings = ("trainer.batch_size=8", "rollout.max_inflight=64", f"parameters.delta={delta}")
    return Way(what=what, config="quickstart.toml", overrides=settings, model="quickstart, 0.56 M", slow=slow)


def _adapter(*, slow: bool) -> Way:
    settings = (
        *("trainer.batch_size=2", "rollout.max_inflight=16", "trainer.threads=1", "trainer.lr=2e-4"),
        *("model.lora.rank=8", 'model.lora.target_modules=["q_proj", "v_proj"]', "parameters.delta=off"),
    )
    return Way(what="LoRA", config="smollm2.toml", overrides=settings, model="SmolLM2-135M", slow=slow)


WAYS: Final[Mapping[str, Way]] = {
    "quickstart-local": _quickstart("whole", "off", slow=False),
    "quickstart-whole": _quickstart("whole", "off", slow=True),
    "quickstart-delta": _quickstart("deltas", "compressed", slow=True),
    "smollm2-local": _adapter(slow=False),
    "smollm2-lora": _adapter(slow=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Values of one run."""

    steps_per_min: float
    behind_s: float
    """Median time from the publication of a version until the engine has it."""
    received_mb: float
    """Megabytes that the engine's host received per step, after version 0."""
    skipped: int
    """Versions that the engine never loaded."""


def model_of(way: Way, folder: Path) -> Path:
    """Build the initial model, outside of every run."""
    config = load(CONFIGS / way.config, [])
    directory = folder / way.config.removesuffix(".toml")
    if not directory.is_dir():
        load_object(config.model.build, "model.build")(directory, config.seed, **config.model.options)
    return directory


def measure(way: Way, folder: Path, model: Path, steps: int, mbit: int) -> Measured:
    """Run once and read the trace."""
    with Hosts(folder, 3) as hosts:
        head, trainer, engine = hosts.addresses
        if way.slow:
            hosts.slow(engine, mbit=mbit, delay_ms=20)
        command = [
            *(sys.executable, "-m", "staleflow.cli", "launch", "--on", "ssh", str(CONFIGS / way.config)),
            *("--run-dir", "run", "--plain", f"launch.hosts={json.dumps([trainer, engine])}"),
            *(f"launch.shell={json.dumps([str(hosts.shell)])}", *MACHINES, *COMMON, *way.overrides),
            *("model.build=", "model.options={}", f"model.path={model}", f"trainer.steps={steps}"),
        ]
        output, trace = folder / "output", folder / head / "home" / "run" / "trace.jsonl"
        running = hosts.start(head, command, output)
        try:
            received = wait(hosts, engine, running, trace, output)
        finally:
            running.terminate()
            running.wait()
        return measured(events(trace), received / (steps - SETTLED))


def wait(hosts: Hosts, engine: str, running: "subprocess.Popen[bytes]", trace: Path, output: Path) -> int:
    """Return the bytes that the engine's host received from the first measured step to the end of the run."""
    first: int | None = None
    last = 0
    while running.poll() is None:
        if first is None and sum(event["ev"] == "consume" for event in events(trace)) >= SETTLED:
            first = hosts.received(engine)
        last = hosts.received(engine)
        time.sleep(0.2)
    if running.returncode or first is None:
        raise click.ClickException(f"the run failed:\n{output.read_text()[-3000:]}")
    return last - first


def events(trace: Path) -> list[dict[str, Any]]:
    lines = trace.read_bytes().split(b"\n")[:-1] if trace.is_file() else []
    return [json.loads(line) for line in lines]


def measured(trace: Sequence[Mapping[str, Any]], received: float) -> Measured:
    trained = [event["t"] for event in trace if event["ev"] == "consume"][SETTLED - 1 :]
    published = {event["version"]: event["t"] for event in trace if event["ev"] == "publish"}
    loaded = dict[int, int]()
    for event in trace:
        if event["ev"] == "pull" and event["ok"] and event["version"] in published:
            loaded.setdefault(event["version"], event["t"])
    behind = [(at - published[version]) / 1e9 for version, at in loaded.items() if version > SETTLED]
    return Measured(
        steps_per_min=60e9 * (len(trained) - 1) / (trained[-1] - trained[0]),
        behind_s=statistics.median(behind) if behind else float("nan"),
        received_mb=received / 1e6,
        skipped=len(published) - len(loaded),
    )


@click.command(help=__doc__)
@click.option("--run", "names", type=click.Choice(list(WAYS)), multiple=True, default=list(WAYS), help="Default: all.")
@click.option("--mbit", default=20, show_default=True, type=click.IntRange(min=1), help="Rate of the link, Mbit/s.")
@click.option("--steps", default=20, show_default=True, type=click.IntRange(min=SETTLED + 2))
def main(names: tuple[str, ...], mbit: int, steps: int) -> None:
    if not possible():
        raise click.ClickException("network namespaces need root and iproute2")
    titles = ("model", "versions", "link", "steps/min", "s until loaded", "MB received per step", "skipped", "load")
    click.echo(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    with tempfile.TemporaryDirectory(prefix="sf-", ignore_cleanup_errors=True) as folder:
        for name in names:
            way = WAYS[name]
            model = model_of(way, Path(folder))
            load_average = os.getloadavg()[0]
            one = measure(way, Path(folder) / name, model, steps, mbit)
            link = f"{mbit} Mbit/s" if way.slow else "no limit"
            values = f"{one.steps_per_min:.1f} | {one.behind_s:.2f} | {one.received_mb:.2f} | {one.skipped}"
            click.echo(f"| {way.model} | {way.what} | {link} | {values} | {load_average:.1f} |")


if __name__ == "__main__":
    main()
