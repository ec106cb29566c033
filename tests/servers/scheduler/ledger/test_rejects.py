"""The trace has at most one reject line per second for each peer and code, and every rejection is counted."""

from pathlib import Path

from staleflow.protocols.consistency.effects import Code, Rejected
from staleflow.protocols.consistency.ids import GroupId, LeaseId
from staleflow.servers.scheduler.ledger import rejects
from staleflow.servers.scheduler.ledger.rejects import Rejects
from staleflow.store.lmdb import Store
from staleflow.trace.events import Auth, Reject, TraceEvent
from staleflow.trace.writer import TABLES, Trace

STALE = Rejected(op="push", code=Code.STALE_LEASE, group=GroupId(1), lease=LeaseId(2))


class Told(Trace):
    """A trace that keeps its events."""

    def __init__(self, folder: Path) -> None:
        store = Store(folder, tables=TABLES, map_bytes=1 << 20, durability="process")
        super().__init__(folder / "trace.jsonl", store, run="r", incarnation=1, durability="process")
        self.events: list[TraceEvent] = []

    def add(self, event: TraceEvent) -> None:
        self.events.append(event)


def reject(worker: str, count: int) -> Reject:
    return Reject(op="push", worker=worker, group=GroupId(1), lease=LeaseId(2), count=count, code="stale_lease")


def test_the_first_is_told_at_once_and_the_rest_of_its_second_as_one(tmp_path: Path) -> None:
    trace, codes = Told(tmp_path), list[str]()
    noted = Rejects(trace, lambda code, _: codes.append(code))
    for now_ms in (0, 1, 500):
        noted.refused("a", STALE, now_ms)
    noted.refused("b", STALE, 1)
    noted.flush(999)
    assert trace.events == [reject("a", 1), reject("b", 1)]
    noted.flush(1000)
    assert trace.events[2:] == [reject("a", 2)]
    noted.flush(5000)
    assert len(trace.events) == 3
    assert codes == ["stale_lease"] * 4


def test_other_codes_and_auth_have_their_own_second(tmp_path: Path) -> None:
    trace = Told(tmp_path)
    noted = Rejects(trace, lambda _, __: None)
    noted.refused("a", STALE, 0)
    noted.plain("a", "message", "malformed", 0)
    noted.auth("a", "rollout", "", ok=True, now_ms=0)
    noted.auth("a", "king", "no such role", ok=False, now_ms=0)
    assert [type(event) for event in trace.events] == [Reject, Reject, Auth, Auth]


def test_a_flood_of_peers_costs_bounded_memory(tmp_path: Path) -> None:
    trace = Told(tmp_path)
    noted = Rejects(trace, lambda _, __: None)
    flood = rejects.MAX_PEERS + 1000
    for number in range(flood):
        noted.plain(f"peer-{number}", "message", "malformed", 0)
    assert len(trace.events) == rejects.MAX_PEERS + 1
    noted.flush(2000)
    assert sum(event.count for event in trace.events if isinstance(event, Reject)) == flood
