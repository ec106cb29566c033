"""Measure how much lossless compression of payload would save on a link between hosts, and its cost.

The log-probabilities come from a real run of the quickstart, once as they are and once with each value only once: the
few contexts of the quickstart repeat, while those of a large vocabulary do not. The tokens come from the sources of the
standard library under a byte-pair vocabulary of 32,768 that is trained here. Each column is cut into groups of 8
samples with 512 tokens. Each group goes through zstd separately, as it is, and with the first bytes of all values
before the second ones. The output shows the compression ratio, MB/s of both directions on one core (CPU time, so a busy
machine does not matter), and seconds a GB over links of 0.1, 1 and 10 Gbit/s: uncompressed, and compressed while the
link is busy (the slowest of the three stages decides).

    python -m bench.compression [--steps 20] [--groups 64]
"""

import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import zstandard
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from staleflow.protocols.wire.trajectory import GroupPayload
from staleflow.servers.trajectories.slabs import Slabs
from staleflow.servers.trajectories.store import TABLES, TrajectoryStore, unpack_verified
from staleflow.store.lmdb import Store

CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.toml"
GROUP_TOKENS = 8 * 512
VOCABULARY = 32_768
LINKS_GBIT = (0.1, 1.0, 10.0)
Column = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Cost:
    """Results of one way to compress one column."""

    times: float
    """Uncompressed size divided by compressed size."""
    pack_mb_s: float
    unpack_mb_s: float


def logprobs_of_a_run(steps: int) -> Column:
    """All completions that the trajectory server stores after that many steps."""
    with tempfile.TemporaryDirectory(prefix="sf-") as place:
        run_dir = Path(place) / "run"
        more = ("trainer.checkpoint_every=100000", "trainer.eval_prompts=0", "trainer.eval_every=0")
        command = (sys.executable, "-m", "staleflow.cli", "run", str(CONFIG), *more, "--run-dir", str(run_dir))
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
            trace = run_dir / "trace.jsonl"
            while running.poll() is None and not (
                trace.exists() and trace.read_bytes().count(b'"ev":"consume"') >= steps
            ):
                time.sleep(1.0)
            running.kill()
        time.sleep(5.0)  # its processes end when it does
        return np.concatenate([group.logprobs for group in stored(run_dir / "trajectories-0")])


def stored(folder: Path) -> list[GroupPayload]:
    """Every group in the store of a finished shard."""
    size = 1 << 32
    store = TrajectoryStore(
        Store(folder, tables=TABLES, map_bytes=size, durability="process"),
        map_bytes=size,
        slabs=Slabs(folder / "slabs", map_bytes=size),
    )
    try:
        return [
            GroupPayload.from_arrays(unpack_verified(one.key, one.record, store.payload(one.key, one.record)))
            for one in store.load()
            if one.record is not None
        ]
    finally:
        store.close()


def tokens_of_text(count: int) -> Column:
    """Return at most that many tokens of text, as int32."""
    from tokenizers import ByteLevelBPETokenizer

    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = [path.read_text("utf-8", "ignore") for path in paths]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(text, vocab_size=VOCABULARY, show_progress=False)
    ids = np.concatenate([np.asarray(one.ids, np.int32) for one in tokenizer.encode_batch(text[-120:])])
    return ids[:count]


def shuffled(column: Column) -> bytes:
    """The first bytes of all values, then the second bytes, and so on."""
    return column.view(np.uint8).reshape(len(column), -1).T.tobytes()


def cost(column: Column, level: int, *, planes: bool) -> Cost:
    """Compress all groups of a column, each separately, and verify the result. ``planes``: ``shuffled`` first."""
    pack, unpack = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
    groups = [column[at : at + GROUP_TOKENS] for at in range(0, len(column) - GROUP_TOKENS + 1, GROUP_TOKENS)]
    nbytes = sum(group.nbytes for group in groups)
    began = time.process_time()
    packed = [pack.compress(shuffled(group) if planes else group.tobytes()) for group in groups]
    between = time.process_time()
    result = [restored(unpack.decompress(one), column.dtype, planes=planes) for one in packed]
    ended = time.process_time()
    assert all(np.array_equal(one, group) for one, group in zip(result, groups, strict=True))
    return Cost(nbytes / sum(map(len, packed)), nbytes / 1e6 / (between - began), nbytes / 1e6 / (ended - between))


def restored(data: bytes, dtype: np.dtype[Any], *, planes: bool) -> Column:
    """Results for the column of these bytes."""
    if not planes:
        return np.frombuffer(data, dtype)
    return np.frombuffer(data, np.uint8).reshape(dtype.itemsize, -1).T.copy().view(dtype)[:, 0]


def seconds_a_gb(cost: Cost | None, gbit: float) -> float:
    """Seconds over a link when all stages are busy at the same time."""
    link = 1000 / (gbit * 125)
    if cost is None:
        return link
    return max(1000 / cost.pack_mb_s, link / cost.times, 1000 / cost.unpack_mb_s)


@click.command()
@click.option("--steps", default=20, show_default=True, help="Of the run that gives the log-probabilities.")
@click.option("--groups", default=128, show_default=True, help="Groups of 8 samples with 512 tokens.")
def main(steps: int, groups: int) -> None:
    """Run the measurement that the module describes."""
    count = groups * GROUP_TOKENS
    real = logprobs_of_a_run(steps)
    once = real[np.sort(np.unique(real, return_index=True)[1])]
    columns = {
        "tokens": tokens_of_text(count),
        "log-probs": np.resize(real, max(len(real), GROUP_TOKENS)),
        "each once": np.resize(once, max(len(once), GROUP_TOKENS)),
    }
    console = Console(width=110)
    table = Table("column", "zstd", "fewer bytes", "MB/s in", "MB/s out", *(f"{gbit:g} Gbit/s" for gbit in LINKS_GBIT))
    for name, column in columns.items():
        table.add_row(name, "as it is", "", "", "", *(f"{seconds_a_gb(None, gbit):.1f} s/GB" for gbit in LINKS_GBIT))
        for level in (1, 3, 9):
            for planes in (False, True):
                result = cost(column, level, planes=planes)
                table.add_row(
                    name,
                    f"{level}, bytes apart" if planes else str(level),
                    f"{result.times:.2f} x",
                    f"{result.pack_mb_s:.0f}",
                    f"{result.unpack_mb_s:.0f}",
                    *(f"{seconds_a_gb(result, gbit):.1f} s/GB" for gbit in LINKS_GBIT),
                )
    console.print(table)
    console.print(f"{len(real):,} log-probabilities of the run, {len(once):,} different ones")


if __name__ == "__main__":
    main()
