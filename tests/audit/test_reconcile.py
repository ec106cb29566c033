"""The audit checks every rule on a small run, and each rule catches a forgery made for it."""

import ast
import copy
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import msgspec
import numpy as np
import pytest

from tests.audit import journal, prf, stores
from tests.audit.history import read
from tests.audit.journal import Entry
from tests.audit.reconcile import Reconciler, Report, Rule, prove
from tests.audit.stores import Stored

SEED = 7
A, B = "rollout-0.aa", "rollout-1.bb"


def blob_of(arrays: dict[str, prf.Array]) -> bytes:
    """Return a blob as the format specifies it, written by hand."""
    names = sorted(arrays)
    kinds = {"<i4": "int32", "<i8": "int64", "<f4": "float32", "|u1": "uint8"}
    described = msgspec.msgpack.encode([(name, kinds[arrays[name].dtype.str], arrays[name].shape) for name in names])
    blob = struct.pack("<4sI", b"sfa1", len(described)) + described
    for name in names:
        blob += b"\0" * (-len(blob) % 64) + arrays[name].tobytes()
    return blob


class Run:
    """Groups 1 to 4 in batches of one group.

    Group 1 expires at a worker that comes back too late. One trainer resumes from version 1 and is then fenced by
    another.
    """

    def __init__(self) -> None:
        self.journals: dict[str, list[Entry]] = {"rollout-0": [], "rollout-1": [], "trainer": [], "trainer-b": []}
        self.trace: list[dict[str, Any]] = [{"ev": "open", "max_staleness": 1}]
        self.stored: dict[tuple[int, int], Stored] = {}
        self._clock = 0
        self._surviving = 0
        self._play()

    def note(self, who: str, what: str, **values: object) -> None:
        self._clock += 1
        self.journals[who].append({"what": what, "t": self._clock, **values})

    def line(self, ev: str, **values: object) -> None:
        self.trace.append({"ev": ev, **values})

    def lease(self, who: str, worker: str, group: int, lease: int, version: int) -> None:
        self.line("reserve", group=group, lease=lease, worker=worker, version=version)
        self.note(who, "leased", worker=worker, group=group, lease=lease)

    def push(self, who: str, worker: str, group: int, lease: int, version: int, *, lineage: int = 0) -> None:
        self.send(who, worker, group, lease, version, lineage)
        blob = blob_of(prf.payload(SEED, group, lease, lineage, version))
        stored = Stored(group, lease, blob, {})
        self.stored[group, lease] = stored._replace(record={"sha": stored.sha})
        self.line("push", group=group, lease=lease, worker=worker, sha=stored.sha)
        self.note(who, "answered", group=group, lease=lease, code="")

    def send(self, who: str, worker: str, group: int, lease: int, version: int, lineage: int = 0) -> None:
        names = {"group": group, "lease": lease, "lineage": lineage, "version": version}
        self.note(who, "sent", worker=worker, **names)

    def deliver(
        self, who: str, step: int, batch: int, group: int, lease: int, version: int, *, lineage: int = 0
    ) -> None:
        arrays = prf.payload(SEED, group, lease, lineage, version) | {prf.REWARD: prf.rewards(SEED, group, lease)}
        members = [{"group": group, "lease": lease, "prints": prf.fingerprint(arrays)}]
        what = {"step": step, "batch": batch, "lineage": self._surviving, "digest": f"d{group}"}
        self.note(who, "delivered", **what, members=members)

    def publish(self, who: str, term: int, version: int, batch: int | None, *, lineage: int = 0) -> None:
        names: dict[str, Any] = {"term": term, "lineage": lineage, "version": version, "batch": batch}
        self.note(who, "committing", **names)
        if batch is not None:
            self.line("consume", step=version - 1, batch=batch, trainer_term=term)
        self.line("publish", lineage=lineage, version=version, trainer_term=term)
        self.note(who, "published", **names)

    def pull(self, who: str, lineage: int, version: int) -> None:
        prints = prf.fingerprint(prf.weights(SEED, lineage, version))
        self.note(who, "pulled", lineage=lineage, version=version, prints=prints)

    def join(self, who: str, term: int, version: int, lineage: int) -> None:
        self.line("join", trainer_term=term)
        self._surviving = lineage
        self.note(who, "joined", term=term, lineage=lineage, version=version)

    def seal(self, batch: int, step: int, group: int, lease: int) -> None:
        self.line("seal", batch=batch, step=step, members=[{"group": group, "lease": lease}])

    def _play(self) -> None:
        self.join("trainer", 1, 0, 0)
        self.publish("trainer", 1, 0, None)
        self.pull("rollout-0", 0, 0)
        self.lease("rollout-0", A, 1, 1, 0)
        self.lease("rollout-1", B, 2, 2, 0)
        self.push("rollout-1", B, 2, 2, 0)
        self.line("release", group=1, lease=1, why="expired")
        self.lease("rollout-1", B, 1, 3, 0)
        self.send("rollout-0", A, 1, 1, 0)
        self.note("rollout-0", "answered", group=1, lease=1, code="stale_lease")
        self.push("rollout-1", B, 1, 3, 0)
        self.seal(1, 0, 2, 2)
        self.deliver("trainer", 0, 1, 2, 2, 0)
        self.publish("trainer", 1, 1, 1)
        self.seal(2, 1, 1, 3)
        self.deliver("trainer", 1, 2, 1, 3, 0)
        self.publish("trainer", 1, 2, 2)
        self.join("trainer", 2, 1, 1)
        self.line("rollback", to_version=1)
        self.seal(3, 1, 1, 3)
        self.deliver("trainer", 1, 3, 1, 3, 0)
        self.publish("trainer", 2, 2, 3, lineage=1)
        self.join("trainer-b", 3, 2, 1)
        self.note("trainer", "fenced", op="publish", code="fenced", term=2, lineage=1, version=3)
        self.lease("rollout-1", B, 4, 4, 2)
        self.push("rollout-1", B, 4, 4, 2, lineage=1)
        self.seal(4, 2, 4, 4)
        self.deliver("trainer-b", 2, 4, 4, 4, 2, lineage=1)
        self.publish("trainer-b", 3, 3, 4, lineage=1)

    def report(self, folder: Path) -> Report:
        """Return the report of the audit on this run."""
        trace = folder / "trace.jsonl"
        lines = [json.dumps({"seq": seq, **event}) + "\n" for seq, event in enumerate(self.trace, start=1)]
        trace.write_text("".join(lines))
        return Reconciler(self.journals, read(trace), self.stored, SEED).report()


def _drop_push(run: Run) -> None:
    run.trace = [event for event in run.trace if not (event["ev"] == "push" and event["group"] == 4)]


def _lose(run: Run) -> None:
    del run.stored[4, 4]


def _store_more(run: Run) -> None:
    run.stored[9, 9] = run.stored[4, 4]


def _flip(run: Run) -> None:
    kept = run.stored[4, 4]
    blob = bytearray(kept.blob)
    blob[-1] ^= 1
    changed = Stored(4, 4, bytes(blob), {})
    run.stored[4, 4] = changed._replace(record={"sha": changed.sha})


def _other_sender(run: Run) -> None:
    _of(run, "push", lease=4)["worker"] = A


def _take_the_zombie(run: Run) -> None:
    run.trace.append({"ev": "push", "group": 1, "lease": 1, "worker": A, "sha": ""})


def _repeat_a_lease(run: Run) -> None:
    _of(run, "reserve", lease=4)["lease"] = 3


def _serve_under_an_older_lease(run: Run) -> None:
    _of(run, "reserve", group=1, lease=3)["lease"] = 0


def _other_bytes_to_the_trainer(run: Run) -> None:
    _entry(run, "trainer-b", "delivered")["members"][0]["prints"] = "0"


def _other_members_again(run: Run) -> None:
    run.journals["trainer"][-4]["digest"] = "other"
    assert run.journals["trainer"][-4]["what"] == "delivered"


def _train_twice(run: Run) -> None:
    _of(run, "seal", batch=4)["members"] = [{"group": 2, "lease": 2}]


def _lose_a_step(run: Run) -> None:
    run.trace = [event for event in run.trace if not (event["ev"] == "consume" and event["batch"] == 4)]


def _break_the_bound(run: Run) -> None:
    _entry(run, "rollout-1", "sent", group=4)["version"] = 0


def _mix_weights(run: Run) -> None:
    mixed = prf.weights(SEED, 0, 0) | {"noise": prf.weights(SEED, 0, 1)["noise"]}
    _entry(run, "rollout-0", "pulled")["prints"] = prf.fingerprint(mixed)


def _unpublish(run: Run) -> None:
    run.trace = [event for event in run.trace if not (event["ev"] == "publish" and event["version"] == 3)]


def _old_term(run: Run) -> None:
    _of(run, "consume", batch=4)["trainer_term"] = 2


def _refuse_and_do(run: Run) -> None:
    _of(run, "publish", version=3)["trainer_term"] = 2


def _of(run: Run, ev: str, **fields: object) -> dict[str, Any]:
    return next(e for e in run.trace if e["ev"] == ev and all(e.get(key) == value for key, value in fields.items()))


def _entry(run: Run, who: str, what: str, **fields: object) -> Entry:
    entries = run.journals[who]
    return next(e for e in entries if e["what"] == what and all(e.get(key) == value for key, value in fields.items()))


LIES: dict[Rule, Callable[[Run], None]] = {
    Rule.ACKED_TRACED: _drop_push,
    Rule.ACKED_KEPT: _lose,
    Rule.KEPT_SENT: _store_more,
    Rule.KEPT_BYTES: _flip,
    Rule.TRACED_SENT: _other_sender,
    Rule.ZOMBIE_NEVER: _take_the_zombie,
    Rule.LEASE_ONCE: _repeat_a_lease,
    Rule.SERVED_AGAIN: _serve_under_an_older_lease,
    Rule.DELIVERED_BYTES: _other_bytes_to_the_trainer,
    Rule.REDELIVERED: _other_members_again,
    Rule.TRAINED_ONCE: _train_twice,
    Rule.STEPS_KEPT: _lose_a_step,
    Rule.BOUND: _break_the_bound,
    Rule.PULLED_BYTES: _mix_weights,
    Rule.ACKED_PUBLISHED: _unpublish,
    Rule.FENCED: _old_term,
    Rule.REFUSED_FENCED: _refuse_and_do,
}


def test_what_an_older_trainer_still_fetched_is_not_what_the_next_one_must_get(tmp_path: Path) -> None:
    run = Run()
    run.journals["trainer"].append({**_entry(run, "trainer", "delivered"), "t": 10**6, "digest": "abandoned"})
    run.deliver("trainer-b", 0, 5, 2, 2, 0)
    run.journals["trainer-b"][-1]["t"] = 10**6 + 1
    assert run.report(tmp_path).of(Rule.REDELIVERED) == []


def test_an_honest_run_is_clean_and_every_rule_has_something_to_say(tmp_path: Path) -> None:
    prove(Run().report(tmp_path))


@pytest.mark.parametrize("rule", list(Rule), ids=lambda rule: rule.name)
def test_a_lie_is_caught_by_the_rule_it_breaks(rule: Rule, tmp_path: Path) -> None:
    run = copy.deepcopy(Run())
    LIES[rule](run)
    assert run.report(tmp_path).of(rule)


def test_a_rule_that_never_fired_is_a_failure_unless_it_is_excused(tmp_path: Path) -> None:
    run = Run()
    run.journals["trainer"] = [entry for entry in run.journals["trainer"] if entry["what"] != "fenced"]
    report = run.report(tmp_path)
    with pytest.raises(AssertionError, match="void: nothing was there for \\['REFUSED_FENCED'\\] to check"):
        prove(report)
    prove(report, without=(Rule.REFUSED_FENCED,))


def test_what_a_store_holds_is_read_without_the_product(tmp_path: Path) -> None:
    arrays = prf.payload(SEED, 3, 5, 0, 2)
    blob, record = blob_of(arrays), msgspec.msgpack.encode({"sha": "x"})
    environment: Any = lmdb.Environment(str(tmp_path), max_dbs=4)
    tables = {name: environment.open_db(name.encode()) for name in ("payloads", "records")}
    with environment.begin(write=True) as txn:
        txn.put(struct.pack(">QQ", 3, 5), blob, db=tables["payloads"])
        txn.put(struct.pack(">QQ", 3, 5), bytes(32) + record, db=tables["records"])
    environment.close()
    (kept,) = stores.read_shard(tmp_path).values()
    assert (kept.group, kept.lease, kept.record) == (3, 5, {}), "a record is not believed without its sha256"
    assert {name: array.tolist() for name, array in kept.arrays().items()} == {
        name: np.asarray(array).tolist() for name, array in arrays.items()
    }


def test_a_journal_cut_off_in_the_middle_of_a_line_ends_with_its_last_whole_one(tmp_path: Path) -> None:
    written = journal.Journal(tmp_path / "a.jsonl")
    written.write("sent", group=1)
    written.close()
    with written.path.open("ab") as file:
        file.write(b'{"what":"se')
    assert [entry["what"] for entry in journal.read(tmp_path)["a"]] == ["sent"]


def test_the_audit_imports_nothing_of_the_product() -> None:
    for path in Path(__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            roots = {name.partition(".")[0] for name in names}
            assert roots.isdisjoint({"staleflow", "servers", "clients", "protocols", "configs"}), path
