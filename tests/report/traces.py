"""A handwritten trace of a run of five groups: a wait, a rollback, a loss, an engine that joins."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from staleflow.report.facts import Facts
from staleflow.report.reading import Reader
from staleflow.trace.fold import Fold
from staleflow.trace.reader import Line, typed

SECOND = 10**9


FIELDS: dict[str, dict[str, Any]] = {
    "open": {"min_trainable": 0.0, "lease_ms": 1000, "protocol": 1, "config_sha": "c"},
    "publish": {"sha": "ab", "trainer_term": 1},
    "pull": {"worker": "rollout-0.aa", "sha": "ab"},
    "join": {"checkpoint": {"lineage": 0, "version": -1}},
    "rollback": {"trainer_term": 2},
    "reserve": {"lineage": 0, "deadline": None, "spare": False},
    "push": {"worker": "rollout-0.aa", "shard": 0, "sha": "ab", "bytes": 9, "truncated": False},
    "seal": {"trainer_term": 1, "digest": "cd"},
    "deliver": {"lineage": 0, "attempt": 1, "trainer_term": 1, "rank": 0},
    "consume": {"lineage": 0, "trainer_term": 1},
    "checkpoint": {"lineage": 0, "trainer_term": 1},
    "close": {"reserved": 0, "occupied": 0},
}
"""Fields of each kind of line that do not matter here."""


def event(ev: str, at_s: float, **fields: Any) -> dict[str, Any]:
    """A complete line: missing fields come from ``FIELDS``."""
    line = {"run": "hand-1", "inc": 1, "seq": 1, "t": round((1000 + at_s) * SECOND), "m": round((100 + at_s) * SECOND)}
    return {**line, "ev": ev, **FIELDS.get(ev, {}), **fields}


def opened(at_s: float, inc: int = 1, **found: int) -> dict[str, Any]:
    limits = {"max_staleness": 2, "batch_size": 1, "group_size": 4, "bound": "trajectory", "on_overdue": "wait"}
    recovered = {"reserved": 0, "occupied": 0, "sealed": 0, "last_seq": 0, "lineage": 0, "version": -1, **found}
    return event("open", at_s, recovered=recovered, **limits) | {"inc": inc}


def attach(at_s: float, worker: str, role: str, why: str = "") -> dict[str, Any]:
    return event("attach", at_s, worker=worker, role=role, why=why)


def publish(at_s: float, version: int, lineage: int = 0) -> dict[str, Any]:
    return event("publish", at_s, lineage=lineage, version=version, bytes=2**20)


def written(group: int, version: int, *, reserved_s: float, pushed_s: float, occupied_s: float) -> list[dict[str, Any]]:
    lease = {"group": group, "lease": group, "worker": "rollout-0.aa", "version": version, "deadline": version + 2}
    return [
        event("reserve", reserved_s, **lease),
        event("push", pushed_s, group=group, lease=group, segments=[{"lineage": 0, "version": version, "tokens": 10}]),
        event("occupy", occupied_s, group=group),
    ]


def sealed(at_s: float, batch: int, step: int, group: int, version: int, lineage: int = 0) -> dict[str, Any]:
    members = [{"group": group, "lease": group, "lineage": lineage, "version": version, "sha": "ab"}]
    fields = {"lineage": lineage, "step": step, "members": members, "tokens": 10, "masked_tokens": 0}
    return event("seal", at_s, batch=batch, **fields)


def consume(at_s: float, batch: int, step: int) -> dict[str, Any]:
    return event("consume", at_s, batch=batch, step=step)


PLAIN = [
    opened(0),
    attach(0, "rollout-0.aa", "rollout"),
    event("join", 0, trainer="trainer.tt", trainer_term=1),
    publish(1, 0),
    event("pull", 1.5, lineage=0, version=0, ok=True),
    *written(1, 0, reserved_s=2, pushed_s=4, occupied_s=4.5),
    sealed(5, 1, 0, 1, 0),
    event("deliver", 5, batch=1, step=0),
    consume(7, 1, 0),
    publish(7, 1),
    *written(2, 0, reserved_s=7, pushed_s=8, occupied_s=10),
    sealed(10, 2, 1, 2, 0),
    event("deliver", 10, batch=2, step=1),
    consume(11, 2, 1),
    publish(11, 2),
    event("close", 12, why="finished"),
]


def save(run_dir: Path, events: list[dict[str, Any]]) -> Path:
    path = run_dir / "trace.jsonl"
    path.write_text("".join(json.dumps(one, separators=(",", ":")) + "\n" for one in events))
    return path


def lines(events: Iterable[dict[str, Any]]) -> list[Line]:
    """The same lines as the readers get them."""
    return [typed(json.dumps(one).encode()) for one in events]


def read(events: Iterable[dict[str, Any]]) -> Facts:
    """The report's facts about these events."""
    fold = Fold()
    reader = Reader(fold)
    for line in fold.over(lines(events)):
        reader.see(line)
    return reader.facts
