"""Rebuild from a trace the status that the scheduler would have reported at each moment.

Windows and pins come from the ledger's own ``Window``; events supply the state of each group. Values that a trace does
not contain, such as the engines' queues and caches, stay empty.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from staleflow.monitor.words import worker_name
from staleflow.protocols.consistency.errors import InvariantError
from staleflow.protocols.consistency.groups import NO_CLAIM, Group, State
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Step, Version, WorkerId
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
from staleflow.trace.highlights import Recent, noteworthy, short

Line = Mapping[str, Any]

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
        self.held: dict[int, None] = {}
        self.command = ""
        self.pushed: deque[tuple[float, int]] = deque()
        """(second, tokens) within the last ``RATE_WINDOW_S``."""

    def tokens_per_s(self, now_s: float) -> float:
        while self.pushed and self.pushed[0][0] < now_s - RATE_WINDOW_S:
            self.pushed.popleft()
        return sum(tokens for _, tokens in self.pushed) / RATE_WINDOW_S


class TraceState:
    """State of a run according to the events so far. ``feed`` applies events in order; ``status`` returns the state.

    Events are trusted as ``read_events`` returns them; ``feed`` raises ``Contradiction`` for an impossible one.
    """

    def __init__(self, steps: int = 0) -> None:
        """``steps``: number of steps of the whole run; 0 if unknown."""
        self._steps = steps
        self._opening: Line = {}
        self._window = Window(Limits(max_staleness=0, batch_size=1))
        self._groups: dict[int, Group] = {}
        self._batches: dict[int, list[Group]] = {}
        """Batches by step: sealed ones, and consumed ones that a rollback may restore."""
        self._masked: dict[int, int] = {}
        """Tokens of the sealed batches that are too old to train."""
        self._workers: dict[str, str] = {}
        self._engines: dict[str, Engine] = {}
        self._totals = RunTotals()
        self._staleness: Counter[int] = Counter()
        self._consumed = 0
        self._order = 0
        self._term = 0
        self._delivered = -1
        self._lineage = 0
        self._violations = 0
        self._leased, self._staged = Durations(), Durations()
        self._recent = Recent()
        self._closed = False
        self._now_s = self._began_s = 0.0
        self._last: tuple[int, int] = (0, 0)
        self._on: dict[str, Callable[[Line], None]] = {
            name.removeprefix("_on_"): getattr(self, name) for name in dir(self) if name.startswith("_on_")
        }

    @property
    def now_s(self) -> float:
        """Seconds since the first event."""
        return self._now_s

    def at_s(self, line: Line) -> float:
        """Return the time of the next event: by the monotonic clock within an incarnation, by labels between two."""
        mono_ns, unix_ns = self._last
        if not self._opening:
            return 0.0
        passed_ns: int = line["t"] - unix_ns if line["ev"] == "open" else line["m"] - mono_ns
        return self._now_s + max(passed_ns, 0) / 1e9

    def feed(self, line: Line) -> None:
        """Apply the next event."""
        self._now_s = self.at_s(line)
        self._last = line["m"], line["t"]
        handler = self._on.get(line["ev"])
        if handler is not None:
            try:
                handler(line)
                self._check_window()
            except (LookupError, ValueError, AssertionError, InvariantError) as error:
                raise Contradiction(f"{line['ev']} cannot follow: {type(error).__name__}: {error}") from error
        if noteworthy(line):
            self._recent.add(short(line))

    def _check_window(self) -> None:
        """Reject a window that is too large to display: every step between version and next step becomes a row."""
        step, version = self._window.step, self._window.version
        if abs(version - step) > MAX_STEP_DISTANCE:
            raise ValueError(f"step {step} is next, and version {version} is the newest")

    # --- peers -------------------------------------------------------------------------------------------------

    def _on_open(self, line: Line) -> None:
        if not self._opening:
            bound = Bound(line["bound"])
            self._window = Window(
                Limits(max_staleness=line["max_staleness"], batch_size=line["batch_size"], bound=bound)
            )
        self._opening = line
        self._closed = False
        self._began_s = self._now_s

    def _on_attach(self, line: Line) -> None:
        self._workers[line["worker"]] = line["role"]
        if line["role"] == "rollout":
            self._engines.setdefault(line["worker"], Engine())

    def _on_detach(self, line: Line) -> None:
        self._workers.pop(line["worker"], None)
        self._engines.pop(line["worker"], None)

    def _on_pull(self, line: Line) -> None:
        if line["ok"] and line["worker"] in self._engines:
            self._engines[line["worker"]].version = line["version"]
            self._engines[line["worker"]].command = f"pull v{line['version']}"

    def _on_close(self, _: Line) -> None:
        self._closed = True

    # --- groups ------------------------------------------------------------------------------------------------

    def _on_reserve(self, line: Line) -> None:
        id, lease, version = GroupId(line["group"]), LeaseId(line["lease"]), Version(line["version"])
        worker, deadline = WorkerId(line["worker"]), self._window.deadline(version)
        group = Group(id, lease, worker, Lineage(line["lineage"]), version, deadline, line["spare"])
        self._groups[id] = group
        self._window.enter(group)
        self._leased.begin(id, self._now_ms())
        self._totals.reserves += 1
        engine = self._engines.setdefault(worker, Engine())
        engine.held[id] = None
        engine.command = f"assign {id}"

    def _on_promote(self, line: Line) -> None:
        for id, spare in ((line["group"], False), (line.get("demoted", -1), True)):
            if (group := self._groups.get(id)) is not None:
                self._window.leave(group)
                group.spare = spare
                self._window.enter(group)

    def _on_push(self, line: Line) -> None:
        group = self._groups[line["group"]]
        self._window.pushed(group)
        group.state = State.PUSHED
        group.tokens = sum(segment["tokens"] for segment in line["segments"])
        self._let_go(group)
        if group.worker in self._engines:
            self._engines[group.worker].pushed.append((self._now_s, group.tokens))
        self._leased.end(group.id, self._now_ms())
        self._staged.begin(group.id, self._now_ms())
        self._totals.tokens_pushed += group.tokens

    def _on_occupy(self, line: Line) -> None:
        group = self._groups[line["group"]]
        self._window.leave(group)
        self._order += 1
        group.order = self._order
        group.state = State.OCCUPIED
        self._window.enter(group)
        self._staged.end(group.id, self._now_ms())

    def _on_claim(self, line: Line) -> None:
        group = self._groups[line["group"]]
        self._window.leave(group)
        group.claim = self._window.claimed
        self._window.enter(group)

    def _on_release(self, line: Line) -> None:
        group = self._groups.pop(line["group"])
        self._window.leave(group)
        group.state = State.RELEASED
        self._let_go(group)
        self._leased.forget((group.id,))
        self._staged.forget((group.id,))

    def _on_drop(self, line: Line) -> None:
        group = self._groups.pop(line["group"])
        if group.claim != NO_CLAIM:
            self._unclaim()
        self._window.leave(group)
        group.state = State.DROPPED

    def _unclaim(self) -> None:
        """Release the claims of a streaming trainer: its groups may become part of another batch."""
        for group in self._claims():
            self._window.leave(group)
            group.claim = NO_CLAIM
            self._window.enter(group)

    def _claims(self) -> list[Group]:
        return [group for group in self._groups.values() if group.state is State.OCCUPIED and group.claim != NO_CLAIM]

    def _let_go(self, group: Group) -> None:
        if group.worker in self._engines:
            self._engines[group.worker].held.pop(group.id, None)

    # --- batches and versions ----------------------------------------------------------------------------------

    def _on_seal(self, line: Line) -> None:
        step, trajectory = line["step"], not self._window.token_bound
        members = [self._groups[member["group"]] for member in line["members"]]
        for group in members:
            self._window.leave(group)
            group.claim, group.state = NO_CLAIM, State.SEALED
            self._violations += trajectory and group.version < step - self._window.max_staleness
        self._batches[step], self._masked[step] = members, line["masked_tokens"]
        self._window.step = Step(step + 1)

    def _on_unseal(self, _: Line) -> None:
        self._unclaim()
        self._bring_back(self._window.step - 1)

    def _on_deliver(self, line: Line) -> None:
        self._delivered = line["step"]

    def _on_consume(self, line: Line) -> None:
        for group in self._batches.get(line["step"], ()):
            group.state = State.CONSUMED
            self._staleness[line["step"] - group.version] += 1
            self._totals.tokens_trained += group.tokens
        self._totals.tokens_trained -= self._masked.pop(line["step"], 0)
        self._consumed += len(self._batches.get(line["step"], ()))

    def _on_publish(self, line: Line) -> None:
        self._window.version = Version(line["version"])

    def _on_join(self, line: Line) -> None:
        self._term = line["trainer_term"]
        self._delivered = -1

    def _on_rollback(self, line: Line) -> None:
        self._lineage = line["lineage"]
        self._unclaim()
        self._bring_back(line["to_version"])
        self._window.version = Version(line["to_version"])

    def _on_checkpoint(self, line: Line) -> None:
        for step in [step for step in self._batches if step < line["version"]]:
            for group in self._batches.pop(step):
                self._groups.pop(group.id, None)

    def _bring_back(self, step: int) -> None:
        """Void the batches of ``step`` and later; their groups become occupied again."""
        self._window.step = Step(step)
        for later in [later for later in self._batches if later >= step]:
            for group in self._batches.pop(later):
                self._consumed -= group.state is State.CONSUMED
                group.state, group.spare = State.OCCUPIED, False
                self._window.enter(group)

    # --- the status --------------------------------------------------------------------------------------------

    def _now_ms(self) -> int:
        return int(self._now_s * 1000)

    def status(self) -> SchedulerStatus:
        """Return the status that the scheduler had, as far as a trace contains it."""
        opening, window = self._opening, self._window
        counts, pins, rows = self._counts(), self._pins(), self._rows()
        return SchedulerStatus(
            run=opening.get("run", ""),
            incarnation=opening.get("inc", 0),
            uptime_s=self._now_s - self._began_s,
            run_s=self._now_s,
            lineage=self._lineage,
            version=int(window.version),
            next_step=int(window.step),
            steps=self._steps,
            trainer_term=self._term,
            max_staleness=window.max_staleness,
            bound=opening.get("bound", ""),
            on_overdue=opening.get("on_overdue", ""),
            batch_size=window.batch_size,
            group_size=opening.get("group_size", 1),
            ledger=counts,
            window=rows,
            pinned=Pinned(step=int(window.step), groups=tuple(pins[:MAX_PINS])),
            why=self._why(counts, pins),
            trainer_waits=self._trainer_waits(counts),
            staleness=self._ages(rows),
            recent=tuple(self._recent.lines()),
            instances=tuple(self._instance(worker, engine) for worker, engine in self._engines.items()),
            workers=tuple(
                WorkerStatus(worker=worker, name=worker_name(worker), role=role)
                for worker, role in self._workers.items()
            ),
            totals=self._totals,
            violations=self._violations,
            finished=self._closed,
        )

    def _counts(self) -> dict[str, int]:
        states = Counter(group.state for group in self._groups.values())
        names = (State.LEASED, State.PUSHED, State.OCCUPIED, State.SEALED)
        live = {state.name.lower(): states[state] for state in names}
        return {**live, "consumed": self._consumed, "claimed": self._window.claimed, "spares": self._window.num_spares}

    def _rows(self) -> tuple[WindowStatus, ...]:
        return tuple(
            WindowStatus(deadline=deadline, leased=leased, pushed=pushed, occupied=occupied)
            for deadline, leased, pushed, occupied in self._window.rows()
        )

    def _ages(self, rows: Sequence[WindowStatus]) -> Ages:
        newest = self._window.version + self._window.max_staleness
        rows = () if self._window.token_bound else rows[::-1]
        return Ages(
            in_flight=tuple((newest - row.deadline, row.leased) for row in rows),
            in_queue=tuple((newest - row.deadline, row.pushed + row.occupied) for row in rows),
            consumed=tuple(sorted(self._staleness.items())),
        )

    def _instance(self, worker: str, engine: Engine) -> InstanceStatus:
        return InstanceStatus(
            worker=worker,
            name=worker_name(worker),
            version=engine.version,
            running=len(engine.held) * int(self._opening.get("group_size", 1)),
            tokens_per_s=engine.tokens_per_s(self._now_s),
            held=len(engine.held),
            last_command=engine.command,
        )

    # --- why ---------------------------------------------------------------------------------------------------

    def _pins(self) -> list[Pin]:
        pinning = self._window.pinning() if self._term else []
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

    def _trains(self) -> bool:
        return self._delivered >= self._window.version

    def _trainer_waits(self, counts: Mapping[str, int]) -> str:
        window = self._window
        if not self._term or window.version < 0 or self._trains() or self._closed:
            return ""
        if window.occupied + window.claimed >= window.batch_size:
            return "older groups"
        return "stages" if counts["pushed"] >= window.batch_size - counts["occupied"] else "engines"

    def _why(self, counts: Mapping[str, int], pins: list[Pin]) -> str:
        window = self._window
        step, version, steps = int(window.step), int(window.version), self._steps or 2**62
        if self._closed:
            return "the scheduler closed the trace"
        if not self._term:
            return "no trainer has joined"
        if version < 0:
            return "version 0 is not published yet"
        if step > version + 1 or step >= steps:
            return f"the trainer works on step {version}" if version < steps else "every step is trained"
        training = f"the trainer works on step {version}; " if step > version else ""
        if pins:
            policy = OnOverdue(self._opening.get("on_overdue", "wait")).value
            return training + pinned(step, pins[:MAX_PINS], len(pins), policy)
        need = window.batch_size
        return training + starved(step, need, counts, self._staged.until_s(need - counts["occupied"]))
