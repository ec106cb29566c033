"""Compute ``Facts`` and lanes in one pass over a trace. ``staleflow.trace.audit.report`` validates it."""

from dataclasses import replace
from pathlib import Path

from staleflow.monitor.lanes import Lane, Lanes, stage_lines
from staleflow.monitor.words import worker_name
from staleflow.protocols.consistency.groups import State
from staleflow.report.facts import Facts, Happening, Spent, VersionFact
from staleflow.store.disk_errors import trouble
from staleflow.trace import events
from staleflow.trace.fold import Fold
from staleflow.trace.reader import Line, read_lines

EXPECTED_ENDS = ("drained", "finished", "closed", "asked only")
"""Reasons of a detach that are not reported."""
TOGETHER_S = 2.0
"""Leases of one worker that expire within this time are reported as one event."""


def read(trace: Path) -> tuple[Facts, list[Lane]]:
    """Return the facts and the lanes of a run, given its trace."""
    fold = Fold()
    reader, lanes = Reader(fold), Lanes(fold)
    for line in fold.over(read_lines(trace)):
        reader.see(line)
        lanes.see(line)
    return reader.facts, lanes.all(stage_lines(trace.parent))


class Reader:
    """Accumulates ``facts`` from the lines that ``fold`` has applied."""

    def __init__(self, fold: Fold) -> None:
        self.facts = Facts(steps=fold.trained)
        self._fold = fold
        self._versions: dict[tuple[int, int], VersionFact] = {}
        self._ended: dict[str, bool] = {}
        """Names of earlier workers, and whether they detached in order."""
        self._lost: tuple[str, float, int, int] = ("", 0.0, 0, 0)
        """Worker whose leases expired last: its name, the time, the count, and the index of the reporting event."""

    def see(self, line: Line) -> None:
        """Add the line that the fold applied last."""
        facts, now_s, batch = self.facts, self._fold.now_s, self._fold.batch
        match line.event:
            case events.Push() as event:
                facts.pushed.add(event.tokens)
            case events.Release() as event:
                self._released(event)
            case events.Drop() as event:
                facts.dropped.setdefault(event.why, Spent()).add(event.tokens)
                if event.why == "quarantine":
                    self._report(f"group {event.group} is quarantined: its stored bytes are damaged", bad=True)
            case events.Unseal() as event if batch is not None:
                self._report(f"the batch of step {batch.step} is assembled again: {event.why}", bad=True)
            case events.Publish() as event:
                place = event.lineage, event.version
                version = VersionFact(lineage=place[0], version=place[1], published_s=now_s, nbytes=event.nbytes)
                self._versions[place] = version
                facts.versions.append(version)
            case events.Pull() as event if (pulled := self._versions.get((event.lineage, event.version))) is not None:
                if event.ok:
                    pulled.loads_s.append(now_s - pulled.published_s)
                else:
                    pulled.failed += 1
            case events.CheckpointKept():
                facts.checkpoints += 1
            case events.Rollback() as event:
                self._rolled_back(event.to_version)
            case events.Open() as event:
                self._opened(line, event)
            case events.Attach() as event if event.role not in ("monitor", "admin"):
                self._attached(event)
            case events.Detach() as event:
                self._detached(event)
            case events.Join() as event if event.trainer_term > 1:
                self._report(f"{worker_name(event.trainer)} took over, term {event.trainer_term}")
            case events.Auth() as event if not event.ok:
                self._report(f"{event.peer or 'a connection'} was turned away: {event.why}", bad=True)
            case events.Reject() as event:
                facts.rejects[event.code] += event.count
            case events.Overload() as event:
                share = f"{event.used:.0%} of the map used"
                on = f"the {trouble(event.resource)} ({share}): new work is rejected"
                self._report(on if event.on else f"space is available again ({share})", bad=event.on)
            case events.Close() as event:
                facts.closed = event.why
                self._ended = dict.fromkeys(self._ended, True)  # the whole run ended in order
            case _:
                pass
        counts = self._fold.counts
        facts.levels.see(
            now_s, (counts[State.LEASED], counts[State.PUSHED], counts[State.OCCUPIED], counts[State.SEALED])
        )
        facts.seconds = now_s

    def _report(self, text: str, *, bad: bool = False) -> None:
        self.facts.happenings.append(Happening(at_s=self._fold.now_s, bad=bad, text=text))

    def _released(self, event: events.Release) -> None:
        self.facts.released.setdefault(event.why, Spent()).add(event.tokens)
        if event.why == "expired" and self._fold.group is not None:
            self._expired(worker_name(self._fold.group.worker))

    def _expired(self, worker: str) -> None:
        """Report several expired leases of one worker as one event."""
        sent, now_s = self.facts.happenings, self._fold.now_s
        last, at_s, count, place = self._lost
        together = last == worker and now_s - at_s < TOGETHER_S
        count, place = (count + 1, place) if together else (1, len(sent))
        self._lost = worker, now_s, count, place
        text = f"{worker} lost {count} lease{'s' if count > 1 else ''}: not heard from in time"
        if together:
            sent[place] = replace(sent[place], text=text)
        else:
            self._report(text, bad=True)

    def _rolled_back(self, to: int) -> None:
        facts = self.facts
        undone = [step for step in facts.steps if step.step >= to]
        facts.steps = self._fold.trained
        facts.versions = [version for version in facts.versions if version.version <= to]
        facts.undone_steps += len(undone)
        facts.undone_tokens += sum(step.trained_tokens for step in undone)
        undo = f": {len(undone)} step{'s are' if len(undone) > 1 else ' is'} trained again" if undone else ""
        self._report(f"rolled back to version {to}{undo}", bad=True)

    def _opened(self, line: Line, event: events.Open) -> None:
        facts = self.facts
        facts.incarnations = line.inc
        asked, facts.closed = bool(facts.closed), ""
        if line.inc > 1:
            result = event.recovered
            kept = result.reserved + result.occupied
            self._report(f"the scheduler restarted, with {kept} groups and version {result.version}", bad=not asked)
            return
        facts.run, facts.began_unix_s = line.run, line.t / 1e9
        facts.max_staleness, facts.bound, facts.on_overdue = event.max_staleness, event.bound, event.on_overdue
        facts.batch_size, facts.group_size = event.batch_size, event.group_size

    def _attached(self, event: events.Attach) -> None:
        name = worker_name(event.worker)
        if name not in self._ended:
            if self.facts.steps:
                self._report(f"{name} joined ({event.role})")
        elif event.why:
            self._report(f"{name} is heard again")
        elif self._ended[name]:
            self._report(f"{name} came back")
        else:
            self._report(f"{name} died: a new process has its name", bad=True)
        self._ended[name] = False

    def _detached(self, event: events.Detach) -> None:
        name, why = worker_name(event.worker), event.why
        silent, replaced = why == "silent", why.startswith("replaced by")
        if name not in self._ended or replaced:
            return
        self._ended[name] = not silent
        if why not in EXPECTED_ENDS:
            self._report(f"{name} fell silent" if silent else f"{name} left: {why or 'it said goodbye'}", bad=silent)
