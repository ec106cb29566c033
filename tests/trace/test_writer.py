"""The trace file follows the store through any fault between the two."""

import errno
import hashlib
import json
import os
from pathlib import Path

import pytest

from staleflow.protocols.consistency.effects import Consumed, Released, ReleaseWhy
from staleflow.protocols.consistency.ids import BatchId, GroupId, LeaseId, Lineage, Step, TrainerTerm, WorkerId
from staleflow.store.base import Durability
from staleflow.store.lmdb import Store
from staleflow.trace import writer as trace
from staleflow.trace.events import Attach, Occupy, event_of
from staleflow.trace.writer import NO_HASH, TABLES, Trace, TraceError


class Run:
    """A store and its trace, over successive incarnations."""

    def __init__(self, folder: Path, durability: Durability = "process") -> None:
        self.path = folder / "trace.jsonl"
        self._folder = folder
        self._durability: Durability = durability
        self._incarnation = 0

    def open(self) -> "Run":
        self._incarnation += 1
        self.store = Store(self._folder / "store", tables=TABLES, map_bytes=16 << 20, durability=self._durability)
        self.trace = Trace(self.path, self.store, run="r", incarnation=self._incarnation, durability=self._durability)
        return self

    def tell(self, *groups: int, to_file: bool = True) -> None:
        for group in groups:
            self.trace.add(Occupy(group=GroupId(group)))
        with self.store.write() as txn:
            self.trace.commit(txn)
        if to_file:
            self.trace.committed()

    def close(self) -> None:
        self.trace.close()
        self.store.close()

    def lines(self) -> list[dict[str, object]]:
        raw = self.path.read_bytes()
        previous = NO_HASH
        for line in raw.splitlines():
            body, _, tail = line.rpartition(b',"h":"')
            previous = hashlib.sha256(previous.encode() + body).hexdigest()[:16]
            assert tail == f'{previous}"}}'.encode()
        parsed = [json.loads(line) for line in raw.splitlines()]
        assert [line["seq"] for line in parsed] == list(range(1, len(parsed) + 1))
        return parsed

    def groups(self) -> list[object]:
        return [line["group"] for line in self.lines()]


def test_a_line_has_the_common_fields_the_event_and_the_hash_in_this_order(tmp_path: Path) -> None:
    run = Run(tmp_path).open()
    run.tell(7)
    run.close()
    (line,) = run.lines()
    assert list(line) == ["schema", "run", "inc", "seq", "t", "m", "ev", "group", "h"]
    assert (line["schema"], line["run"], line["inc"], line["ev"], line["group"]) == (1, "r", 1, "occupy", 7)
    assert b" " not in run.path.read_bytes()


def test_numbers_and_hashes_go_on_across_incarnations(tmp_path: Path) -> None:
    run = Run(tmp_path).open()
    run.tell(1, 2)
    run.close()
    run.open()
    assert run.trace.seq == 2
    run.tell(3)
    run.close()
    assert run.groups() == [1, 2, 3]
    assert [line["inc"] for line in run.lines()] == [1, 1, 2]


def test_what_the_store_has_and_the_file_lacks_is_appended(tmp_path: Path) -> None:
    run = Run(tmp_path).open()
    run.tell(1)
    run.tell(2, 3, to_file=False)  # killed between the commit and the write
    run.store.close()
    assert run.groups() == [1]
    run.open()
    run.close()
    assert run.groups() == [1, 2, 3]


@pytest.mark.parametrize("durability", ["process", "power"])
def test_a_torn_tail_is_repaired(tmp_path: Path, durability: Durability) -> None:
    run = Run(tmp_path, durability).open()
    run.tell(1)
    run.tell(2)
    run.close()
    whole = run.path.read_bytes()
    os.truncate(run.path, len(whole) - 30)
    run.open()
    run.close()
    assert run.path.read_bytes() == whole


def test_a_torn_line_beyond_the_store_is_cut(tmp_path: Path) -> None:
    run = Run(tmp_path).open()
    run.tell(1)
    run.close()
    with run.path.open("ab") as file:
        file.write(b'{"schema":1,"torn')
    run.open()
    run.tell(2)
    run.close()
    assert run.groups() == [1, 2]


@pytest.mark.parametrize("lost", ["the newest lines", "everything"])
@pytest.mark.parametrize("torn", [b"", b'{"schema":1,"torn'])
def test_a_store_that_is_older_than_the_file_is_refused_and_costs_no_line(
    tmp_path: Path, lost: str, torn: bytes
) -> None:
    run = Run(tmp_path).open()
    run.tell(1)
    run.close()
    older = (tmp_path / "store" / "data.mdb").read_bytes()
    run.open()
    run.tell(2, 3)
    run.tell(4)
    run.close()
    with run.path.open("ab") as file:
        file.write(torn)
    before = run.path.read_bytes()
    if lost == "everything":
        (tmp_path / "store" / "data.mdb").unlink()
    else:
        (tmp_path / "store" / "data.mdb").write_bytes(older)
    beyond = "4 lines beyond line 0" if lost == "everything" else "3 lines beyond line 1"
    with pytest.raises(TraceError, match=beyond):
        run.open()
    run.store.close()
    assert run.path.read_bytes() == before


@pytest.mark.parametrize("told", [1, 3])
def test_a_store_of_another_history_is_refused_and_costs_no_line(tmp_path: Path, told: int) -> None:
    """Both stores are of one run by name: one is an early copy that continued elsewhere."""
    ours, theirs = Run(tmp_path / "ours").open(), Run(tmp_path / "theirs").open()
    for group in range(told):
        ours.tell(group)
    theirs.tell(*range(10, 10 + told))
    for run in (ours, theirs):
        run.close()
    before = ours.path.read_bytes()
    theirs.path.write_bytes(before)
    with pytest.raises(TraceError, match=r"another history|not the trace of this ledger"):
        theirs.open()
    theirs.store.close()
    assert theirs.path.read_bytes() == before


def test_a_failed_transaction_never_happened(tmp_path: Path) -> None:
    run = Run(tmp_path).open()
    run.tell(1)
    run.trace.add(Occupy(group=GroupId(99)))

    def fail() -> None:
        with run.store.write() as txn:
            run.trace.commit(txn)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    run.trace.forget()
    run.tell(2)
    run.close()
    assert run.groups() == [1, 2]


def test_the_outbox_holds_no_more_than_what_the_file_may_lack(tmp_path: Path) -> None:
    run = Run(tmp_path).open()
    for group in range(50):
        run.tell(group)
    with run.store.read() as txn:
        assert txn.count("outbox") == 1
    run.close()


def test_a_file_that_cannot_be_written_lags_and_catches_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path).open()
    run.tell(1)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space"):
            run.tell(2)
    assert run.groups() == [1]
    run.tell(3)
    run.close()
    assert run.groups() == [1, 2, 3]


@pytest.mark.parametrize("harm", ["removed", "shortened", "replaced"])
def test_a_file_that_is_not_the_trace_of_the_store_is_refused(tmp_path: Path, harm: str) -> None:
    run = Run(tmp_path).open()
    for group in range(5):
        run.tell(group)
    run.close()
    raw = run.path.read_bytes()
    match harm:
        case "removed":
            run.path.unlink()
        case "shortened":
            run.path.write_bytes(raw[:100])
        case _:  # the outbox repairs its own part, so empty it: the damage is older
            with run.open().store.write() as txn:
                for key in list(txn.keys("outbox")):
                    txn.delete("outbox", key)
            run.close()
            run.path.write_bytes(raw[:-20] + b"x" * 19 + b"\n")
    with pytest.raises(TraceError, match=r"missing|lost lines|not the trace"):
        run.open()
    run.store.close()


def test_nothing_is_told_after_the_end(tmp_path: Path) -> None:
    run = Run(tmp_path).open()
    run.tell(1)
    run.trace.end()
    run.tell(2)
    assert not run.trace.waiting
    run.close()
    assert run.groups() == [1]


def test_quotes_in_names_cannot_fake_a_hash(tmp_path: Path) -> None:
    run = Run(tmp_path).open()
    run.trace.add(Attach(worker=WorkerId('x","h":"0000'), role="rollout", why=""))
    run.tell(1)
    run.close()
    assert [line["ev"] for line in run.lines()] == ["attach", "occupy"]


def test_effects_become_lines_with_the_fields_of_the_contract(tmp_path: Path) -> None:
    run = Run(tmp_path).open()
    effects = (
        Released(
            group=GroupId(1), lease=LeaseId(2), worker=WorkerId("w"), tokens=3, why=ReleaseWhy.FILTERED, pushed=True
        ),
        Consumed(batch=BatchId(4), lineage=Lineage(0), step=Step(5), trainer_term=TrainerTerm(6)),
    )
    for effect in effects:
        line = event_of(effect)
        assert line is not None
        run.trace.add(line)
    run.tell()
    run.close()
    common = {"schema", "run", "inc", "seq", "t", "m", "h"}
    assert [{k: v for k, v in line.items() if k not in common} for line in run.lines()] == [
        {"ev": "release", "group": 1, "lease": 2, "tokens": 3, "why": "filtered"},
        {"ev": "consume", "batch": 4, "lineage": 0, "step": 5, "trainer_term": 6},
    ]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_trace_that_ends_and_begins_on_a_disk_that_takes_no_writes_is_completed_when_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    run = Run(tmp_path).open()
    run.tell(1)

    def full(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(trace, "_write_at", full)
        with pytest.raises(OSError, match=os.strerror(number)):
            run.tell(2)
        run.close()
        assert run.groups() == [1]
        run.open()  # on the disk that still rejects writes
        with pytest.raises(OSError, match=os.strerror(number)):
            run.tell(3)
    assert run.groups() == [1]
    run.tell(4)
    run.close()
    assert run.groups() == [1, 2, 3, 4]
    run.open()
    run.tell(5)
    with run.store.read() as txn:
        assert txn.count("outbox") == 1
    run.close()


def test_what_a_failed_sync_may_have_lost_is_written_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("staleflow.trace.writer._SYNC_INTERVAL_NS", 0)
    run = Run(tmp_path, "power").open()
    run.tell(1)

    def lost(descriptor: int) -> None:
        os.ftruncate(descriptor, 0)  # as a system may do that could not write its pages back
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", lost)
        run.tell(2)
    assert run.groups() == [1, 2]
    run.tell(3)
    with run.store.read() as view:
        assert view.count("outbox") == 1  # the earlier ones left it after a sync
    run.close()
    assert run.groups() == [1, 2, 3]
