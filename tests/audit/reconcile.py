"""Comparison of journals, trace and stores: three independently written accounts of one run.

The witnesses' journals record what was sent, answered and received. The trace records the actions of the ledger. The
stores hold bytes. Every rule below is a sentence about two of these accounts and counts its checks. A rule without a
single check is a failure of the test, not a success of the product.

Nothing of the product is imported here.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from tests.audit import history, journal, prf, stores
from tests.audit.history import History, Key, VersionKey
from tests.audit.journal import Entry
from tests.audit.stores import Stored

ZOMBIE = ("stale_lease", "stale")
AGAIN = ("expired", "aborted")


class Rule(StrEnum):
    """Rules that must hold between the accounts."""

    ACKED_TRACED = "a push that was acknowledged is in the trace, by the worker that sent it"
    ACKED_KEPT = "a push that was acknowledged is in a store, unless the trace says why it may go"
    KEPT_SENT = "what is in a store was sent by a worker"
    KEPT_BYTES = "what is in a store is byte for byte what its names and its worker's weights make it"
    TRACED_SENT = "a push in the trace was sent by that worker, with the digest of the stored bytes"
    ZOMBIE_NEVER = "a push that was refused as stale is not in the trace and not in a store"
    LEASE_ONCE = "a lease number is given once, higher than all before, to one group and one worker"
    SERVED_AGAIN = "a group whose lease expired or was aborted is served again under a higher lease"
    DELIVERED_BYTES = "what the trainer got is what a worker sent and what the reward said, byte for byte"
    REDELIVERED = "a step that is delivered again before it is consumed has the same members and bytes"
    TRAINED_ONCE = "along the surviving history every step is trained once, and no group twice"
    STEPS_KEPT = "the history that the trainer wrote down is the one that the trace kept: no step lost, none doubled"
    BOUND = "no group is trained whose weights, as its worker loaded them, were older than the bound"
    PULLED_BYTES = "weights that were pulled are byte for byte those of a version that a trainer sent"
    ACKED_PUBLISHED = "a version that was acknowledged is published in the trace"
    FENCED = "nothing happens in the name of a trainer after the next one joined"
    REFUSED_FENCED = "what was refused as fenced is not in the trace"


@dataclass(slots=True)
class Report:
    """Violations found, and the number of checks of each rule."""

    violations: list[tuple[Rule, str]] = field(default_factory=list[tuple[Rule, str]])
    checks: Counter[Rule] = field(default_factory=Counter[Rule])

    def silent(self) -> list[Rule]:
        """Return the rules that never had anything to check."""
        return [rule for rule in Rule if not self.checks[rule]]

    def of(self, rule: Rule) -> list[str]:
        return [why for broken, why in self.violations if broken is rule]


def reconcile(journals: Path, trace: Path, shards: Iterable[Path], *, seed: int) -> Report:
    """Return the report on one run whose processes have ended."""
    stored: dict[Key, Stored] = {}
    for shard in shards:
        stored |= stores.read_shard(shard)
    return Reconciler(journal.read(journals), history.read(trace), stored, seed).report()


def prove(report: Report, *, without: Collection[Rule] = ()) -> None:
    """Assert that no rule is violated and that every rule except ``without`` had something to check."""
    assert report.violations == [], [f"{rule.name}: {why}" for rule, why in report.violations[:5]]
    silent = [rule.name for rule in report.silent() if rule not in without]
    assert not silent, f"void: nothing was there for {silent} to check"


class Reconciler:
    """All rules over one set of accounts."""

    def __init__(
        self, journals: Mapping[str, list[Entry]], history: History, stored: Mapping[Key, Stored], seed: int
    ) -> None:
        self._history = history
        self._stored = stored
        self._seed = seed
        self._report = Report()
        every = sorted(((entry, name) for name, entries in journals.items() for entry in entries), key=_when)
        self._entries: list[Entry] = [{**entry, "who": name} for entry, name in every]
        self._sent: dict[Key, Entry] = {}
        self._codes: dict[Key, list[str]] = defaultdict(list)
        for entry in self._entries:
            if entry["what"] == "sent":
                self._sent[entry["group"], entry["lease"]] = entry
            elif entry["what"] == "answered":
                self._codes[entry["group"], entry["lease"]].append(entry["code"])

    def report(self) -> Report:
        """Apply every rule once."""
        self._pushes()
        self._kept()
        self._leases()
        self._deliveries()
        self._trained()
        self._versions()
        self._terms()
        return self._report

    def _check(self, rule: Rule, holds: bool, why: str) -> None:
        self._report.checks[rule] += 1
        if not holds:
            self._report.violations.append((rule, why))

    def _of(self, *what: str) -> list[Entry]:
        return [entry for entry in self._entries if entry["what"] in what]

    # Payloads --------------------------------------------------------------------------------------------------------

    def _pushes(self) -> None:
        past = self._history
        for key, codes in self._codes.items():
            push, told = past.pushes.get(key), f"group {key[0]}, lease {key[1]}"
            if "" in codes:
                by = self._sent[key]["worker"] if key in self._sent else "nobody"
                self._check(Rule.ACKED_TRACED, push is not None and push["worker"] == by, f"{told}: not by {by}")
                if not past.gone(*key):
                    self._check(Rule.ACKED_KEPT, key in self._stored, f"{told}: acknowledged and lost")
            if any(code in ZOMBIE for code in codes) and "" not in codes:
                self._check(Rule.ZOMBIE_NEVER, push is None and key not in self._stored, f"{told}: refused and kept")
        for key, push in past.pushes.items():
            sent, kept = self._sent.get(key), self._stored.get(key)
            holds = sent is not None and sent["worker"] == push["worker"] and (kept is None or kept.sha == push["sha"])
            self._check(Rule.TRACED_SENT, holds, f"group {key[0]}, lease {key[1]}: sent by {sent and sent['worker']}")

    def _kept(self) -> None:
        for key, kept in self._stored.items():
            sent, told = self._sent.get(key), f"group {key[0]}, lease {key[1]}"
            self._check(Rule.KEPT_SENT, sent is not None, f"{told}: nobody sent it")
            if sent is not None:
                holds = kept.record.get("sha") == kept.sha and self._is_payload(kept, sent)
                self._check(Rule.KEPT_BYTES, holds, f"{told}: other bytes")

    def _is_payload(self, kept: Stored, sent: Entry) -> bool:
        try:
            return prf.fingerprint(kept.arrays()) == prf.fingerprint(self._payload(sent))
        except (AssertionError, ValueError):
            return False

    def _payload(self, sent: Entry) -> dict[str, prf.Array]:
        return prf.payload(self._seed, sent["group"], sent["lease"], sent["lineage"], sent["version"])

    def _leases(self) -> None:
        past = self._history
        for rises in past.fresh:
            self._check(Rule.LEASE_ONCE, rises, "the trace gives a lease number that is not the highest")
        for entry in self._of("leased"):
            known = past.leases.get(entry["lease"])
            told = f"lease {entry['lease']}: {entry['worker']} got it for group {entry['group']}, the trace has {known}"
            self._check(Rule.LEASE_ONCE, known == (entry["group"], entry["worker"]), told)
        for (group, lease), why in past.released.items():
            after = past.leases_of[group][past.leases_of[group].index(lease) + 1 :]
            if why in AGAIN and after:
                self._check(Rule.SERVED_AGAIN, after[0] > lease, f"group {group} after lease {lease}: {after[0]}")

    # Training --------------------------------------------------------------------------------------------------------

    def _deliveries(self) -> None:
        first: dict[int, Entry] = {}
        lineage = 0
        for entry in self._of("joined", "delivered"):
            if entry["what"] == "joined":  # steps after the one it resumes from may now contain other groups
                first = {step: known for step, known in first.items() if step <= entry["version"]}
                lineage = entry["lineage"]
                continue
            for member in entry["members"]:
                self._member(entry["step"], member)
            if entry["lineage"] < lineage:  # fetched by an older trainer while its successor rolled back
                continue
            before = first.get(entry["step"])
            if before is not None:
                same = (before["digest"], before["members"]) == (entry["digest"], entry["members"])
                self._check(Rule.REDELIVERED, same, f"step {entry['step']}: batch {entry['batch']} has other bytes")
            first[entry["step"]] = entry

    def _member(self, step: int, member: Entry) -> None:
        sent = self._sent.get((member["group"], member["lease"]))
        told = f"step {step}: group {member['group']}, lease {member['lease']}"
        self._check(Rule.DELIVERED_BYTES, sent is not None and member["prints"] == self._prints(sent), told)
        if sent is not None:
            oldest = step - self._history.max_staleness
            self._check(Rule.BOUND, sent["version"] >= oldest, f"{told} was written by version {sent['version']}")

    def _prints(self, sent: Entry) -> str:
        scored = {prf.REWARD: prf.rewards(self._seed, sent["group"], sent["lease"])}
        return prf.fingerprint(self._payload(sent) | scored)

    def _trained(self) -> None:
        past = self._history
        steps = [line["step"] for line in past.consumed]
        self._check(Rule.TRAINED_ONCE, steps == list(range(len(steps))), f"the steps are {steps[:20]} ...")
        often = Counter(member["group"] for seal in past.batches for member in seal["members"])
        for group, times in often.items():
            self._check(Rule.TRAINED_ONCE, times == 1, f"group {group} is trained {times} times")
        mine = self._written_down()
        theirs = {line["step"]: line["batch"] for line in past.consumed}
        for step, (batch, acknowledged) in mine.items():
            if acknowledged or step in theirs:
                self._check(Rule.STEPS_KEPT, theirs.get(step) == batch, f"step {step}: {batch}, not {theirs.get(step)}")
        for step in theirs:
            self._check(Rule.STEPS_KEPT, step in mine, f"step {step} is trained, and no trainer knows of it")

    def _written_down(self) -> dict[int, tuple[int, bool]]:
        """Map step to (batch, version acknowledged), as finally recorded in the trainers' journals."""
        mine: dict[int, tuple[int, bool]] = {}
        term = 0
        for entry in self._entries:
            match entry["what"]:
                case "joined":
                    term = max(term, entry["term"])
                    mine = {step: known for step, known in mine.items() if step < entry["version"]}
                case "committing" if entry["version"] and entry["term"] == term:
                    mine[entry["version"] - 1] = entry["batch"], False
                case "published" if entry["version"] and entry["term"] == term:
                    mine[entry["version"] - 1] = entry["batch"], True
                case _:
                    pass
        return mine

    # Versions and terms ----------------------------------------------------------------------------------------------

    def _versions(self) -> None:
        offered: set[VersionKey] = {(e["lineage"], e["version"]) for e in self._of("committing")}
        for entry in self._of("pulled"):
            key = entry["lineage"], entry["version"]
            right = entry["prints"] == prf.fingerprint(prf.weights(self._seed, *key))
            self._check(Rule.PULLED_BYTES, right and key in offered, f"{entry['who']} loaded {key} with other bytes")
        for entry in self._of("published"):
            key = entry["lineage"], entry["version"]
            self._check(Rule.ACKED_PUBLISHED, key in self._history.published, f"{key} was acknowledged")

    def _terms(self) -> None:
        past = self._history
        starts = [*past.terms, (1 << 62, 0)]
        for seq, term in past.by_term:
            charge = [joined for start, joined in starts if start < seq]
            self._check(Rule.FENCED, bool(charge) and charge[-1] == term, f"line {seq} is of term {term}, not {charge}")
        for entry in self._of("fenced"):
            line = past.published.get((entry["lineage"], entry["version"]))
            holds = line is None or line["trainer_term"] != entry["term"]
            self._check(Rule.REFUSED_FENCED, holds, f"{entry['op']} of term {entry['term']} was refused and done")


def _when(item: tuple[Entry, str]) -> int:
    return int(item[0]["t"])
