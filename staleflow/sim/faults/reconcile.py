"""The witnesses against the servers: journals, trace and disks must tell the same story.

The audit of the trace asks whether the ledger kept its own rules; here it is asked whether what the workers were told
is what is in the trace, whether what is in the trace is on the disks, and whether everything served was written by
somebody. Nothing of the servers' code is asked.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from staleflow.process.clock import MAX_GAP_S
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Version
from staleflow.servers.trajectories.service import RETAIN_INTERVAL_S
from staleflow.sim.faults.journal import Journal, Key
from staleflow.sim.faults.mishaps import MAX_HOLD_S
from staleflow.sim.faults.payload import Learned, manifest_of, weights_of
from staleflow.sim.faults.plan import Plan
from staleflow.sim.faults.world import History, Spell

TICK_S = 0.06
PAUSE_SLACK_S = 0.3
"""The scheduler notices a pause at its next tick, and a report may have arrived just before. The first ``MAX_GAP_S`` of
each pause count as time in which it ran."""
WASTED_AT_ONCE, WASTED_PER_S = 40, 4.0
"""Groups that a broken worker may be given at first, and then a second."""


class Rule(StrEnum):
    """What must hold."""

    ACKNOWLEDGED = "a push that was answered with yes is in the trace, with those bytes"
    SENT = "a push in the trace was made by its worker, with those bytes"
    SERVED = "whoever got bytes got what somebody wrote"
    BATCH = "a batch in a trainer's hand is the sealed one: same step, lineage, digest and members"
    DIGEST = "the digest of a sealed batch is that of its members, in their order"
    COMMITTED = "a version that a trainer was told of is published, with its bytes"
    PUBLISHED = "a published version was sent by a trainer"
    LEARNED = "the weights of a version are what its batches make of those before, each trained once and in order"
    PULLED = "what an instance loaded is what was published"
    ZOMBIE = "no yes for a push under a lease that was over before it was pushed"
    EARLY = "a lease of a worker that was heard in time does not expire"
    LATE = "a lease of a dead or stopped worker is over after its time and a second"
    STORED = "what is pushed, occupied or sealed lies in its shard, with those bytes"
    QUARANTINED = "what is quarantined was changed on its disk, or its disk was lost"
    GARBAGE = "a shard keeps nothing that nobody needs"
    ALIVE = "no server ends by an error of its own"
    PAUSED = "time in which the scheduler stood still does not count against a lease"
    WASTED = "a worker that fails everything is given few groups"
    RETRIED = "what one broken stage worker failed at is not given up before another one has tried"
    POISONED = "a group that no engine of the run can have written is not taken"
    HISTORY = "a server does not work on a store that is older than what others know of it, or empty"
    ENDED = "a run that can go on is not ended"
    PROGRESS = "a run without trouble does not stand still for longer than leases and retries take"


@dataclass(slots=True)
class Findings:
    """What is not as it must be, and how often each rule had something to look at."""

    violations: list[tuple[Rule, str]] = field(default_factory=list[tuple[Rule, str]])
    checks: Counter[str] = field(default_factory=Counter[str])

    def check(self, rule: Rule, holds: bool, why: str, *seen: object) -> None:
        """``why`` is a format for ``seen``."""
        self.checks[rule.name] += 1
        if not holds:
            self.violations.append((rule, why.format(*seen)))


@dataclass(slots=True)
class Told:
    """The trace by what is asked of it."""

    pushes: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict[tuple[int, int], dict[str, Any]])
    seals: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    published: dict[tuple[int, int], str] = field(default_factory=dict[tuple[int, int], str])
    learned: dict[int, Learned] = field(default_factory=dict[int, Learned])
    """By version of the surviving history: what its batches have made of the model."""
    made: dict[tuple[int, int], Learned] = field(default_factory=dict[tuple[int, int], Learned])
    """The same by (lineage, version), of every history."""
    consumed: int = 0
    """The batch that was consumed last."""
    reserved: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    """By lease."""
    over: dict[int, tuple[float, str]] = field(default_factory=dict[int, tuple[float, str]])
    """By lease: when it ended, and how."""
    live: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    """By group: the push of what is pushed, occupied or sealed at the end."""
    by_step: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    """The seal of each step of the surviving history."""
    quarantined: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(group, lease), in the order of the trace."""
    given_up: list[int] = field(default_factory=list[int])
    """Groups that were pushed and that a stage had nothing for."""
    dropped_s: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    """By (group, lease): when what was pushed was dropped."""
    kept: int = 0
    """The version of the oldest checkpoint that is kept: consumed payload of later steps stays."""
    end_s: float = 0.0

    @classmethod
    def by(cls, events: "list[dict[str, Any]]") -> "Told":
        told = cls()
        for event in events:
            told.take(event)
        return told

    def take(self, event: dict[str, Any]) -> None:
        """One line."""
        self.end_s = now_s = event["m"] / 1e9
        match event["ev"]:
            case "reserve":
                self.reserved[event["lease"]] = event
            case "push":
                self.pushes[event["group"], event["lease"]] = event
                self.live[event["group"]] = event
                self.over[event["lease"]] = (now_s, "push")
            case "release":
                if self._let_go(event["group"], now_s) is not None and event["why"] == "aborted":
                    self.given_up.append(event["group"])
                self.over.setdefault(event["lease"], (now_s, event["why"]))
            case "drop":
                push = self._let_go(event["group"], now_s)
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
                self._bring_back(event["to_version"])
            case "publish":
                self._publish(event)
            case _:
                pass

    def _publish(self, event: dict[str, Any]) -> None:
        key, version = (event["lineage"], event["version"]), event["version"]
        self.published[key] = event["sha"]
        if version == 0:
            self.learned[0] = self.made[key] = Learned()
        elif (before := self.learned.get(version - 1)) is not None and self.consumed in self.seals:
            self.learned[version] = self.made[key] = before.after(self.seals[self.consumed]["digest"])[0]

    def _let_go(self, group: int, now_s: float) -> dict[str, Any] | None:
        """The push of a group that nobody will train; None when it was not pushed."""
        push = self.live.pop(group, None)
        if push is not None:
            self.dropped_s[group, push["lease"]] = now_s
        return push

    def _bring_back(self, version: int) -> None:
        """Batches of later steps are undone; the drops that follow in the trace take what must go."""
        for later in [later for later in self.learned if later > version]:
            del self.learned[later]
        for step in [step for step in self.by_step if step >= version]:
            for key in _members(self.by_step.pop(step)):
                if key in self.pushes:
                    self.live.setdefault(key[0], self.pushes[key])

    def needed(self) -> dict[tuple[int, int], dict[str, Any]]:
        """By (group, lease): the push of what is live, and of what a rollback to the oldest checkpoint brings back."""
        may_return = {key for step, seal in self.by_step.items() if step >= self.kept for key in _members(seal)}
        live = {(group, push["lease"]): push for group, push in self.live.items()}
        return live | {key: self.pushes[key] for key in may_return if key in self.pushes}

    def dropped_late(self) -> set[tuple[int, int]]:
        """What was dropped or released when the run ended: shards that ask what may go are told no more."""
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
) -> Findings:
    """``stored``: sha by (group, lease) of what the shards have at the end; ``flipped``: whose bytes were changed, or
    lost with their disk."""
    found, told = Findings(), Told.by(events)
    _pushes(found, journal, told)
    _versions(found, journal, told)
    _learned(found, told, plan.seed)
    lease_s = plan.config.scheduler.lease_s
    _leases(found, journal, history, told, lease_s)
    _paused(found, journal, history, told, lease_s)
    _broken(found, journal, history, told, plan)
    _disks(found, told, stored, flipped)
    found.checks[Rule.SERVED.name] += sum(journal.looked.values())
    found.violations += [(Rule.SERVED, why) for why in journal.wrong]
    found.checks[Rule.HISTORY.name] += history.swapped
    found.violations += [(Rule.HISTORY, why) for why in history.served_wrongly]
    found.check(Rule.ENDED, plan.finite or not journal.gave_up, "the run was ended: {}", journal.gave_up)
    found.checks[Rule.ALIVE.name] += 1
    found.violations += [(Rule.ALIVE, why) for why in history.failures]
    found.checks[Rule.PROGRESS.name] += 1
    found.violations += [(Rule.PROGRESS, why) for why in history.stalls]
    return found


def _pushes(found: Findings, journal: Journal, told: Told) -> None:
    for one in journal.acknowledged:
        push = told.pushes.get(one.key)
        found.check(
            Rule.ACKNOWLEDGED,
            push is not None and push["sha"] == one.sha,
            "group {}, lease {}: {} against {}",
            one.key.group,
            one.key.lease,
            one.sha,
            push,
        )
        over = told.over.get(one.key.lease)
        found.check(
            Rule.ZOMBIE,
            over is None or over[1] == "push",
            "lease {} was over by {}, and its push was taken",
            one.key.lease,
            over,
        )
    for key, push in told.pushes.items():
        sent = journal.sent.get(Key(GroupId(key[0]), LeaseId(key[1])), [])
        found.check(
            Rule.SENT,
            any(one.sha == push["sha"] and one.worker == push["worker"] for one in sent),
            "nobody pushed {}",
            push,
        )


def _versions(found: Findings, journal: Journal, told: Told) -> None:
    for seal in told.seals.values():
        lines = ["{group} {lease} {lineage} {version} {sha}\n".format_map(member) for member in seal["members"]]
        digest = hashlib.sha256("".join(lines).encode()).hexdigest()
        found.check(Rule.DIGEST, seal["digest"] == digest, "batch {} has another digest", seal["batch"])
    for fetched in journal.fetched:
        sealed = told.seals.get(fetched.batch)
        same = sealed is not None and (
            (sealed["step"], sealed["lineage"], sealed["digest"]) == (fetched.step, fetched.lineage, fetched.digest)
            and tuple(member["group"] for member in sealed["members"]) == fetched.groups
        )
        found.check(Rule.BATCH, same, "{} against {}", fetched, sealed)
    for one in journal.committed:
        sha = told.published.get((one.lineage, one.version))
        found.check(Rule.COMMITTED, sha == one.sha, "{} against {}", one, sha)
    for key, sha in told.published.items():
        sent = journal.published.get((Lineage(key[0]), Version(key[1])), set())
        found.check(Rule.PUBLISHED, sha in sent, "nobody sent {}", key)
    for lineage, version, sha in journal.pulled:
        known = told.published.get((lineage, version))
        found.check(Rule.PULLED, known == sha, "version {} of lineage {} is {}, not {}", version, lineage, known, sha)


def _learned(found: Findings, told: Told, seed: int) -> None:
    for key, sha in told.published.items():
        state = told.made.get(key)
        right = state is not None and manifest_of(weights_of(seed, state)).sha == sha
        found.check(Rule.LEARNED, right, "version {} is not what its batches make", key)


def _leases(found: Findings, journal: Journal, history: History, told: Told, lease_s: float) -> None:
    heard: dict[str, list[tuple[float, float]]] = {
        worker: [(one.sent_s, one.answered_s) for one in reports] for worker, reports in journal.heard.items()
    }
    for lease, (over_s, why) in told.over.items():
        if why == "expired":
            if (reserve := told.reserved.get(lease)) is None:
                continue
            since_s = over_s - lease_s + TICK_S
            fresh = any(sent > since_s and answered < over_s for sent, answered in heard.get(reserve["worker"], ()))
            found.check(
                Rule.EARLY,
                not fresh and reserve["m"] / 1e9 <= since_s,
                "lease {} of {} expired too early",
                lease,
                reserve["worker"],
            )
    leases: dict[str, list[int]] = defaultdict(list)
    for lease, reserve in told.reserved.items():
        leases[reserve["worker"]].append(lease)
    for spell in history.silent:
        for lease in leases[spell.what]:
            since_s = max(told.reserved[lease]["m"] / 1e9, spell.since_s)
            until_s = min(told.over.get(lease, (told.end_s, ""))[0], spell.until_s)
            longest_s = _longest(history.serving, since_s, until_s)
            found.check(
                Rule.LATE,
                longest_s <= lease_s + 1.0,
                "lease {} outlived its holder by {:.2f} s",
                lease,
                longest_s,
            )


def _paused(found: Findings, journal: Journal, history: History, told: Told, lease_s: float) -> None:
    for lease, (over_s, why) in told.over.items():
        if (reserve := told.reserved.get(lease)) is None:
            continue
        heard = [one.answered_s for one in journal.heard.get(reserve["worker"], ()) if one.answered_s < over_s]
        since_s = max(reserve["m"] / 1e9, *heard[-1:])
        spans = (min(spell.until_s, over_s) - max(spell.since_s, since_s) for spell in history.paused)
        pauses = [span_s for span_s in spans if span_s > 0]
        outlived = over_s - since_s > lease_s  # it would have expired if its pauses had counted
        if pauses and (why == "expired" or outlived):
            paused_s = sum(pauses)
            counted_s = MAX_GAP_S * len(pauses)
            found.check(
                Rule.PAUSED,
                why != "expired" or over_s - since_s - paused_s + counted_s > lease_s - PAUSE_SLACK_S,
                "lease {} of {} expired while the scheduler stood still for {:.1f} s",
                lease,
                reserve["worker"],
                paused_s,
            )


def _broken(found: Findings, journal: Journal, history: History, told: Told, plan: Plan) -> None:
    given_up: dict[str, list[float]] = defaultdict(list)
    for lease, (over_s, why) in told.over.items():
        if why == "aborted" and (reserve := told.reserved.get(lease)) is not None:
            given_up[reserve["worker"].rpartition(".")[0]].append(over_s)
    for spell in history.broken:
        until_s = min(spell.until_s, told.end_s)
        if plan.loses_workers or _others_failed(history, plan, spell):
            continue  # where no instance does better, the prompts may be at fault, and all are tried
        count = sum(spell.since_s < at_s < until_s for at_s in given_up[spell.what])
        most = WASTED_AT_ONCE + WASTED_PER_S * (until_s - spell.since_s)
        found.check(Rule.WASTED, count <= most, "{} failed at {} groups in {}", spell.what, count, spell)
    for group in told.given_up:
        failures = journal.failed_stages.get(GroupId(group), [])
        if failures and plan.stages > 1 and not plan.loses_workers:
            workers = journal.tried_stages[GroupId(group)]
            tried = len(workers) > 1 or not all(one.broken for one in failures)
            found.check(Rule.RETRIED, tried, "group {} was given up after {} alone had failed", group, workers)
    for key, sha in journal.poisoned:
        push = told.pushes.get(key)
        found.check(Rule.POISONED, push is None or push["sha"] != sha, "group {}, lease {} was taken", *key)


def _others_failed(history: History, plan: Plan, spell: Spell) -> bool:
    """Whether each other worker was broken at the time of ``spell``, or may not have pushed since."""
    late = {
        other.what
        for other in history.broken
        if other.what != spell.what and other.since_s < spell.until_s and spell.since_s < other.until_s + MAX_HOLD_S
    }
    return len(late) >= plan.engines - 1


def _longest(spells: list[Spell], since_s: float, until_s: float) -> float:
    """The longest time between the two in which the scheduler worked without a break."""
    return max((min(s.until_s, until_s) - max(s.since_s, since_s) for s in spells), default=0.0)


def _disks(found: Findings, told: Told, stored: Mapping[tuple[int, int], str], flipped: set[tuple[int, int]]) -> None:
    needed = told.needed()
    for key, push in needed.items():
        found.check(
            Rule.STORED,
            stored.get(key) == push["sha"] or key in flipped,
            "{} lies there as {}",
            push,
            stored.get(key),
        )
    for key in told.quarantined:
        found.check(Rule.QUARANTINED, key in flipped, "group {}, lease {} was quarantined, and nothing was wrong", *key)
    excused = needed.keys() | told.dropped_late() | flipped
    for key in stored:
        found.check(Rule.GARBAGE, key in excused, "group {}, lease {} is garbage", *key)
