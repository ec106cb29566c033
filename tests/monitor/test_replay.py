"""Replaying a trace gives the same status that the scheduler itself reported at that moment."""

import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config, Redundancy, Staleness
from staleflow.monitor.replay import TraceState
from staleflow.monitor.sources import Replay
from staleflow.monitor.top import lines, once
from staleflow.protocols.consistency.effects import ReleaseWhy
from staleflow.protocols.consistency.groups import State
from staleflow.protocols.consistency.ids import Step, Version, WorkerId
from staleflow.protocols.consistency.limits import Bound
from staleflow.protocols.wire.messages import GetClaims, GetStatus, Join, JoinReply, SchedulerStatus
from staleflow.trace.reader import read_lines
from tests.servers.scheduler.table import Seat, Table
from tests.servers.scheduler.world import config

SAME = (
    "run",
    "version",
    "next_step",
    "lineage",
    "trainer_term",
    "max_staleness",
    "bound",
    "batch_size",
    "window",
)
LEDGER = ("leased", "pushed", "occupied", "sealed", "consumed", "claimed", "spares")


class Played:
    """A run whose events hypothesis chooses, and its trace so far."""

    def __init__(self, run_dir: Path, config: Config, seed: int) -> None:
        self.table = Table(run_dir, config)
        self.random = random.Random(seed)
        self.seats = [Seat(self.table, name, capacity=4) for name in ("a", "b")]
        self.staged: list[Any] = []
        self.retold = TraceState(steps=config.trainer.steps)
        self._trace, self._told = run_dir / "trace.jsonl", 0

    def step(self) -> None:
        """Apply one possible event."""
        moves: list[tuple[int, Callable[[], object]]] = [
            (8, self._push),
            (8, self._occupy),
            (4, self._train),
            (1, self._give_up),
            (2, self._claim),
            (1, self._roll_back),
            (2, lambda: self.table.after(150)),
        ]
        self.random.choices([move for _, move in moves], [weight for weight, _ in moves])[0]()
        for seat in self.seats:
            seat.report()

    def _push(self) -> None:
        seat = self.random.choice(self.seats)
        if seat.held:
            assign = self.random.choice(list(seat.held.values()))
            del seat.held[assign.lease]
            if self.table.push(assign, seat.name) is None:
                self.staged.append(assign)

    def _occupy(self) -> None:
        if self.staged:
            assign = self.staged.pop(self.random.randrange(len(self.staged)))
            held = self.table.interpreter.machine.group(assign.group)
            if held is not None and held.lease == assign.lease and held.state is State.PUSHED:
                self.table.occupy(assign)

    def _give_up(self) -> None:
        seat = self.random.choice(self.seats)
        if seat.held:
            assign = self.random.choice(list(seat.held.values()))
            del seat.held[assign.lease]
            self.table.release(assign, ReleaseWhy.ABORTED, seat.name)

    def _train(self) -> None:
        machine = self.table.interpreter.machine
        if machine.sealed_batch(Step(machine.version)) is not None:
            self.table.train()

    def _claim(self) -> None:
        machine = self.table.interpreter.machine
        held = [member.lease for member in machine.claims()]
        if int(machine.next_step) == machine.version and len(held) < machine.limits.batch_size:
            ask = GetClaims(trainer_term=self.table.term, step=machine.next_step, held=held, count=1, wait_ms=10)
            self.table.call("trainer", ask, lambda _: None)

    def _roll_back(self) -> None:
        machine = self.table.interpreter.machine
        version = Version(max(machine.version - self.random.randrange(2), 0))
        join = Join(trainer=WorkerId("trainer"), lineage=machine.lineage_of(version), version=version)
        joined = self.table.ask("trainer", join)
        assert isinstance(joined, JoinReply)
        self.table.term = joined.trainer_term

    def both(self) -> tuple[SchedulerStatus, SchedulerStatus]:
        """Return the scheduler's status and the status replayed from the trace."""
        reply = self.table.ask("monitor", GetStatus())
        assert isinstance(reply, SchedulerStatus)
        lines = list(read_lines(self._trace))
        for line in lines[self._told :]:
            self.retold.feed(line)
        self._told = len(lines)
        return reply, self.retold.status()


def shape(**staleness: Any) -> Config:
    base = config(batch_size=3)
    return msgspec.structs.replace(base, staleness=Staleness(**staleness))


def spares() -> Config:
    base = shape(max_staleness=1)
    return msgspec.structs.replace(
        base, rollout=msgspec.structs.replace(base.rollout, redundancy=Redundancy(groups=1.5))
    )


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "config", [shape(max_staleness=2), shape(max_staleness=0), shape(bound=Bound.TOKEN, max_staleness=1), spares()],
    ids=["trajectory", "on-policy", "token", "spares"],
)  # fmt: skip
def test_the_trace_tells_what_the_scheduler_said(tmp_path: Path, config: Config, seed: int) -> None:
    played = Played(tmp_path / "run", config, seed)
    for _ in range(90):
        played.step()
        said, told = played.both()
        assert {key: getattr(told, key) for key in SAME} == {key: getattr(said, key) for key in SAME}
        assert {key: told.ledger[key] for key in LEDGER} == {key: said.ledger[key] for key in LEDGER}
        assert _named(told) == _named(said)
        assert told.staleness.in_flight == said.staleness.in_flight
        assert said.why.startswith(told.why.partition(", about")[0])
        assert told.violations == 0
        assert told.totals.tokens_trained == said.totals.tokens_trained
    assert played.table.interpreter.machine.version > 0
    played.table.close()


def _named(status: SchedulerStatus) -> list[tuple[int, int, str]]:
    return [(pin.group, pin.version, pin.worker) for pin in status.pinned.groups]


def written(folder: Path) -> Path:
    """A trace of one group, trained by step 0, over 100 seconds; then the scheduler restarts."""
    lease = {"group": 7, "lease": 1, "worker": "rollout-0.aa"}
    segment = {"lineage": 0, "version": 0, "tokens": 500}
    member = {"group": 7, "lease": 1, "lineage": 0, "version": 0, "sha": "ab"}
    sealed = {"batch": 1, "lineage": 0, "step": 0, "trainer_term": 1}
    recovered = {"reserved": 0, "occupied": 0, "sealed": 0, "last_seq": 0, "lineage": 0, "version": -1}
    opening = {"max_staleness": 1, "batch_size": 1, "group_size": 4, "bound": "trajectory", "on_overdue": "wait"}
    opening |= {"min_trainable": 0.0, "lease_ms": 1000, "protocol": 1, "config_sha": "ef", "recovered": recovered}
    published = {"lineage": 0, "sha": "ab", "bytes": 5, "trainer_term": 1}
    lines: list[tuple[float, str, dict[str, Any]]] = [
        (0, "open", opening),
        (1, "attach", {"worker": "rollout-0.aa", "role": "rollout", "why": ""}),
        (2, "join", {"trainer": "trainer.aa", "trainer_term": 1, "checkpoint": {"lineage": 0, "version": -1}}),
        (3, "publish", {**published, "version": 0}),
        (4, "pull", {"worker": "rollout-0.aa", "lineage": 0, "version": 0, "sha": "ab", "ok": True}),
        (5, "reserve", {**lease, "lineage": 0, "version": 0, "deadline": 1, "spare": False}),
        (25, "push", {**lease, "shard": 0, "sha": "ab", "bytes": 9, "truncated": False, "segments": [segment]}),
        (26, "occupy", {"group": 7}),
        (26, "seal", {**sealed, "members": [member], "tokens": 500, "masked_tokens": 0, "digest": "cd"}),
        (27, "deliver", {**sealed, "attempt": 1, "rank": 0}),
        (99, "consume", sealed),
        (99, "publish", {**published, "version": 1}),
        (100, "open", opening),
    ]
    path = folder / "trace.jsonl"
    with path.open("w") as file:
        for seq, (at_s, ev, fields) in enumerate(lines, 1):
            mono_ns = 0 if seq == len(lines) else int(at_s * 1e9)  # another boot has another monotonic clock
            whole = {"run": "r", "inc": 1, "seq": seq, "t": int((1000 + at_s) * 1e9), "m": mono_ns, "ev": ev, **fields}
            file.write(json.dumps(whole, separators=(",", ":")) + "\n")
    (folder / "metrics.jsonl").write_text('{"step":0,"t":1099.5,"loss":0.5}\n')
    return path


def test_a_replay_goes_on_and_back_in_the_runs_own_time(tmp_path: Path) -> None:
    replay = Replay(written(tmp_path), steps=3)
    replay.advance(10.0)
    shot = replay.snapshot()
    assert (shot.phase, shot.elapsed_s, shot.unix_s, shot.lines) == ("replay", 10.0, 1010.0, ())
    assert shot.status.instances[0].last_command == "assign 7"
    assert shot.status.trainer_waits == "engines"
    replay.advance(20.0)
    assert (replay.snapshot().status.trainer_waits, replay.at_s) == ("", 30.0)
    assert replay.snapshot().status.instances[0].tokens_per_s == 50.0
    replay.to_the_end()
    over = replay.snapshot()
    assert (over.phase, over.elapsed_s) == ("replay, the end", 100.0)
    assert over.lines == ({"step": 0, "t": 1099.5, "loss": 0.5},)
    assert over.status.staleness.consumed == ((0, 1),)
    replay.advance(-70.0)
    back = replay.snapshot()
    assert (back.elapsed_s, back.status.version, back.lines) == (30.0, 0, ())
    replay.to_the_end()
    assert len(replay.snapshot().lines) == 1, "and what comes after it comes again"


def test_a_masked_token_is_not_trained(tmp_path: Path) -> None:
    trace = written(tmp_path)
    trace.write_text(trace.read_text().replace('"masked_tokens":0', '"masked_tokens":120'))
    replay = Replay(trace)
    replay.to_the_end()
    assert replay.snapshot().status.totals.tokens_trained == 380


def test_a_trace_without_a_line_is_over_at_once(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").touch()
    replay = Replay(tmp_path / "trace.jsonl")
    replay.advance(1.0)
    assert (replay.over, replay.snapshot().status.version) == (True, -1)


def forged(folder: Path, ev: str, **fields: Any) -> Path:
    """That trace, with other fields in the first line of a kind."""
    trace = written(folder)
    lines = [json.loads(line) for line in trace.read_bytes().splitlines()]
    next(line for line in lines if line["ev"] == ev).update(fields)
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return trace


@pytest.mark.parametrize(
    ("ev", "fields", "what"),
    [
        ("open", {"max_staleness": 10**9}, "line 1: open cannot follow: .*at most 1024"),
        ("publish", {"version": 10**9}, "line 4: publish cannot follow: .*version 1000000000 is the newest"),
        ("seal", {"step": 10**9}, "line 9: seal cannot follow: .*step 1000000001 is next"),
        ("push", {"group": 8}, "line 7: push cannot follow: group 8 is not live"),
        ("seal", {"batch": None}, "line 9 is not an event: .*batch"),
    ],
)
def test_a_line_that_cannot_follow_is_named(tmp_path: Path, ev: str, fields: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Replay(forged(tmp_path, ev, **fields)).to_the_end()


def test_a_pause_of_years_is_left_out_of_pictures_and_lines(tmp_path: Path) -> None:
    trace = forged(tmp_path, "occupy", m=9 * 10**18)
    to = io.StringIO()
    once(Replay(trace), Console(file=to, width=80), as_json=True)
    assert json.loads(to.getvalue())["phase"] == "replay, the end"
    assert len(list(lines(Replay(trace), to, as_json=False, speed=1.0))) < 30


@pytest.mark.parametrize("line", ['{"step":0,"t":NaN}', '{"step":0,"t":"x"}', '{"torn', "[]"])
def test_metrics_that_are_not_ours_stop_no_replay(tmp_path: Path, line: str) -> None:
    trace = written(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(line + '\n{"step":0,"t":1099.5,"loss":0.5}\n')
    replay = Replay(trace)
    replay.to_the_end()
    assert replay.snapshot().lines[-1] == {"step": 0, "t": 1099.5, "loss": 0.5}
