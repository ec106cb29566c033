"""Clients submit prompts: each submission counts once, rows are dealt in order, and none is lost or doubled."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from staleflow.configs.schema import Prompts
from staleflow.net.memory_transport import MemoryEndpoint
from staleflow.protocols.consistency.effects import Code, ReleaseWhy
from staleflow.protocols.consistency.ids import GroupId, Version
from staleflow.protocols.wire.messages import (
    SUBMITTED_ROWS,
    GetOutcomes,
    GetSubmittedRows,
    Outcomes,
    Refusal,
    RegisterCheckpoint,
    RegisterOccupy,
    RegisterQuarantine,
    RegisterRelease,
    Reply,
    RowResult,
    SubmitPrompts,
    SubmitPromptsReply,
    SubmittedRows,
)
from staleflow.servers.scheduler.ledger.interpreter import TABLES
from staleflow.servers.scheduler.main import open_service
from staleflow.servers.scheduler.prompts import submissions
from staleflow.servers.scheduler.prompts.outcome_log import MAX_OUTCOMES
from staleflow.store.base import StoreFull
from staleflow.store.memory import MemoryStore, MemoryWrite
from tests.servers.scheduler.table import Seat, Table
from tests.servers.scheduler.world import config

CLIENT = "prompts-0"


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    made = opened(tmp_path)
    yield made
    made.close()


def opened(tmp_path: Path, steps: int = 100, **prompts: Any) -> Table:
    settings = config(batch_size=2, max_staleness=1, steps=steps)
    settings = msgspec.structs.replace(settings, prompts=Prompts(submitted=True, **prompts))
    return Table(tmp_path / "run", settings, rows=SUBMITTED_ROWS)


def rows(*numbers: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{number} + 1", "answer": number + 1} for number in numbers]


def submit(table: Table, id: str, *numbers: int, last: bool = False) -> int:
    reply = table.ask(CLIENT, SubmitPrompts(id=id, rows=rows(*numbers), last=last))
    assert isinstance(reply, SubmitPromptsReply), reply
    return reply.first


def refused(table: Table, id: str, given: list[dict[str, Any]]) -> tuple[Code, str]:
    reply = table.ask(CLIENT, SubmitPrompts(id=id, rows=given))
    assert isinstance(reply, Refusal)
    return reply.code, reply.detail


def stored(table: Table, *numbers: int) -> list[str | None]:
    """Return the prompts of rows as a shard gets them; None for one that is deleted."""
    frames: list[bytes] = []
    table.service.flush()
    reply: list[Reply] = []

    def on_reply(body: Reply) -> None:
        reply.append(body)

    table.call("trajectories-0", GetSubmittedRows(rows=list(numbers)), on_reply)
    (sizes,) = [body.sizes for body in reply if isinstance(body, SubmittedRows)]
    with table.store.read() as txn:
        frames = [submissions.encoded_row(txn, number) or b"" for number in numbers]
    assert [len(frame) if size >= 0 else -1 for frame, size in zip(frames, sizes, strict=True)] == sizes
    return [msgspec.msgpack.decode(frame)["prompt"] if frame else None for frame in frames]


def outcomes(table: Table, since: int = 0) -> list[tuple[int, RowResult, int | None, float | None]]:
    reply = table.ask(CLIENT, GetOutcomes(since=since))
    assert isinstance(reply, Outcomes)
    return [(one.row, one.result, one.step, one.reward) for one in reply.outcomes]


def finish(table: Table, seat: Seat, *groups: int, reward: float | None = None) -> None:
    """Generate and reward groups, so that they are ready."""
    for group in groups:
        assign = seat.assign(group)
        assert table.push(assign, seat.name) is None
        table.operate(RegisterOccupy(group=assign.group, lease=assign.lease, reward=reward))
        del seat.held[assign.lease]


def test_rows_are_dealt_in_the_order_of_submission(table: Table) -> None:
    assert submit(table, "a", 7, 8) == 0
    assert submit(table, "b", 9) == 2
    seat = Seat(table, "rollout-0")
    assert seat.holds() == [0, 1, 2]
    assert stored(table, 0, 1, 2, 3) == ["7 + 1", "8 + 1", "9 + 1", None]


def test_a_reply_with_rows_is_bounded_and_has_at_least_one(table: Table) -> None:
    submit(table, "a", 1, 2, 3)
    for most_bytes, count in ((0, 1), (50, 2), (1000, 3)):
        reply = table.ask("trajectories-0", GetSubmittedRows(rows=[0, 1, 2], most_bytes=most_bytes))
        assert isinstance(reply, SubmittedRows)
        assert len(reply.sizes) == count


def test_rows_that_come_later_are_dealt_at_once(table: Table) -> None:
    seat = Seat(table, "rollout-0")
    assert seat.holds() == []
    submit(table, "a", 1)
    seat.report()
    assert seat.holds() == [0]


def test_the_same_submission_again_has_no_effect_and_other_rows_are_a_conflict(table: Table) -> None:
    assert submit(table, "a", 1, 2) == 0
    submit(table, "b", 3)
    assert submit(table, "a", 1, 2) == 0
    table.restart()
    assert submit(table, "a", 1, 2) == 0
    assert refused(table, "a", rows(1, 3))[0] is Code.CONFLICT
    assert submit(table, "c", 4) == 3


def test_a_commit_that_fails_stores_nothing_and_the_retry_counts_once(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(table, "a", 1)
    with monkeypatch.context() as patched:

        def full(self: MemoryWrite, name: str, key: bytes, value: bytes) -> None:
            raise StoreFull("no room")

        patched.setattr(MemoryWrite, "put", full)
        assert refused(table, "b", rows(2))[0] is Code.BUSY
        assert stored(table, 0) == ["1 + 1"]  # rows are served meanwhile
    table.after(1000)
    assert submit(table, "b", 2) == 1
    assert submit(table, "b", 2) == 1
    assert submit(table, "c", 3) == 2


def test_a_kill_before_the_acknowledgement_neither_loses_nor_doubles_a_row(table: Table) -> None:
    table.endpoint.call(CLIENT, SubmitPrompts(id="a", rows=rows(1)), lambda _: None)
    table.restart()  # before the commit: nothing was stored
    assert stored(table, 0) == [None]
    assert submit(table, "a", 1) == 0
    table.restart()  # after the commit, and the reply is lost
    assert submit(table, "a", 1) == 0
    assert submit(table, "b", 2) == 1
    seat = Seat(table, "rollout-0")
    assert seat.holds() == [0, 1]


@pytest.mark.parametrize(
    ("row", "code", "text"),
    [
        ({"text": "x"}, Code.MALFORMED, 'submission a: row 1 has no column "prompt" (it has text)'),
        ({"prompt": 3}, Code.MALFORMED, 'submission a: row 1: column "prompt" must be text, it is int'),
        ({"prompt": "x" * 100}, Code.OVERSIZE, "submission a: row 1 has 110 bytes; prompts.max_row_bytes allows 50"),
        ({"messages": [{"role": "user", "content": "x"}]}, Code.MALFORMED, "set prompts.chat_template"),
    ],
)
def test_a_row_that_no_run_can_use_is_refused_with_its_submission(
    tmp_path: Path, row: dict[str, Any], code: Code, text: str
) -> None:
    table = opened(tmp_path, max_row_bytes=50)
    refusal = refused(table, "a", [*rows(1), row])
    assert refusal[0] is code
    assert text in refusal[1]
    assert submit(table, "a", 1) == 0
    table.close()


def test_while_too_many_rows_are_pending_further_ones_wait(tmp_path: Path) -> None:
    table = opened(tmp_path, max_pending=3)
    submit(table, "a", 1, 2)
    expected = "2 rows are pending; prompts.max_pending allows 3"
    assert refused(table, "b", rows(3, 4)) == (Code.BUSY, expected)
    assert refused(table, "c", rows(1, 2, 3, 4))[0] is Code.OVERSIZE
    Seat(table, "rollout-0", capacity=1)
    assert submit(table, "b", 3, 4) == 2
    table.close()


def test_rows_are_limited_before_any_server_has_attached(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(config(), prompts=Prompts(submitted=True, max_pending=3))
    service, interpreter = open_service(settings, tmp_path, MemoryStore(TABLES))
    endpoint = MemoryEndpoint(service.on_call, lambda answer: answer())
    replies: list[Reply] = []
    for id, numbers in (("a", (1, 2)), ("b", (3, 4))):
        endpoint.call(CLIENT, SubmitPrompts(id=id, rows=rows(*numbers)), replies.append)
        service.flush()
    assert [type(reply) for reply in replies] == [SubmitPromptsReply, Refusal]
    interpreter.trace.close()


def test_rows_never_fill_the_store_of_the_ledger(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table.store, "used_share", lambda: 0.51)
    code, detail = refused(table, "a", rows(1))
    assert code is Code.BUSY
    assert "raise scheduler.map_mb" in detail


def test_a_run_with_prompts_of_its_own_takes_none(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config())
    code, detail = refused(table, "a", rows(1))
    assert code is Code.CONFLICT
    assert "prompts.submitted = true" in detail
    table.close()


def test_an_open_source_without_rows_waits_and_says_so(table: Table) -> None:
    Seat(table, "rollout-0")
    table.wait_for_batch()
    table.after(120_000)
    waits = "it waits for prompts: none is submitted, and no client is attached that submits any"
    assert [waits in one.detail for one in table.refused] == [True]  # the request was answered after its time
    assert waits in table.why
    table.wait_for_batch()
    assert table.status()["trainer_waits"] == "prompts"
    table.attach(CLIENT, "prompts")
    assert table.why.endswith("it waits for prompts: none is submitted")


def test_after_the_last_rows_the_run_ends_as_with_a_finite_source(table: Table) -> None:
    seat = Seat(table, "rollout-0")
    submit(table, "a", 1, last=True)
    assert refused(table, "b", rows(2))[0] is Code.CONFLICT
    assert submit(table, "a", 1, last=True) == 0
    seat.report()
    finish(table, seat, 0)
    table.wait_for_batch()
    table.after(1000)
    (refusal,) = table.refused
    assert "step 0 can never be trained: 1 of 2 groups are ready and the prompts are used up" in refusal.detail
    assert "Possible fixes: resume the run and submit more prompts" in refusal.detail


def test_only_a_resumption_takes_rows_again_after_the_last(tmp_path: Path) -> None:
    table = opened(tmp_path)
    submit(table, "a", 1, last=True)
    table.restart()
    assert refused(table, "b", rows(2))[0] is Code.CONFLICT
    table.restart(session="resumed")
    assert submit(table, "b", 2) == 1
    table.close()


def test_each_row_has_an_outcome_with_its_mean_reward(table: Table) -> None:
    seat = Seat(table, "rollout-0")
    submit(table, "a", 1, 2, 3)
    seat.report()
    finish(table, seat, 0, reward=0.25)
    assign = seat.assign(1)
    table.push(assign, seat.name)
    release = RegisterRelease(group=assign.group, lease=assign.lease, why=ReleaseWhy.FILTERED, reward=1.0)
    table.operate(release)
    finish(table, seat, 2, reward=0.5)
    table.train()
    expected = [(1, RowResult.FILTERED, None, 1.0), (0, RowResult.TRAINED, 0, 0.25), (2, RowResult.TRAINED, 0, 0.5)]
    assert outcomes(table) == expected
    table.restart()
    assert outcomes(table, since=1) == expected[1:]


def test_outcomes_are_awaited_and_bounded(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    seat = Seat(table, "rollout-0")
    submit(table, "a", 1, 2)
    seat.report()
    replies: list[Reply] = []
    table.call(CLIENT, GetOutcomes(wait_ms=60_000), replies.append)
    assert replies == []
    finish(table, seat, 0, 1)
    table.train()
    table.after(100)
    (reply,) = replies
    assert isinstance(reply, Outcomes)
    assert [one.row for one in reply.outcomes] == [0, 1]
    log = table.interpreter.prompts.outcomes
    assert log is not None
    for number in range(MAX_OUTCOMES):
        log.add(GroupId(number), RowResult.FILTERED)
    table.flush()
    oldest = table.ask(CLIENT, GetOutcomes(since=0, most=1))
    assert isinstance(oldest, Outcomes)
    assert [one.number for one in oldest.outcomes] == [3]


def test_a_rollback_trains_every_row_again_and_returns_those_it_drops(table: Table) -> None:
    """Group 2 is written by version 1, which the rollback to version 0 abandons."""
    seat = Seat(table, "rollout-0")
    submit(table, "a", 1, 2, 3, 4)
    seat.report()
    finish(table, seat, 0, 1)
    table.train()
    table.restart()  # the rows of consumed groups stay, because a rollback may need them
    table.after(1000)
    assert stored(table, 0, 1) == ["1 + 1", "2 + 1"]
    seat.report(version=Version(1))
    for group in (2, 3):
        assign = seat.assign(group)
        assert table.push(assign, seat.name, [(1, 6)]) is None
        table.occupy(assign)
        del seat.held[assign.lease]
    table.roll_back(0)
    seat.report(version=Version(0))
    table.after(1000)
    assert stored(table, 0, 1, 2, 3) == ["1 + 1", "2 + 1", "3 + 1", "4 + 1"]
    returned = [SUBMITTED_ROWS + 2, SUBMITTED_ROWS + 3]
    seat.report()
    assert seat.holds() == returned
    table.train()
    finish(table, seat, *returned)
    table.train()
    assert [(row, step) for row, _, step, _ in outcomes(table)] == [(0, 0), (1, 0), (0, 0), (1, 0), (2, 1), (3, 1)]


def test_a_row_whose_group_is_damaged_again_and_again_is_given_up(table: Table) -> None:
    seat = Seat(table, "rollout-0")
    submit(table, "a", 1)
    for returns in range(4):
        seat.report()
        group = returns * SUBMITTED_ROWS
        finish(table, seat, group)
        table.operate(RegisterQuarantine(group=GroupId(group)))
    seat.report()
    assert seat.holds() == []
    assert outcomes(table) == [(0, RowResult.GIVEN_UP, None, None)]


def test_a_row_is_deleted_once_no_checkpoint_needs_it(table: Table) -> None:
    seat = Seat(table, "rollout-0")
    submit(table, "a", 1, 2, 3, 4, 5)
    seat.report()
    finish(table, seat, 0, 1)
    table.train()
    table.after(2000)
    assert stored(table, 0, 1, 2) == ["1 + 1", "2 + 1", "3 + 1"]
    checkpoint = RegisterCheckpoint(
        trainer_term=table.term, lineage=table.interpreter.machine.lineage, version=Version(1)
    )
    table.ask("trainer", checkpoint)
    table.after(2000)
    assert stored(table, 0, 1, 2, 3, 4) == [None, None, "3 + 1", "4 + 1", "5 + 1"]
    table.restart()
    table.after(2000)
    assert stored(table, 1, 2) == [None, "3 + 1"]


def test_a_row_that_is_leased_again_keeps_its_id_and_comes_first(table: Table) -> None:
    seat = Seat(table, "rollout-0", capacity=1)
    submit(table, "a", 1, 2)
    seat.report()
    assert seat.holds() == [0]
    table.silent("rollout-0")
    table.after(40_000)  # the lease expires
    other = Seat(table, "rollout-1", capacity=4)
    assert other.holds() == [0, 1]


def test_old_ids_of_submissions_are_forgotten(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submissions, "MAX_SUBMISSIONS", 2)
    for number, id in enumerate("abc"):
        assert submit(table, id, number) == number
    table.restart()
    assert submit(table, "b", 1) == 1
    assert submit(table, "a", 0) == 3
    with table.store.read() as txn:
        assert txn.count(submissions.IDS) == 3  # two submissions and the state
