"""Measure the bytes that a delta saves between versions of a real training run, and the cost to encode and apply it.

Trains the quickstart's model with its weights in bfloat16 and a learning rate of 1e-6, as large models are trained, and
pulls every version while the run lasts. For versions 1, 2, 4 and 8 steps apart it prints the number of elements that
differ, the reduction of bytes, raw (gaps and values) and compressed (gaps and steps through zstd), and seconds a GB.
It repeats the same for one large synthetic matrix that behaves alike, since a model of this size shows little about
speed, beside the raw limits: a memcpy and zstd of the version itself. Every delta is applied and compared bit by bit.

The goal: adjacent versions at least 20 x smaller raw, 45 x compressed. Exit 1 when the run misses it.

    python -m bench.delta [--steps 12] [--large-mb 256]
"""

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import numpy as np
import zstandard
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from bench.progress import tracked
from staleflow.clients.weights import Puller
from staleflow.configs.loading.load import addresses, read_run
from staleflow.net.client import worker_id
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.delta import LEVEL, Span, apply, encode, spans
from staleflow.protocols.wire.manifest import lay_out
from staleflow.protocols.wire.messages import Manifest

CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.toml"
APART = (1, 2, 4, 8)
SPAN_BYTES = 4 << 20
RAW, COMPRESSED = 20.0, 45.0


@dataclass(frozen=True, slots=True)
class Held:
    """A version of the run."""

    manifest: Manifest
    data: bytes


@dataclass(frozen=True, slots=True)
class Cost:
    """Measurements of one delta of a whole version."""

    times: float
    """Bytes of the version divided by bytes of the delta."""
    encode_s_per_gb: float
    apply_s_per_gb: float


# A run ---------------------------------------------------------------------------------------------------------------


def train(steps: int, warmup: int, run_dir: Path) -> list[Held]:
    """Versions 0 to ``steps - 1`` of a run of the quickstart at 1e-6."""
    overrides = (
        *("model.dtype=bfloat16", "trainer.lr=1e-6", "trainer.warmup_steps=0", f"trainer.steps={steps}"),
        *(f"model.options.steps={warmup}", f"parameters.keep_versions={steps + 1}", "rollout.filter=none"),
        *("trainer.eval_prompts=8", "trainer.eval_every=0"),
    )
    command = (sys.executable, "-m", "staleflow.cli", "run", str(CONFIG), *overrides, "--run-dir", str(run_dir))
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        try:
            return asyncio.run(collect(running, run_dir, steps))
        finally:
            running.terminate()


async def collect(running: "subprocess.Popen[bytes]", run_dir: Path, steps: int) -> list[Held]:
    while not (run_dir / "config.json").exists():
        check(running)
    puller = Puller(addresses(read_run(run_dir), run_dir).parameters, worker=worker_id("bench"))
    held: list[Held] = []
    while len(held) < steps:
        try:
            pulling = asyncio.ensure_future(puller.pull(Lineage(0), Version(len(held))))
            while not (await asyncio.wait((pulling,), timeout=1.0))[0]:
                check(running)
            async with await pulling as pulled:
                tensors = pulled.tensors()
                manifest = lay_out((t.name, t.dtype, t.shape, pulled.sha + t.name) for t in tensors.values())
                held.append(Held(manifest, laid_out(manifest, tensors)))
        except Refused as no:
            if no.code is not Code.BAD_VERSION:
                raise
            await asyncio.sleep(0.1)
            check(running)
    puller.close()
    return held


def laid_out(manifest: Manifest, tensors: Any) -> bytes:
    data = bytearray(manifest.nbytes)
    for entry in manifest.tensors:
        data[entry.offset : entry.offset + entry.nbytes] = tensors[entry.name].data
    return bytes(data)


def check(running: "subprocess.Popen[bytes]") -> None:
    if running.poll() is not None:
        sys.exit(f"the run ended with {running.returncode} before all its versions were seen")
    time.sleep(0.05)


# A large matrix ------------------------------------------------------------------------------------------------------


def large(nbytes: int) -> list[Held]:
    """Two versions of one bfloat16 matrix of weights of deviation 0.02, each moved by about 1e-6 as Adam would."""
    random = np.random.default_rng(0)
    weights = random.standard_normal(nbytes // 2, np.float32) * np.float32(0.02)
    moved = weights + np.float32(1e-6) * np.tanh(random.standard_normal(weights.size, np.float32))
    held: list[Held] = []
    for at, values in enumerate((weights, moved)):
        bits = values.view(np.uint32)
        rounded: NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
        held.append(Held(lay_out([("matrix", "bfloat16", rounded.shape, str(at))]), rounded.tobytes()))
    return held


# Measuring -----------------------------------------------------------------------------------------------------------


def measure(old: Held, new: Held, *, compress: bool) -> Cost:
    """Encode, apply and compare; times are CPU times of this thread."""
    result = spans(old.manifest, new.manifest, most_bytes=SPAN_BYTES)
    began = time.thread_time()
    deltas = [encode(*both, span.width, compress=compress) for span, both in pieces(result, old, new)]
    encoded = time.thread_time()
    target = memoryview(bytearray(old.data))
    applying = time.thread_time()
    for span, delta in zip(result, deltas, strict=True):
        apply(delta, target[span.offset : span.offset + span.nbytes])
    applied = time.thread_time()
    if bytes(target) != new.data:
        sys.exit("a delta does not give back the version: this is a bug")
    gb = len(new.data) / 1e9
    return Cost(len(new.data) / sum(map(len, deltas)), (encoded - began) / gb, (applied - applying) / gb)


def pieces(found: list[Span], old: Held, new: Held) -> Iterator[tuple[Span, tuple[memoryview, memoryview]]]:
    was, now = memoryview(old.data), memoryview(new.data)
    for span in found:
        cut = slice(span.offset, span.offset + span.nbytes)
        yield span, (was[cut], now[cut])


def differing(old: Held, new: Held) -> float:
    was, now = np.frombuffer(old.data, "<u2"), np.frombuffer(new.data, "<u2")
    return np.count_nonzero(was != now) / now.size


def row(title: str, both: list[tuple[Held, Held]]) -> tuple[list[str], float, float]:
    raw = [measure(*pair, compress=False) for pair in both]
    packed = [measure(*pair, compress=True) for pair in both]
    times = fmean(cost.times for cost in raw), fmean(cost.times for cost in packed)
    return (
        [
            title,
            f"{fmean(differing(*pair) for pair in both):.2%}",
            f"{min(cost.times for cost in raw):.0f} / {times[0]:.0f}",
            f"{min(cost.times for cost in packed):.0f} / {times[1]:.0f}",
            f"{fmean(cost.encode_s_per_gb for cost in raw):.2f} / {fmean(cost.encode_s_per_gb for cost in packed):.2f}",
            f"{fmean(cost.apply_s_per_gb for cost in raw):.2f} / {fmean(cost.apply_s_per_gb for cost in packed):.2f}",
        ],
        *times,
    )


def limits(data: bytes) -> str:
    began = time.thread_time()
    bytearray(data)
    copied = time.thread_time()
    packed = zstandard.ZstdCompressor(level=LEVEL).compress(data)
    ended = time.thread_time()
    gb = len(data) / 1e9
    return (
        f"memcpy {(copied - began) / gb:.2f} s/GB; zstd of the version itself {len(data) / len(packed):.1f} x smaller, "
        f"{(ended - copied) / gb:.2f} s/GB"
    )


@click.command(help=__doc__)
@click.option("--steps", default=12, show_default=True, type=click.IntRange(min=2))
@click.option("--warmup", default=400, show_default=True, help="Supervised steps that the model begins with.")
@click.option("--large-mb", default=256, show_default=True, type=click.IntRange(min=1))
def main(steps: int, warmup: int, large_mb: int) -> None:
    run = train(steps, warmup, Path(tempfile.mkdtemp(prefix="sf-")) / "run")
    table = Table(
        *("versions", "elements differ", "x fewer bytes raw, least / mean", "compressed, least / mean"),
        *("encode s/GB raw / compressed", "apply s/GB raw / compressed"),
        title=f"deltas, {steps} versions of {len(run[0].data) / 1e6:.1f} MB in bfloat16, learning rate 1e-6",
    )
    good = False
    for apart in tracked("deltas", (apart for apart in APART if apart < steps), lambda steps: f"{steps} apart"):
        cells, raw, packed = row(f"{apart} apart", list(zip(run, run[apart:], strict=False)))
        good |= apart == 1 and raw >= RAW and packed >= COMPRESSED
        table.add_row(*cells)
    matrix = large(large_mb << 20)
    table.add_row(*row(f"{large_mb} MB, made up", [(matrix[0], matrix[1])])[0])
    Console(width=max(Console().width, 130)).print(table, limits(matrix[1].data))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
