"""Runs of the comparison with the papers: each once, kept in a file so that a campaign continues after an interrupt."""

import hashlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.coordination_world import Job, run
from staleflow.configs.schema import Config

STUDENT_95 = (0.0, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Two-sided 95 % quantiles of Student's t for 1, 2, … degrees of freedom, by their number."""


class Outcome(msgspec.Struct, frozen=True):
    """Numbers of one run that the tables show; shares of 1, speed in steps per minute."""

    key: str
    steps_per_min: float
    trainer_limit: float
    staleness_mean: float
    staleness_max: int
    violations: int
    discarded: float
    masked: float
    length_bias: float
    scheduler_busy: float

    @property
    def net(self) -> float:
        """Trained tokens a minute, as steps of batches whose lengths are those drawn: a rule that discards long groups
        takes more steps a minute because its batches are shorter."""
        return self.steps_per_min * (1.0 - self.masked) * self.length_bias


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds and half the width of its 95 % confidence interval."""

    value: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        count = len(values)
        if count < 2:
            return cls(values[0], 0.0)
        error = statistics.stdev(values) / count**0.5
        return cls(statistics.fmean(values), STUDENT_95[min(count, len(STUDENT_95)) - 1] * error)

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.half:.3f}"


class Campaign:
    """Simulates, or takes from ``file`` what was simulated before with the same configuration and rule."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self._done: dict[str, Outcome] = {}
        if file is not None and file.exists():
            lines = file.read_bytes().splitlines()
            self._done = {one.key: one for one in msgspec.json.Decoder(list[Outcome]).decode(_array(lines))}

    def of(self, configs: Sequence[Config], peer: str = "") -> list[Outcome]:
        """Return one outcome for each configuration, in order."""
        return [self._one(Job(config, peer)) for config in configs]

    def _one(self, job: Job) -> Outcome:
        key = hashlib.blake2b(job.key, digest_size=12).hexdigest()
        if key not in self._done:
            result = run(job)
            names = [name for name in Outcome.__struct_fields__ if name != "key"]
            outcome = Outcome(key, *(getattr(result, name) for name in names))
            self._done[key] = outcome
            if self.file is not None:
                with self.file.open("ab") as file:
                    file.write(msgspec.json.encode(outcome) + b"\n")
        return self._done[key]


def _array(lines: Sequence[bytes]) -> bytes:
    return b"[" + b",".join(lines) + b"]"
