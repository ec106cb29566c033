"""Rebuild from a trace the status that the scheduler would have reported at each moment.

Windows and pins come from the ledger's own ``Window``, filled with the live groups of the fold. Values that a trace
does not contain, such as the engines' queues and caches, stay empty.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import islice

from staleflow.monitor.words import worker_name
from staleflow.protocols.consistency.bucket import by_lease
from staleflow.protocols.consistency.groups import Group, State
from staleflow.protocols.consistency.ids import Step, Version, WorkerId
from staleflow.protocols.consistency.limits import Bound, Limits, OnOverdue
from staleflow.protocols.consistency.window import Window
from staleflow.protocols.wire.messages import SchedulerStatus
from staleflow.protocols.wire.messages.status import (
    Ages,
    InstanceStatus,
    Pin,
    Pinned,
    RunTotals,
    WindowStatus,
    WorkerStatus,
)
from staleflow.servers.scheduler.lengths.durations import Durations
from staleflow.servers.scheduler.status.sentences import pinned, starved
from staleflow.trace import events
from staleflow.trace.fold import Fold
from staleflow.trace.highlights import Recent, brief
from staleflow.trace.reader import Line

RATE_WINDOW_S = 10.0
"""Window for the rate of tokens per second."""
MAX_PINS = 16
MAX_STEP_DISTANCE = 1_000
"""Maximum distance between the next step and the newest version in a valid trace, as each one waits for the other."""


class Contradiction(Exception):
    """An event contradicts the events before it, such as a push without a lease or a step out of range."""


class Engine:
    """State of one instance according to the trace."""

    def __init__(self) -> None:
        self.version = -1
        self.command = ""
        self.pushed: deque[tuple[float, int]] = deque()
        """(second, tokens) within the last ``RATE_WINDOW_S``."""

    def tokens_per_s(self, now_s: float) -> float:
        while self.pushed and self.pushed[0][0] < now_s - RATE_WINDOW_S:
            self.pushed.popleft()
        return sum(tokens for _, tokens in self.pushed) / RATE_WINDOW_S


class TraceState:
    """State of a run according to the events so far. ``feed`` applies events in order; ``status`` returns the state.

    Lines are trusted as ``read_lines`` returns them; ``feed`` raises ``Contradiction`` for an impossible one.
    """

    def __init__(self, steps: int = 0) -> None:
        """``steps``: number of steps of the whole run; 0 if unknown."""
        self._steps = steps
        self._fold = Fold()
        self._limits = Limits(max_staleness=0, batch_size=1)
        self._engines: dict[WorkerId, Engine] = {}
        self._totals = RunTotals()
        self._staleness: Counter[int] = Counter()
        self._delivered = -1
        self._violations = 0
        self._leased, self._staged = Durations(), Durations()
        self._recent = Recent()
        self._last: tuple[int, int] = (0, 0)

    @property
    def now_s(self) -> float:
        """Seconds since the first event."""
        return self._fold.now_s

    def at_s(self, line: Line) -> float:
        """Return the time of the next event: by the monotonic clock within an incarnation, by labels between two."""
        mono_ns, unix_ns = self._last
        if self._fold.opening is None:
            return 0.0
        passed_ns = line.t - unix_ns if line.ev == "open" else line.m - mono_ns
        return self.now_s + max(passed_ns, 0) / 1e9

    def feed(self, line: Line) -> None:
        """Apply the next event."""
        first = self._fold.opening is None
        self._fold.see(line, self.at_s(line))
        self._last = line.m, line.t
        try:
            if first and isinstance(line.event, events.Open):
                opening = line.event
                self._limits = Limits(
                    max_staleness=opening.max_staleness, batch_size=opening.batch_size, bound=opening.bound
                )
            self._check(line.event)
        except ValueError as error:
            raise Contradiction(f"{line.ev} cannot follow: {error}") from error
        self._count(line.event)
        recent = {"t": line.t, "ev": line.ev} if line.event is None else brief(line.event, line.t)
        if recent is not None:
            self._recent.add(recent)

    def _check(self, event: events.AnyEvent | None) -> None:
        """Reject groups that are not live, and a window that is too large to display: every step between version and
        next step becomes a row."""
        match event:
            case events.Push() | events.Occupy() | events.Claim() | events.Release() | events.Drop():
                named = [event.group] if self._fold.group is None else []
            case events.Seal():
                named = [member.group for member in event.members if member.group not in self._fold.groups]
            case _:
                named = []
        if named:
            raise ValueError(f"group {named[0]} is not live")
        step, version = self._fold.step, self._fold.version
        if abs(version - step) > MAX_STEP_DISTANCE:
            raise ValueError(f"step {step} is next, and version {version} is the newest")

    def _count(self, event: events.AnyEvent | None) -> None:
        """Update what the status contains beyond the state of the fold."""
        batch, now_ms = self._fold.batch, self._now_ms()
        match event:
            case events.Reserve():
                self._leased.begin(event.group, now_ms)
                self._totals.reserves += 1
                self._engines.setdefault(event.worker, Engine()).command = f"assign {event.group}"
            case events.Push():
                if event.worker in self._engines:
                    self._engines[event.worker].pushed.append((self.now_s, event.tokens))
                self._leased.end(event.group, now_ms)
                self._staged.begin(event.group, now_ms)
                self._totals.tokens_pushed += event.tokens
            case events.Occupy():
                self._staged.end(event.group, now_ms)
            case events.Release():
                self._leased.forget((event.group,))
                self._staged.forget((event.group,))
            case events.Seal() if batch is not None and self._limits.bound is not Bound.TOKEN:
                bound = self._limits.max_staleness
                self._violations += sum(groups for age, groups in batch.ages.items() if age > bound)
            case events.Consume() if batch is not None:
                self._staleness.update(batch.ages)
                self._totals.tokens_trained += batch.trained_tokens
            case events.Deliver():
                self._delivered = event.step
            case events.Join():
                self._delivered = -1
            case events.Attach() if event.role == "rollout":
                self._engines.setdefault(event.worker, Engine())
            case events.Detach():
                self._engines.pop(event.worker, None)
            case events.Pull() if event.ok and event.worker in self._engines:
                engine = self._engines[event.worker]
                engine.version, engine.command = event.version, f"pull v{event.version}"
            case _:
                pass

    # --- the status --------------------------------------------------------------------------------------------

    def _now_ms(self) -> int:
        return int(self.now_s * 1000)

    def _window(self) -> Window:
        """Return the ledger's window with the live groups."""
        window = Window(self._limits)
        window.step, window.version = Step(self._fold.step), Version(self._fold.version)
        for group in sorted(self._fold.groups.values(), key=by_lease):
            if group.live:
                window.enter(group)
        return window

    def status(self) -> SchedulerStatus:
        """Return the status that the scheduler had, as far as a trace contains it."""
        fold, window = self._fold, self._window()
        opening, counts, pins = fold.opening, self._counts(window), self._pins(window)
        held = Counter(group.worker for group in fold.groups.values() if group.state is State.LEASED)
        rows = tuple(
            WindowStatus(deadline=deadline, leased=leased, pushed=pushed, occupied=occupied)
            for deadline, leased, pushed, occupied in window.rows()
        )
        return SchedulerStatus(
            run=fold.run,
            incarnation=fold.incarnation,
            uptime_s=self.now_s - fold.opened_s,
            run_s=self.now_s,
            lineage=fold.lineage,
            version=fold.version,
            next_step=fold.step,
            steps=self._steps,
            trainer_term=fold.term,
            max_staleness=window.max_staleness,
            bound=opening.bound if opening else "",
            on_overdue=opening.on_overdue if opening else "",
            batch_size=window.batch_size,
            group_size=self._group_size,
            ledger=counts,
            window=rows,
            pinned=Pinned(step=fold.step, groups=tuple(pins[:MAX_PINS])),
            why=self._why(counts, pins),
            trainer_waits=self._trainer_waits(window, counts),
            staleness=self._ages(() if window.token_bound else rows),
            recent=tuple(self._recent.lines()),
            instances=tuple(self._instance(worker, engine, held[worker]) for worker, engine in self._engines.items()),
            workers=tuple(
                WorkerStatus(worker=worker, name=worker_name(worker), role=role)
                for worker, role in fold.workers.items()
            ),
            totals=self._totals,
            violations=self._violations,
            finished=fold.closed is not None,
        )

    @property
    def _group_size(self) -> int:
        return self._fold.opening.group_size if self._fold.opening else 1

    def _counts(self, window: Window) -> dict[str, int]:
        names = (State.LEASED, State.PUSHED, State.OCCUPIED, State.SEALED, State.CONSUMED)
        by_state = {state.name.lower(): self._fold.counts[state] for state in names}
        return {**by_state, "claimed": window.claimed, "spares": window.num_spares}

    def _ages(self, rows: Sequence[WindowStatus]) -> Ages:
        newest, rows = self._fold.version + self._limits.max_staleness, rows[::-1]
        return Ages(
            in_flight=tuple((newest - row.deadline, row.leased) for row in rows),
            in_queue=tuple((newest - row.deadline, row.pushed + row.occupied) for row in rows),
            consumed=tuple(sorted(self._staleness.items())),
        )

    def _instance(self, worker: WorkerId, engine: Engine, held: int) -> InstanceStatus:
        return InstanceStatus(
            worker=worker,
            name=worker_name(worker),
            version=engine.version,
            running=held * self._group_size,
            tokens_per_s=engine.tokens_per_s(self.now_s),
            held=held,
            last_command=engine.command,
        )

    # --- why ---------------------------------------------------------------------------------------------------

    def _pins(self, window: Window) -> list[Pin]:
        pinning = window.pinning() if self._fold.term else []
        return [self._pin(group) for bucket, count in pinning for group in islice(bucket.unfinished(), count)]

    def _pin(self, group: Group) -> Pin:
        leased = group.state is State.LEASED
        took, now = (self._leased if leased else self._staged), self._now_ms()
        return Pin(
            group=group.id,
            version=group.version,
            worker=worker_name(group.worker) if leased else "",
            so_far_s=took.so_far_s(group.id, now),
            left_s=took.left_s(group.id, now),
        )

    def _trainer_waits(self, window: Window, counts: Mapping[str, int]) -> str:
        fold = self._fold
        if not fold.term or fold.version < 0 or self._delivered >= fold.version or fold.closed:
            return ""
        if window.occupied + window.claimed >= window.batch_size:
            return "older groups"
        return "stages" if counts["pushed"] >= window.batch_size - counts["occupied"] else "engines"

    def _why(self, counts: Mapping[str, int], pins: list[Pin]) -> str:
        fold = self._fold
        step, version, steps = fold.step, fold.version, self._steps or 2**62
        if fold.closed:
            return "the scheduler closed the trace"
        if not fold.term:
            return "no trainer has joined"
        if version < 0:
            return "version 0 is not published yet"
        if step > version + 1 or step >= steps:
            return f"the trainer works on step {version}" if version < steps else "every step is trained"
        training = f"the trainer works on step {version}; " if step > version else ""
        if pins:
            policy = fold.opening.on_overdue if fold.opening else OnOverdue.WAIT
            return training + pinned(step, pins[:MAX_PINS], len(pins), policy.value)
        need = self._limits.batch_size
        return training + starved(step, need, counts, self._staged.until_s(need - counts["occupied"]))
