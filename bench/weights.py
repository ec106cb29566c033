"""Weights from a trainer to the engines of its host: this product beside its peers, in one interleaved run.

    python -m bench.weights                                  1 GiB, four readers
    python -m bench.weights --mb 256 --rounds 3
    python -m bench.weights --mb 512 1024 4096 --readers 1   a table for each size
    python -m bench.weights --peers /path/to/venv/bin/python Ray, safetensors and torch from an environment of their own

Each way runs in turn, ``--repeat`` times, in fresh processes; each time a few versions follow each other after six that
do not count, since a run publishes hundreds. The output is medians and, in brackets, the best round, beside one copy of
the bytes by one thread:

- *blocked*: until the publish returned, for which the trainer waits;
- *mapped*: from the publish until the last reader could read the bytes;
- *paused*: the copy into the slowest reader's own tensors, during which an engine decodes nothing. What comes before,
  verification included, happens beside the running model;
- *loaded*: from the publish until the last reader had them in its tensors;
- *copied*: bytes that the way copies, by its design, for the publisher and all readers.

The CPU seconds are those of one version, and are the most reliable numbers on a shared machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence

from bench.progress import tracked

WAYS = (
    "staleflow",
    "staleflow, on disk",
    "staleflow, two ranks",
    "staleflow, not verified",
    "ray",
    "safetensors",
    "zmq",
    "torch.save",
    "ray, torch tensors",
)
COLUMNS = ("published", "mapped", "paused", "loaded", "cpu")
COPIES = {
    "staleflow": (1, 1),
    "staleflow, on disk": (1, 1),
    "staleflow, two ranks": (1, 1),
    "staleflow, not verified": (1, 1),
    "ray": (1, 1),
    "safetensors": (1, 1),
    "zmq": (0, 3),
}
"""Copies of all bytes by the publisher, and for each reader (zmq: into the socket, out of it, and out of frames)."""
WHAT = {
    "staleflow": "staleflow: each reader verifies all bytes",
    "staleflow, on disk": "staleflow, parameters.store = disk",
    "staleflow, two ranks": "staleflow: two ranks, each with half of every tensor",
    "staleflow, not verified": "staleflow, were they not verified",
    "ray": "ray.put of NumPy views",
    "safetensors": "safetensors on tmpfs",
    "zmq": "ZeroMQ, ipc, frames of 16 MiB",
    "torch.save": "torch.save on tmpfs",
    "ray, torch tensors": "ray.put of torch tensors",
}


def measure(way: str, mb: int, python: str, options: argparse.Namespace) -> list[dict[str, float]]:
    """The rounds of one way; empty, with the reason printed, where it cannot run."""
    sizes = [f"--mb={mb}", f"--readers={options.readers}", f"--rounds={options.rounds}"]
    done = subprocess.run(
        [python, "-m", "bench.weights_ways", way, *sizes],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"},
    )
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1:] or ["it ended without a word"]
        print(f"{way} is left out: {why[0]}", file=sys.stderr)
        return []
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, nargs="+", default=[1024], help="sizes of a version, each with a table")
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=4, help="versions that count, of each run of a way")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each way")
    parser.add_argument("--peers", default=sys.executable, help="the interpreter that has the peers")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    options = parser.parse_args()
    for mb in options.mb:
        table(mb, options)


def table(mb: int, options: argparse.Namespace) -> None:
    """Measure every way with versions of one size, and print the medians."""
    result: dict[str, list[dict[str, float]]] = defaultdict(list)
    loads: list[float] = []
    for way in tracked(f"ways, {mb} MiB", list(options.ways) * options.repeat):
        python = sys.executable if way.startswith("staleflow") else options.peers
        result[way] += measure(way, mb, python, options)
        loads.append(os.getloadavg()[0])
    copies = [one["memcpy"] for rounds in result.values() for one in rounds]
    copy = statistics.median(copies)
    print(
        f"\n{mb} MiB, {options.readers} readers, load average {min(loads):.1f} to {max(loads):.1f};"
        f" one copy by one thread: {spread(copies)} s ({mb / 1024 * 1.0737 / copy:.1f} GB/s)\n"
    )
    print(
        "| | blocked s | mapped s | paused s | loaded s | mapped / copy | paused / copy | loaded / ray | copied GiB"
        " | CPU s, all processes |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    ray = statistics.median([one["loaded"] for one in result["ray"]] or [float("nan")])
    for way in options.ways:
        if not result[way]:
            continue
        seconds = {name: [one[name] for one in result[way]] for name in COLUMNS}
        blocked, mapped, paused, loaded = (spread(seconds[name]) for name in COLUMNS[:-1])
        mapped_s, paused_s, loaded_s, cpu_s = (statistics.median(seconds[name]) for name in COLUMNS[1:])
        reach, relative = (mapped, f"{mapped_s / copy:.2f}") if mapped_s >= 0 else ("-", "-")
        copied = "-"
        if way in COPIES:
            own, each = COPIES[way]
            copied = f"{(own + each * options.readers) * mb / 1024:.1f}"
        print(
            f"| {WHAT[way]} | {blocked} | {reach} | {paused} | {loaded} | {relative} | {paused_s / copy:.2f}"
            f" | {loaded_s / ray:.2f} | {copied} | {cpu_s:.2f} |"
        )


def spread(seconds: Sequence[float]) -> str:
    """Return the median and the best of several rounds: other processes of the machine only ever add time."""
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f})"


if __name__ == "__main__":
    main()
