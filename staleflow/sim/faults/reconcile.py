"""Compare the witnesses with the servers: journals, trace and disks must agree.

The audit of the trace checks whether the ledger kept its own rules. This module checks whether the replies to workers
match the trace, whether the trace matches the disks, and whether all served bytes were written by a worker. It uses no
code of the servers.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from staleflow.process.clock import MAX_GAP_S
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Version
from staleflow.protocols.wire.messages import SUBMITTED_ROWS
from staleflow.servers.trajectories.service import RETAIN_INTERVAL_S
from staleflow.sim.faults.journal import FailedStage, Journal, Key, stage_of
from staleflow.sim.faults.mishaps import DOUBLED, MAX_HOLD_S
from staleflow.sim.faults.payload import Learned, is_untrainable, manifest_of, weights_of
from staleflow.sim.faults.plan import Plan
from staleflow.sim.faults.world import History, Interval

TICK_S = 0.06
PAUSE_SLACK_S = 0.3
"""The scheduler notices a pause at its next tick, and a report may have arrived just before. The first ``MAX_GAP_S`` of
each pause count as running time."""
WASTED_AT_ONCE, WASTED_PER_S = 40, 4.0
"""Groups that a broken worker may be assigned at first and after each success, and then per second."""


class Rule(StrEnum):
    """Rules of the comparison."""

    ACKNOWLEDGED = "an acknowledged push is in the trace, with those bytes"
    SENT = "a push in the trace was states by its worker, with those bytes"
    SERVED = "all served bytes were written by a worker"
    BATCH = "a batch received by a trainer is the sealed one: same step, lineage, digest and members"
    DIGEST = "the digest of a sealed batch is that of its members, in their order"
    COMMITTED = "an acknowledged version is published, with its bytes"
    PUBLISHED = "a published version was sent by a trainer"
    LEARNED = "the weights of a version follow from its batches, each trained once and in order"
    PULLED = "an instance loads the published bytes"
    ZOMBIE = "no push is acknowledged under a lease that had ended before"
    EARLY = "a lease of a worker that reported in time does not expire"
    LATE = "a lease of a dead or stopped worker ends after its time and a second"
    STORED = "pushed, occupied and sealed groups are stored in their shard, with those bytes"
    QUARANTINED = "a quarantined group was changed on its disk, its disk was lost, or no trainer can train it"
    GARBAGE = "a shard keeps no payload that is not needed"
    ALIVE = "no server ends with an error of its own"
    PAUSED = "pauses of the scheduler do not count against a lease"
    WASTED = "a worker that fails everything is assigned few groups"
    RETRIED = "a group at which one broken stage worker failed is not released before another one has tried"
    POISONED = "a group that no engine of the run can have written is not accepted"
    NAMED = "a live worker is not replaced by a process that uses its name"
    SUBMITTED = "a submitted row is acknowledged once, trained at most once, and lost never"
    HISTORY = "a server does not work on a store that is empty or older than others know it to be"
    ENDED = "a run that can continue is not ended"
    FINISHED = "an acknowledged end of the run survives a kill of the scheduler"
    PROGRESS = "a run without active faults does not stand still for longer than leases and retries take"


@dataclass(slots=True)
class Findings:
    """Violations, and the number of checks of each rule."""

    violations: list[tuple[Rule, str]] = field(default_factory=list[tuple[Rule, str]])
    checks: Counter[str] = field(default_factory=Counter[str])

    def check(self, rule: Rule, holds: bool, why: str, *values: object) -> None:
        """Check a rule. ``why`` is a format for ``values``."""
        self.checks[rule.name] += 1
        if not holds:
            self.violations.append((rule, why.format(*values)))


@dataclass(slots=True)
class TraceIndex:
    """The trace, indexed for the checks."""

    pushes: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict[tuple[int, int], dict[str, Any]])
    seals: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    published: dict[tuple[int, int], str] = field(default_factory=dict[tuple[int, int], str])
    learned: dict[int, Learned] = field(default_factory=dict[int, Learned])
    """State of the model after the batches of a version, by version of the surviving history."""
    states: dict[tuple[int, int], Learned] = field(default_factory=dict[tuple[int, int], Learned])
    """The same by (lineage, version), of every history."""
    consumed: int = 0
    """The last consumed batch."""
    reserved: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    """Reservations by lease."""
    over: dict[int, tuple[float, str]] = field(default_factory=dict[int, tuple[float, str]])
    """Time and reason of the end, by lease."""
    live: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    """The push of each group that is pushed, occupied or sealed at the end, by group."""
    by_step: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    """The seal of each step of the surviving history."""
    quarantined: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(group, lease), in the order of the trace."""
    given_up: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Pushes of groups that were released because a stage returned nothing for them."""
    detached: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Ends of processes whose name another process may use."""
    dropped_s: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    """Time at which a push was dropped, by (group, lease)."""
    kept: int = 0
    """Version of the oldest kept checkpoint: consumed payload of later steps stays."""
    end_s: float = 0.0

    @classmethod
    def by(cls, events: "list[dict[str, Any]]") -> "TraceIndex":
        trace = cls()
        for event in events:
            trace.take(event)
        return trace

    def take(self, event: dict[str, Any]) -> None:
        """Add one line."""
        self.end_s = now_s = event["m"] / 1e9
        match event["ev"]:
            case "reserve":
                self.reserved[event["lease"]] = event
            case "push":
                self.pushes[event["group"], event["lease"]] = event
                self.live[event["group"]] = event
                self.over[event["lease"]] = (now_s, "push")
            case "release":
                if (push := self._drop_live(event["group"], now_s)) is not None and event["why"] == "aborted":
                    self.given_up.append(push)
                self.over.setdefault(event["lease"], (now_s, event["why"]))
            case "detach" if event["role"] in DOUBLED:
                self.detached.append(event)
            case "drop":
                push = self._drop_live(event["group"], now_s)
                if push is not None and event["why"] == "quarantine":
                    self.quarantined.append((push["group"], push["lease"]))
            case "seal":
                self.seals[event["batch"]] = self.by_step[event["step"]] = event
            case "unseal":
                self.by_step.pop(self.seals.get(event["batch"], event).get("step", -1), None)
            case "consume":
                self.consumed = event["batch"]
                for member in self.seals.get(event["batch"], {}).get("members", ()):
                    self.live.pop(member["group"], None)
            case "checkpoint":
                self.kept = event["version"]
            case "rollback":
                self._undo_after(event["to_version"])
            case "publish":
                self._publish(event)
            case _:
                pass

    def _publish(self, event: dict[str, Any]) -> None:
        key, version = (event["lineage"], event["version"]), event["version"]
        self.published[key] = event["sha"]
        if version == 0:
            self.learned[0] = self.states[key] = Learned()
        elif (before := self.learned.get(version - 1)) is not None and self.consumed in self.seals:
            self.learned[version] = self.states[key] = before.after(self.seals[self.consumed]["digest"])[0]

    def _drop_live(self, group: int, now_s: float) -> dict[str, Any] | None:
        """Return the push of a group that will not be trained; None if it was not pushed."""
        push = self.live.pop(group, None)
        if push is not None:
            self.dropped_s[group, push["lease"]] = now_s
        return push

    def _undo_after(self, version: int) -> None:
        """Undo the batches of later steps; the drops that follow in the trace remove abandoned groups."""
        for later in [later for later in self.learned if later > version]:
            del self.learned[later]
        for step in [step for step in self.by_step if step >= version]:
            for key in _members(self.by_step.pop(step)):
                if key in self.pushes:
                    self.live.setdefault(key[0], self.pushes[key])

    def needed(self) -> dict[tuple[int, int], dict[str, Any]]:
        """Return the pushes, by (group, lease), of live groups and of groups that a rollback to the oldest checkpoint
        restores."""
        may_return = {key for step, seal in self.by_step.items() if step >= self.kept for key in _members(seal)}
        live = {(group, push["lease"]): push for group, push in self.live.items()}
        return live | {key: self.pushes[key] for key in may_return if key in self.pushes}

    def dropped_late(self) -> set[tuple[int, int]]:
        """Return groups dropped or released when the run ended, which shards may not have learned about any more."""
        return {key for key, dropped_s in self.dropped_s.items() if self.end_s - dropped_s < 2 * RETAIN_INTERVAL_S}


def _members(seal: dict[str, Any]) -> list[tuple[int, int]]:
    return [(member["group"], member["lease"]) for member in seal["members"]]


def reconcile(
    journal: Journal,
    history: History,
    events: list[dict[str, Any]],
    stored: Mapping[tuple[int, int], str],
    plan: Plan,
    *,
    flipped: set[tuple[int, int]],
    rows: Set[int] = frozenset(),
) -> Findings:
    """Compare all witnesses. ``stored`` has the sha by (group, lease) of the shards' payload at the end; ``flipped``
    names payload whose bytes were changed, or lost with their disk; ``rows``: submitted rows that are stored."""
    findings, trace = Findings(), TraceIndex.by(events)
    _pushes(findings, journal, trace, flipped)
    _versions(findings, journal, trace)
    _learned(findings, trace, plan.seed)
    lease_s = plan.config.scheduler.lease_s
    _leases(findings, journal, history, trace, lease_s)
    _paused(findings, journal, history, trace, lease_s)
    _broken(findings, journal, history, trace, plan)
    _disks(findings, trace, plan, stored, flipped)
    _ended(findings, journal, history, trace, plan)
    if plan.submitted:
        _submitted(findings, journal, events, trace, rows)
    if plan.killed_at_end:
        _finished(findings, history, events)
    findings.checks[Rule.SERVED.name] += sum(journal.checked.values())
    findings.violations += [(Rule.SERVED, why) for why in journal.mismatches]
    findings.checks[Rule.HISTORY.name] += history.swapped
    findings.violations += [(Rule.HISTORY, why) for why in history.served_wrongly]
    findings.checks[Rule.ALIVE.name] += 1
    findings.violations += [(Rule.ALIVE, why) for why in history.failures]
    findings.checks[Rule.PROGRESS.name] += 1
    findings.violations += [(Rule.PROGRESS, why) for why in history.stalls]
    return findings


def _submitted(
    findings: Findings, journal: Journal, events: list[dict[str, Any]], trace: TraceIndex, stored: Set[int]
) -> None:
    """Check the numbers of acknowledged rows, and that each row is trained, stored, filtered or given up."""
    rows = set[int]()
    for part, numbers in journal.submissions:
        first = part * len(numbers)
        expected = list(range(first, first + len(numbers)))
        findings.check(Rule.SUBMITTED, numbers == expected, "part {} has the rows {}", part, numbers)
        rows.update(numbers)
    members = [_members(seal) for seal in trace.by_step.values()]
    trained = Counter(group % SUBMITTED_ROWS for groups in members for group, _ in groups)
    over = {
        event["group"] % SUBMITTED_ROWS
        for event in events
        if (event["ev"], event.get("why")) in (("release", "filtered"), ("release", "aborted"))
        or (event["ev"], event.get("why")) in (("drop", "quarantine"), ("drop", "overdue"))
    }
    for row in sorted(rows):
        findings.check(Rule.SUBMITTED, trained[row] <= 1, "row {} is trained {} times", row, trained[row])
        found = row in trained or row in over or row in stored
        findings.check(Rule.SUBMITTED, found, "row {} is neither trained nor stored", row)


def _pushes(findings: Findings, journal: Journal, trace: TraceIndex, flipped: set[tuple[int, int]]) -> None:
    # A push that is sent again after its slab was changed has other bytes than the one that was registered.
    for one in journal.acknowledged:
        push = trace.pushes.get(one.key)
        findings.check(
            Rule.ACKNOWLEDGED,
            push is not None and (push["sha"] == one.sha or one.key in flipped),
            "group {}, lease {}: {} against {}",
            one.key.group,
            one.key.lease,
            one.sha,
            push,
        )
        over = trace.over.get(one.key.lease)
        findings.check(
            Rule.ZOMBIE,
            over is None or over[1] == "push",
            "lease {} was over by {}, and its push was accepted",
            one.key.lease,
            over,
        )
    for key, push in trace.pushes.items():
        sent = journal.sent.get(Key(GroupId(key[0]), LeaseId(key[1])), [])
        findings.check(
            Rule.SENT,
            any(one.sha == push["sha"] and one.worker == push["worker"] for one in sent),
            "no worker pushed {}",
            push,
        )


def _versions(findings: Findings, journal: Journal, trace: TraceIndex) -> None:
    for seal in trace.seals.values():
        lines = ["{group} {lease} {lineage} {version} {sha}\n".format_map(member) for member in seal["members"]]
        digest = hashlib.sha256("".join(lines).encode()).hexdigest()
        findings.check(Rule.DIGEST, seal["digest"] == digest, "batch {} has another digest", seal["batch"])
    for fetched in journal.fetched:
        sealed = trace.seals.get(fetched.batch)
        same = sealed is not None and (
            (sealed["step"], sealed["lineage"], sealed["digest"]) == (fetched.step, fetched.lineage, fetched.digest)
            and tuple(member["group"] for member in sealed["members"]) == fetched.groups
        )
        findings.check(Rule.BATCH, same, "{} against {}", fetched, sealed)
    for one in journal.committed:
        sha = trace.published.get((one.lineage, one.version))
        findings.check(Rule.COMMITTED, sha == one.sha, "{} against {}", one, sha)
    for key, sha in trace.published.items():
        sent = journal.published.get((Lineage(key[0]), Version(key[1])), set())
        findings.check(Rule.PUBLISHED, sha in sent, "no trainer sent {}", key)
    for lineage, version, sha in journal.pulled:
        published = trace.published.get((lineage, version))
        why = "version {} of lineage {} is {}, not {}"
        findings.check(Rule.PULLED, published == sha, why, version, lineage, published, sha)


def _learned(findings: Findings, trace: TraceIndex, seed: int) -> None:
    for key, sha in trace.published.items():
        state = trace.states.get(key)
        right = state is not None and manifest_of(weights_of(seed, state)).sha == sha
        findings.check(Rule.LEARNED, right, "version {} does not follow from its batches", key)


def _leases(findings: Findings, journal: Journal, history: History, trace: TraceIndex, lease_s: float) -> None:
    reports: dict[str, list[tuple[float, float]]] = {
        worker: [(one.sent_s, one.answered_s) for one in reports] for worker, reports in journal.reports.items()
    }
    for lease, (over_s, why) in trace.over.items():
        if why == "expired":
            if (reserve := trace.reserved.get(lease)) is None:
                continue
            since_s = over_s - lease_s + TICK_S
            fresh = any(sent > since_s and answered < over_s for sent, answered in reports.get(reserve["worker"], ()))
            findings.check(
                Rule.EARLY,
                not fresh and reserve["m"] / 1e9 <= since_s,
                "lease {} of {} expired too early",
                lease,
                reserve["worker"],
            )
    leases: dict[str, list[int]] = defaultdict(list)
    for lease, reserve in trace.reserved.items():
        leases[reserve["worker"]].append(lease)
    for interval in history.silent:
        for lease in leases[interval.what]:
            since_s = max(trace.reserved[lease]["m"] / 1e9, interval.since_s)
            until_s = min(trace.over.get(lease, (trace.end_s, ""))[0], interval.until_s)
            longest_s = _longest(history.serving, since_s, until_s)
            findings.check(
                Rule.LATE,
                longest_s <= lease_s + 1.0,
                "lease {} outlived its holder by {:.2f} s",
                lease,
                longest_s,
            )


def _paused(findings: Findings, journal: Journal, history: History, trace: TraceIndex, lease_s: float) -> None:
    for lease, (over_s, why) in trace.over.items():
        if (reserve := trace.reserved.get(lease)) is None:
            continue
        reports = [one.answered_s for one in journal.reports.get(reserve["worker"], ()) if one.answered_s < over_s]
        since_s = max(reserve["m"] / 1e9, *reports[-1:])
        spans = (min(interval.until_s, over_s) - max(interval.since_s, since_s) for interval in history.paused)
        pauses = [span_s for span_s in spans if span_s > 0]
        outlived = over_s - since_s > lease_s  # the lease would have expired if its pauses had counted
        if pauses and (why == "expired" or outlived):
            paused_s = sum(pauses)
            counted_s = MAX_GAP_S * len(pauses)
            findings.check(
                Rule.PAUSED,
                why != "expired" or over_s - since_s - paused_s + counted_s > lease_s - PAUSE_SLACK_S,
                "lease {} of {} expired while the scheduler was paused for {:.1f} s",
                lease,
                reserve["worker"],
                paused_s,
            )


def _broken(findings: Findings, journal: Journal, history: History, trace: TraceIndex, plan: Plan) -> None:
    ended: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for lease, (over_s, why) in trace.over.items():
        if why in ("aborted", "push") and (reserve := trace.reserved.get(lease)) is not None:
            ended[reserve["worker"].rpartition(".")[0]].append((over_s, why))
    for interval in history.broken:
        until_s = min(interval.until_s, trace.end_s)
        if plan.loses_workers or _others_failed(history, plan, interval):
            continue  # if no instance does better, the prompts may be at fault, and all instances are tried
        count, most_in_a_row = 0, 0
        for at_s, why in sorted(ended[interval.what]):
            if interval.since_s < at_s < until_s:
                # Groups from before the worker broke still succeed. Each success ends the hold, and the count restarts.
                count = count + 1 if why == "aborted" else 0
                most_in_a_row = max(most_in_a_row, count)
        allowed = WASTED_AT_ONCE + WASTED_PER_S * (until_s - interval.since_s)
        what = "{} failed at {} groups in a row in {}"
        findings.check(Rule.WASTED, most_in_a_row <= allowed, what, interval.what, most_in_a_row, interval)
    for released in trace.given_up:
        failures = journal.failed_stages.get(released["sha"], [])
        if failures and plan.stages > 1 and not plan.loses_workers:
            workers = journal.tried_stages[released["sha"]]
            tried = any(_tried(stage, workers, failures) for stage in {one.stage for one in failures})
            why = "group {} was given up after one of {} alone had failed"
            findings.check(Rule.RETRIED, tried, why, released["group"], workers)
    for detach in trace.detached:
        if not plan.loses_workers:  # then every worker of these roles lives until the end of the run
            replaced = detach["why"].startswith("replaced")
            findings.check(Rule.NAMED, not replaced, "{} was {}", detach["worker"], detach["why"])
    for key, sha in journal.poisoned:
        push = trace.pushes.get(key)
        findings.check(Rule.POISONED, push is None or push["sha"] != sha, "group {}, lease {} was accepted", *key)


def _tried(stage: str, workers: set[str], failures: list[FailedStage]) -> bool:
    """Return whether two workers of a stage tried a group, or it is not one broken worker that failed it."""
    others_fail = any(one.stage == stage and not one.broken for one in failures)
    return others_fail or sum(stage_of(worker) == stage for worker in workers) > 1


def _others_failed(history: History, plan: Plan, interval: Interval) -> bool:
    """Return whether each other worker was broken during ``interval``, or may not have pushed since."""
    late = {
        other.what
        for other in history.broken
        if other.what != interval.what
        and other.since_s < interval.until_s
        and interval.since_s < other.until_s + MAX_HOLD_S
    }
    return len(late) >= plan.engines - 1


def _ended(findings: Findings, journal: Journal, history: History, trace: TraceIndex, plan: Plan) -> None:
    findings.check(Rule.ENDED, plan.finite or not journal.gave_up, "the run was ended: {}", journal.gave_up)
    if journal.gave_up and not plan.loses_workers:  # a lost worker's leases may be open when its scheduler restarts
        ended_s, never = history.finished_s, (trace.end_s, "")
        since_s = {lease: reserve["m"] / 1e9 for lease, reserve in trace.reserved.items()}
        open_leases = [lease for lease, at_s in since_s.items() if at_s < ended_s < trace.over.get(lease, never)[0]]
        findings.check(Rule.ENDED, not open_leases, "the run was ended while leases {} were open", open_leases)


def _finished(findings: Findings, history: History, events: list[dict[str, Any]]) -> None:
    if finished_s := history.finished_s:
        later = [event["ev"] for event in events if event["m"] / 1e9 > finished_s]
        ends = later[-1:] == ["close"] and "reserve" not in later
        findings.check(Rule.FINISHED, ends, "the run was finished at {:.1f} and went on with {}", finished_s, later)


def _longest(spells: list[Interval], since_s: float, until_s: float) -> float:
    """Return the longest time between the two in which the scheduler worked without interruption."""
    return max((min(s.until_s, until_s) - max(s.since_s, since_s) for s in spells), default=0.0)


def _disks(
    findings: Findings,
    trace: TraceIndex,
    plan: Plan,
    stored: Mapping[tuple[int, int], str],
    flipped: set[tuple[int, int]],
) -> None:
    needed = trace.needed()
    for key, push in needed.items():
        findings.check(
            Rule.STORED,
            stored.get(key) == push["sha"] or key in flipped,
            "{} is stored as {}",
            push,
            stored.get(key),
        )
    for key in trace.quarantined:
        bad = key in flipped or (plan.untrainable and is_untrainable(GroupId(key[0])))
        findings.check(Rule.QUARANTINED, bad, "group {}, lease {} was quarantined without damage", *key)
    excused = needed.keys() | trace.dropped_late() | flipped
    for key in stored:
        findings.check(Rule.GARBAGE, key in excused, "group {}, lease {} is garbage", *key)
