"""Measure the throughput of the service on this machine: a real run for ten seconds with a trivial engine and trainer.

All processes, sockets and stores are those of any run, on the disk of the run directory. The measured rate is therefore
the upper bound that the service sets; the time of a model comes on top.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from staleflow.configs.schema import Config
from staleflow.supervisor.checkup import Finding

MEASURE_S = 10.0
START_TIMEOUT_S = 60.0
"""Seconds to wait for the first step."""
EXIT_TIMEOUT_S = 20.0
MAX_LOG_LINES = 14
"""Log lines shown of a failed run: the last ones of the failed process and the supervisor's messages around them."""
GROUP_SIZE, BATCH_SIZE, TOKENS = 8, 16, 256
COPIED_BYTES = 256 << 20
TASK = f"""
name = "measured"
[prompts]
source = "staleflow.examples.quickstart.task:prompts"
[reward]
run = "staleflow.examples.quickstart.task:reward"
batch = 64
[rollout]
engine = "simulated"
group_size = {GROUP_SIZE}
max_inflight = 256
max_new_tokens = {TOKENS}
filter = "none"
[rollout.simulated]
lengths = "uniform"
min_tokens = {TOKENS}
k1 = 0.0
k2 = 0.0
k3 = 0.0
[trainer]
backend = "simulated"
steps = 1000000
batch_size = {BATCH_SIZE}
eval_prompts = 0
simulated_step_s = 0.0
"""

Update = Callable[[float], None]
"""Callback that receives the completed share of the measurement, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Result of the measurement."""

    steps: int
    seconds: float

    @property
    def trajectories_per_s(self) -> float:
        return self.steps * BATCH_SIZE * GROUP_SIZE / self.seconds


def sustained(config: Config | None, place: Path, update: Update) -> Iterator[Finding]:
    """Yield findings on weights, trajectories and, with a configuration, its steps. ``place``: an existing folder."""
    bytes_per_s = _copy_bytes_per_s()
    yield Finding("weights", "good", f"one core digests and copies 1 GB in {1e9 / bytes_per_s:.2f} s")
    rate = _rate(place, update)
    if isinstance(rate, str):
        yield Finding("trajectories", "bad", f"a run without a model {rate}")
        return
    of_all = f"{TOKENS} tokens, engine to trainer, reward and disk included"
    yield Finding("trajectories", "good", f"{rate.trajectories_per_s:,.0f}/s of {of_all}")
    if config is not None:
        step = config.trainer.batch_size * config.rollout.group_size
        max_steps = rate.trajectories_per_s / step * 60
        of_step = f"a step is {config.trainer.batch_size} x {config.rollout.group_size} trajectories"
        yield Finding(
            "steps",
            "good",
            f"the service allows {max_steps:,.0f} a minute: {of_step}; the time of the model comes on top",
        )


def _copy_bytes_per_s() -> float:
    """Return the bytes per second at which one core digests and copies 1 MiB pieces, like a publisher of weights."""
    source = np.ones(COPIED_BYTES, np.uint8)
    target = np.empty_like(source)
    target[:] = 0  # touch the pages first, to keep page faults out of the measurement
    piece = 1 << 20
    began = time.perf_counter()
    for start in range(0, COPIED_BYTES, piece):
        xxhash.xxh3_128(source[start : start + piece].data)
        target[start : start + piece] = source[start : start + piece]
    return COPIED_BYTES / (time.perf_counter() - began)


def _rate(place: Path, update: Update) -> Rate | str:
    """Return the measured rate, or the reason why there is none."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="staleflow-doctor-", dir=place) as name:
        folder = Path(name)
        (folder / "measured.toml").write_text(TASK)
        words = ("run", str(folder / "measured.toml"), "--run-dir", str(folder / "run"), "--json")
        verb = [sys.executable, "-m", "staleflow.cli", *words]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(verb, stdout=subprocess.DEVNULL, stderr=log)
        try:
            rate = _measure(process, folder / "run" / "metrics.jsonl", update)
            return rate or _failure(process.poll(), time.monotonic() - began, folder / "log")
        finally:
            _end(process)


def _failure(code: int | None, seconds: float, log: Path) -> str:
    """Describe a run that was not measured, with its last log lines. ``code`` is None while the run is alive."""
    ended = f"ended with exit code {code} after" if code is not None else "trained less than two steps in"
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return "\n  ".join((f"{ended} {seconds:.0f} s; its last output:", *lines[-MAX_LOG_LINES:]))


def _measure(process: "subprocess.Popen[bytes]", path: Path, update: Update) -> Rate | None:
    """Count the steps between the first one and ``MEASURE_S`` later."""
    until = time.monotonic() + START_TIMEOUT_S
    while not _steps(path):
        if time.monotonic() > until or process.poll() is not None:
            return None
        time.sleep(0.1)
    began = time.monotonic()
    while (elapsed_s := time.monotonic() - began) < MEASURE_S:
        update(elapsed_s / MEASURE_S)
        time.sleep(0.1)
    lines = _steps(path)
    seconds = lines[-1]["t"] - lines[0]["t"]
    return Rate(steps=len(lines) - 1, seconds=seconds) if len(lines) > 1 and seconds > 0 else None


def _steps(path: Path) -> list[dict[str, Any]]:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return []
    lines = [json.loads(line) for line in raw.split(b"\n")[:-1]]
    return [line for line in lines if line["step"] >= 0]


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Stop the run like Ctrl-C does; its child processes end with it."""
    if process.poll() is None:
        os.kill(process.pid, signal.SIGINT)
    try:
        process.wait(EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
