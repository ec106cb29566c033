"""Compute ``Facts`` in one pass over a trace.

The reader keeps live groups and the groups of batches that a rollback could still restore. It does not validate the
trace; ``staleflow.trace.audit.report`` does.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from staleflow.monitor.words import worker_name
from staleflow.report.facts import Facts, Happening, Last, Spent, StepFact, VersionFact
from staleflow.store.disk_errors import trouble
from staleflow.trace.running_time import timed

Event = Mapping[str, Any]
EXPECTED_ENDS = ("drained", "finished", "closed", "asked only")
"""Reasons of a detach that are not reported."""
TOGETHER_S = 2.0
"""Leases of one worker that expire within this time are reported as one event."""
STATES = ("leased", "pushed", "occupied", "sealed")


class _Group:
    """A live group."""

    __slots__ = ("occupied_s", "pushed_s", "reserved_s", "state", "version", "worker")

    def __init__(self, worker: str, version: int, reserved_s: float) -> None:
        self.worker, self.version = worker, version
        self.reserved_s = self.pushed_s = self.occupied_s = reserved_s
        self.state = "leased"


class _Batch:
    """A sealed batch."""

    __slots__ = ("fact", "groups", "step")

    def __init__(self, step: int, groups: dict[int, _Group], fact: dict[str, Any]) -> None:
        self.step, self.groups, self.fact = step, groups, fact


class Reader:
    """Consumes events in order and accumulates ``facts``."""

    def __init__(self) -> None:
        self.facts = Facts()
        self._groups: dict[int, _Group] = {}
        self._counts: dict[str, int] = dict.fromkeys(STATES, 0)
        self._batches: dict[int, _Batch] = {}
        """Batches that are sealed and not consumed."""
        self._spent: list[_Batch] = []
        """Consumed batches that a rollback may still revoke."""
        self._versions: dict[tuple[int, int], VersionFact] = {}
        self._seen: dict[str, bool] = {}
        """Names of earlier workers, and whether they detached in order."""
        self._lost: tuple[str, float, int, int] = ("", 0.0, 0, 0)
        """Worker whose leases expired last: its name, the time, the count, and the index of the reporting event."""
        self._joined_s = 0.0
        """Time at which the trainer of this term joined."""
        self._now_s = 0.0
        self._handlers = self._table()

    def _table(self) -> dict[str, Callable[[Event], None]]:
        return {
            "open": self._on_open,
            "auth": self._on_auth,
            "attach": self._on_attach,
            "detach": self._on_detach,
            "publish": self._on_publish,
            "pull": self._on_pull,
            "join": self._on_join,
            "rollback": self._on_rollback,
            "reserve": self._on_reserve,
            "push": self._on_push,
            "occupy": self._on_occupy,
            "release": self._on_release,
            "drop": self._on_drop,
            "seal": self._on_seal,
            "unseal": self._on_unseal,
            "consume": self._on_consume,
            "checkpoint": self._on_checkpoint,
            "reject": self._on_reject,
            "overload": self._on_overload,
            "close": self._on_close,
        }

    def read(self, events: Iterable[Event]) -> Facts:
        """Read all events and return the facts."""
        for now_s, event in timed(events):
            self._now_s = now_s
            if (handler := self._handlers.get(event["ev"])) is not None:
                handler(event)
            leased, pushed, occupied, sealed = self._counts.values()
            self.facts.levels.see(now_s, (leased, pushed, occupied, sealed))
        self.facts.seconds = self._now_s
        return self.facts

    def _report(self, text: str, *, bad: bool = False) -> None:
        self.facts.happenings.append(Happening(at_s=self._now_s, bad=bad, text=text))

    # --- groups ----------------------------------------------------------------------------------------------

    def _enter(self, id: int, group: _Group, state: str) -> None:
        group.state = state
        self._groups[id] = group
        self._counts[state] += 1

    def _move(self, id: int, state: str) -> _Group | None:
        group = self._groups.get(id)
        if group is not None:
            self._counts[group.state] -= 1
            group.state = state
            self._counts[state] += 1
        return group

    def _leave(self, id: int) -> _Group | None:
        group = self._groups.pop(id, None)
        if group is not None:
            self._counts[group.state] -= 1
        return group

    def _on_reserve(self, event: Event) -> None:
        group = _Group(worker_name(event["worker"]), event["version"], self._now_s)
        self._enter(event["group"], group, "leased")

    def _on_push(self, event: Event) -> None:
        self.facts.pushed.add(sum(segment["tokens"] for segment in event["segments"]))
        if (group := self._move(event["group"], "pushed")) is not None:
            group.pushed_s = self._now_s

    def _on_occupy(self, event: Event) -> None:
        if (group := self._move(event["group"], "occupied")) is not None:
            group.occupied_s = self._now_s

    def _on_release(self, event: Event) -> None:
        group = self._leave(event["group"])
        self.facts.released.setdefault(event["why"], Spent()).add(event["tokens"])
        if event["why"] == "expired" and group is not None:
            self._expired(group.worker)

    def _expired(self, worker: str) -> None:
        """Report several expired leases of one worker as one event."""
        told = self.facts.happenings
        last, at_s, count, place = self._lost
        together = last == worker and self._now_s - at_s < TOGETHER_S
        count, place = (count + 1, place) if together else (1, len(told))
        self._lost = worker, self._now_s, count, place
        text = f"{worker} lost {count} lease{'s' if count > 1 else ''}: not heard from in time"
        if together:
            told[place] = replace(told[place], text=text)
        else:
            self._report(text, bad=True)

    def _on_drop(self, event: Event) -> None:
        self._leave(event["group"])
        self.facts.dropped.setdefault(event["why"], Spent()).add(event["tokens"])
        if event["why"] == "quarantine":
            self._report(f"group {event['group']} is quarantined: its stored bytes are damaged", bad=True)

    # --- batches and versions --------------------------------------------------------------------------------

    def _on_seal(self, event: Event) -> None:
        step, members = event["step"], event["members"]
        held = {member["group"]: group for member in members if (group := self._move(member["group"], "sealed"))}
        ages: dict[int, int] = {}
        for member in members:
            age = step - member["version"]
            ages[age] = ages.get(age, 0) + 1
        published = self._versions.get((event["lineage"], step)) or self._versions.get((self._lineage(), step))
        since_s = max(published.published_s if published else self._now_s, self._joined_s)
        fact = {
            "step": step,
            "lineage": event["lineage"],
            "sealed_s": self._now_s,
            "waited_s": max(self._now_s - since_s, 0.0),
            "ages": ages,
            "tokens": event["tokens"],
            "masked": event["masked_tokens"],
            **self._phases(list(held.values())),
            "last": _last(held),
        }
        self._batches[event["batch"]] = _Batch(step, held, fact)

    def _lineage(self) -> int:
        return self.facts.versions[-1].lineage if self.facts.versions else 0

    def _phases(self, groups: list[_Group]) -> dict[str, float]:
        number = max(len(groups), 1)
        return {
            "writing_s": sum(group.pushed_s - group.reserved_s for group in groups) / number,
            "staging_s": sum(group.occupied_s - group.pushed_s for group in groups) / number,
            "queueing_s": sum(self._now_s - group.occupied_s for group in groups) / number,
        }

    def _on_unseal(self, event: Event) -> None:
        batch = self._batches.pop(event["batch"], None)
        if batch is not None:
            for id in batch.groups:
                self._move(id, "occupied")
            self._report(f"the batch of step {batch.step} is assembled again: {event['why']}", bad=True)

    def _on_consume(self, event: Event) -> None:
        batch = self._batches.pop(event["batch"], None)
        if batch is not None:
            for id in batch.groups:
                self._leave(id)
            self._spent.append(batch)
            self.facts.steps.append(StepFact(consumed_s=self._now_s, **batch.fact))

    def _on_publish(self, event: Event) -> None:
        place = event["lineage"], event["version"]
        version = VersionFact(lineage=place[0], version=place[1], published_s=self._now_s, nbytes=event["bytes"])
        self._versions[place] = version
        self.facts.versions.append(version)

    def _on_pull(self, event: Event) -> None:
        version = self._versions.get((event["lineage"], event["version"]))
        if version is not None and event["ok"]:
            version.loads_s.append(self._now_s - version.published_s)
        elif version is not None:
            version.failed += 1

    def _on_checkpoint(self, event: Event) -> None:
        self.facts.checkpoints += 1
        self._spent = [batch for batch in self._spent if batch.step >= event["version"]]

    def _on_rollback(self, event: Event) -> None:
        to = event["to_version"]
        undone = [step for step in self.facts.steps if step.step >= to]
        self.facts.steps = [step for step in self.facts.steps if step.step < to]
        self.facts.versions = [version for version in self.facts.versions if version.version <= to]
        self.facts.undone_steps += len(undone)
        self.facts.undone_tokens += sum(step.tokens - step.masked for step in undone)
        for batch in self._spent:
            for id, group in batch.groups.items() if batch.step >= to else ():
                self._enter(id, group, "occupied")
        self._spent = [batch for batch in self._spent if batch.step < to]
        for id in [id for id, batch in self._batches.items() if batch.step >= to]:
            for member in self._batches.pop(id).groups:
                self._move(member, "occupied")
        undo = f": {len(undone)} step{'s are' if len(undone) > 1 else ' is'} trained again" if undone else ""
        self._report(f"rolled back to version {to}{undo}", bad=True)

    # --- peers -----------------------------------------------------------------------------------------------

    def _on_open(self, event: Event) -> None:
        facts = self.facts
        facts.incarnations = event["inc"]
        asked, facts.closed = bool(facts.closed), ""
        if event["inc"] > 1:
            found = event["recovered"]
            kept = found["reserved"] + found["occupied"]
            self._report(f"the scheduler restarted, with {kept} groups and version {found['version']}", bad=not asked)
            return
        facts.run, facts.began_unix_s = event["run"], event["t"] / 1e9
        for key in ("max_staleness", "bound", "on_overdue", "batch_size", "group_size"):
            setattr(facts, key, event[key])

    def _on_attach(self, event: Event) -> None:
        name, role = worker_name(event["worker"]), event["role"]
        if role in ("monitor", "admin"):
            return
        if name not in self._seen:
            if self.facts.steps:
                self._report(f"{name} joined ({role})")
        elif event["why"]:
            self._report(f"{name} is heard again")
        elif self._seen[name]:
            self._report(f"{name} came back")
        else:
            self._report(f"{name} died: a new process has its name", bad=True)
        self._seen[name] = False

    def _on_detach(self, event: Event) -> None:
        name, why = worker_name(event["worker"]), event["why"]
        silent, replaced = why == "silent", why.startswith("replaced by")
        if name not in self._seen or replaced:
            return
        self._seen[name] = not silent
        if why not in EXPECTED_ENDS:
            self._report(f"{name} fell silent" if silent else f"{name} left: {why or 'it said goodbye'}", bad=silent)

    def _on_join(self, event: Event) -> None:
        self._joined_s = self._now_s
        if event["trainer_term"] > 1:
            self._report(f"{worker_name(event['trainer'])} took over, term {event['trainer_term']}")

    def _on_auth(self, event: Event) -> None:
        if not event["ok"]:
            self._report(f"{event['peer'] or 'a connection'} was turned away: {event['why']}", bad=True)

    def _on_reject(self, event: Event) -> None:
        self.facts.rejects[event["code"]] += event["count"]

    def _on_overload(self, event: Event) -> None:
        share = f"{event['used']:.0%} of the map used"
        on = f"the {trouble(event['resource'])} ({share}): new work is rejected"
        self._report(on if event["on"] else f"space is available again ({share})", bad=event["on"])

    def _on_close(self, event: Event) -> None:
        self.facts.closed = event["why"]
        self._seen = dict.fromkeys(self._seen, True)  # the whole run ended in order


def _last(groups: Mapping[int, _Group]) -> Last | None:
    if not groups:
        return None
    id, group = max(groups.items(), key=lambda item: item[1].occupied_s)
    return Last(group=id, worker=group.worker, version=group.version, took_s=group.occupied_s - group.reserved_s)
