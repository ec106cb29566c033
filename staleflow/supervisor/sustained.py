"""What this machine sustains: a real run for ten seconds, with an engine and a trainer that cost next to nothing.

All processes, sockets and stores are those of any run, in the place of the run directory; so the rate is what the
service leaves to engines and trainer here. A model takes its own time on top.
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

SECONDS = 10.0
START_S = 60.0
"""Longest wait for the first step."""
END_S = 20.0
LAST_LINES = 14
"""Of what the run printed: what a process of it that failed said last, and the supervisor's words round it."""
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

Told = Callable[[float], None]
"""Hears how much of the measurement is done, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """What was seen."""

    steps: int
    seconds: float

    @property
    def trajectories_per_s(self) -> float:
        return self.steps * BATCH_SIZE * GROUP_SIZE / self.seconds


def sustained(config: Config | None, place: Path, told: Told) -> Iterator[Finding]:
    """Findings about trajectories, weights and, with a configuration, its steps. ``place``: an existing folder."""
    copied = _copied_per_s()
    yield Finding("weights", "good", f"1 GB is digested and copied in {1e9 / copied:.2f} s by one core")
    rate = _rate(place, told)
    if isinstance(rate, str):
        yield Finding("trajectories", "bad", f"a run without a model {rate}")
        return
    of_all = f"{TOKENS} tokens, engine to trainer, reward and disk included"
    yield Finding("trajectories", "good", f"{rate.trajectories_per_s:,.0f}/s of {of_all}")
    if config is not None:
        step = config.trainer.batch_size * config.rollout.group_size
        most = rate.trajectories_per_s / step * 60
        of_step = f"a step is {config.trainer.batch_size} x {config.rollout.group_size} trajectories"
        yield Finding(
            "steps", "good", f"the service allows {most:,.0f} a minute: {of_step}; the model takes its time on top"
        )


def _copied_per_s() -> float:
    """Bytes a second through what a publisher does with each piece: digest it in the cache, and copy it."""
    source = np.ones(COPIED_BYTES, np.uint8)
    target = np.empty_like(source)
    target[:] = 0  # fresh pages are not what is measured
    piece = 1 << 20
    began = time.perf_counter()
    for start in range(0, COPIED_BYTES, piece):
        xxhash.xxh3_128(source[start : start + piece].data)
        target[start : start + piece] = source[start : start + piece]
    return COPIED_BYTES / (time.perf_counter() - began)


def _rate(place: Path, told: Told) -> Rate | str:
    """What was seen, or why nothing was."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="staleflow-doctor-", dir=place) as name:
        folder = Path(name)
        (folder / "measured.toml").write_text(TASK)
        words = ("run", str(folder / "measured.toml"), "--run-dir", str(folder / "run"), "--json")
        verb = [sys.executable, "-m", "staleflow.cli", *words]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(verb, stdout=subprocess.DEVNULL, stderr=log)
        try:
            rate = _watched(process, folder / "run" / "metrics.jsonl", told)
            return rate or _why(process.poll(), time.monotonic() - began, folder / "log")
        finally:
            _end(process)


def _why(code: int | None, seconds: float, log: Path) -> str:
    """What became of a run that was not measured, and its last words. ``code``: None while it runs."""
    ended = f"ended with exit code {code} after" if code is not None else "trained less than two steps in"
    said = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return "\n  ".join((f"{ended} {seconds:.0f} s; it said last:", *said[-LAST_LINES:]))


def _watched(process: "subprocess.Popen[bytes]", path: Path, told: Told) -> Rate | None:
    """Steps between the first one and ``SECONDS`` later."""
    until = time.monotonic() + START_S
    while not _steps(path):
        if time.monotonic() > until or process.poll() is not None:
            return None
        time.sleep(0.1)
    began = time.monotonic()
    while (gone := time.monotonic() - began) < SECONDS:
        told(gone / SECONDS)
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
    """As Ctrl-C does; the processes below it end with it."""
    if process.poll() is None:
        os.kill(process.pid, signal.SIGINT)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
