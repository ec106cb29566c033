"""What a real run says about itself, as overrides of its configuration: so it can be simulated, and planned again.

Everything is read from the trace: how long groups are and took, how long the trainer, the stages and the loading of
weights took. A trace has the tokens of a group, not of each of its trajectories: what differs inside a group is lost.
When a trainer that streams was computing and when it waited is not in the trace, but in the metrics beside it.
"""

from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from staleflow.configs.errors import ConfigError
from staleflow.metrics.reader import metric_lines
from staleflow.trace.writer import read_events

LENGTHS = "lengths.jsonl"
METRICS = "metrics.jsonl"
COMPUTED = ("time/train", "time/publish")
NS = 1e9


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Medians are in seconds; 0.0 where the trace has nothing of the kind."""

    lengths: list[int]
    """Mean tokens of a trajectory, group by group, in the order of their pushes."""
    engines: int
    """Rollout workers that were attached at once, at most."""
    token_s: float
    """Of one token of a running trajectory."""
    train_s: float
    """From a batch (or the end of the step before, if that is later) to the next version; less the time for which a
    trainer that streams waited in between."""
    stages_s: float
    """From a pushed group to an occupied one."""
    pull_s: float
    """From a version to an instance that has it."""

    def overrides(self, lengths: Path) -> tuple[str, ...]:
        """``key=value``; writes ``lengths``, which one of them names."""
        lengths.write_text("".join(f'{{"tokens": {length}}}\n' for length in self.lengths))
        return (
            "rollout.engine=simulated",
            "trainer.backend=simulated",
            "rollout.simulated.lengths=trace",
            f"rollout.simulated.trace={lengths}",
            "rollout.simulated.trace_column=tokens",
            f"rollout.max_new_tokens={max(self.lengths)}",
            "rollout.simulated.k1=0.0",
            f"rollout.simulated.k2={self.token_s!r}",
            "rollout.simulated.k3=0.0",
            "rollout.simulated.k4=0.0",
            f"rollout.workers={self.engines}",
            f"trainer.simulated_step_s={self.train_s!r}",
            f"simulation.reward_s={self.stages_s!r}",
            f"simulation.pull_s={self.pull_s!r}",
        )


def measure(trace: Path) -> Measured:
    """Read a trace. ``ConfigError`` when it is none, or no step of it was trained."""
    books = _Books()
    for event in read_events(trace):
        books.take(event)
    if not books.train_s or not books.lengths:
        raise ConfigError("trace", str(trace), "a run that trained a step: this one has none to learn from")
    train_s = _computed_s(trace.parent / METRICS) if books.streamed else books.train_s
    return Measured(
        lengths=books.lengths,
        engines=books.most,
        token_s=median(books.token_s),
        train_s=median(train_s),
        stages_s=median(books.stages_s) if books.stages_s else 0.0,
        pull_s=median(books.pull_s) if books.pull_s else 0.0,
    )


def _computed_s(metrics: Path) -> list[float]:
    """Seconds that the trainer computed for each step. ``ConfigError`` when nobody wrote them down."""
    lines = metric_lines(metrics)
    found = [sum((line.get(name) or 0.0 for name in COMPUTED), 0.0) for line in lines if COMPUTED[0] in line]
    if not found:
        allowed = f"a run that streamed needs its {METRICS} beside its trace, with {COMPUTED[0]} of a step at least"
        raise ConfigError("trace", str(metrics.parent), allowed)
    return found


class _Books:
    """Adds up one event after the other."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.token_s: list[float] = []
        self.train_s: list[float] = []
        self.stages_s: list[float] = []
        self.pull_s: list[float] = []
        self.most = 0
        self.streamed = False
        self._group_size = 1
        self._engines: dict[str, None] = {}
        self._reserved: dict[int, float] = {}
        self._pushed: dict[int, float] = {}
        self._published: dict[tuple[int, int], float] = {}
        self._delivered: dict[int, float] = {}
        self._free_s = 0.0

    def take(self, event: dict[str, Any]) -> None:
        """Time is the monotonic one: a new incarnation begins a new one, so nothing is measured across it."""
        now_s = event["m"] / NS
        match event["ev"]:
            case "open":
                self._group_size = event["group_size"]
                for times in (self._reserved, self._pushed, self._published, self._delivered):
                    times.clear()
                self._engines.clear()
            case "reserve":
                self._reserved[event["lease"]] = now_s
                self._engines[event["worker"]] = None
                self.most = max(self.most, len(self._engines))
            case "detach":
                self._engines.pop(event["worker"], None)
            case "push":
                self._push(event, now_s)
            case "occupy":
                self._note(self.stages_s, self._pushed.pop(event["group"], None), now_s)
            case "publish":
                self._published[event["lineage"], event["version"]] = now_s
            case "pull":
                self._note(self.pull_s, self._published.get((event["lineage"], event["version"])), now_s)
            case "claim":
                self.streamed = True
            case "deliver":
                self._delivered.setdefault(event["batch"], now_s)
            case "consume":
                began_s = self._delivered.pop(event["batch"], None)
                self._note(self.train_s, None if began_s is None else max(began_s, self._free_s), now_s)
                self._free_s = now_s
            case _:
                pass

    def _push(self, event: dict[str, Any], now_s: float) -> None:
        tokens = sum(segment["tokens"] for segment in event["segments"]) / self._group_size
        began_s = self._reserved.pop(event["lease"], None)
        self._pushed[event["group"]] = now_s
        if tokens >= 1 and not event["truncated"]:
            self.lengths.append(round(tokens))
            if began_s is not None:
                self.token_s.append((now_s - began_s) / tokens)

    @staticmethod
    def _note(where: list[float], began_s: float | None, now_s: float) -> None:
        if began_s is not None:
            where.append(now_s - began_s)
