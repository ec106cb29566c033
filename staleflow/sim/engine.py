"""Exact, event-driven continuous batching in virtual time: no work is done for the steps between two events.

All running samples step together, so a sample is described by the step at which it joined and the one at which it
leaves, and the time of the steps in between has a closed form. Requests from outside take effect at the next boundary
between two steps, as in a real engine. A boundary then proceeds in this order: finished samples leave, weights are
loaded, waiting samples join (each after its prefill), and while the KV cache has no room for the next step the newest
sample is preempted.
"""

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.sim.cost import StepCost
from staleflow.sim.sample import Fate, Place, Sample
from staleflow.sim.timeline import Timeline

OnUpdate = Literal["keep", "recompute", "drain"]


class EngineFull(Exception):
    """A sample does not fit into the KV cache even alone."""


class Load(NamedTuple):
    """Weights that wait for the next boundary."""

    lineage: Lineage
    version: Version
    pause_s: float
    on_loaded: Callable[[], None]


class End(NamedTuple):
    """A sample leaves at a step, if its ticket is still the same by then."""

    step: int
    order: int
    ticket: int
    sample: Sample


class EngineState(NamedTuple):
    """State of an engine at one instant."""

    running: int
    waiting: int
    kv_tokens: int
    generated: int
    """Tokens written since it was created."""
    steps: int
    """Decode steps since it was created."""
    busy_s: float
    """Seconds with running samples, including the time it hung."""
    preempted: int


class SimEngine:
    """One engine. ``on_end(sample)`` is called for each sample that leaves, except aborted ones.

    ``kv_capacity`` is the number of tokens that the KV cache holds; 0 is unlimited.
    """

    def __init__(
        self,
        timeline: Timeline,
        cost: StepCost,
        *,
        slots: int,
        kv_capacity: int = 0,
        on_update: OnUpdate = "keep",
        on_end: Callable[[Sample], None] = lambda _: None,
    ) -> None:
        self.cost = cost
        self.slots = slots
        self.kv_capacity = kv_capacity
        self.lineage, self.version = Lineage(0), Version(-1)
        self.changes: list[tuple[float, int]] = []
        """(second, samples running from then on), in order: the engine's own timeline."""
        self.loads: list[tuple[float, float, Version]] = []
        """(begin, end, version) of each load of weights."""
        self._timeline = timeline
        self._on_update = on_update
        self.on_end = on_end
        self._waiting: deque[tuple[int, Sample]] = deque()
        self._num_waiting = 0
        self._running: dict[Sample, None] = {}
        """Samples in order of joining."""
        self._ends: list[End] = []
        self._load: Load | None = None
        self._marks = [(0, self.lineage, self.version)]
        """(step, lineage, version): the weights from that step on."""
        self._step = 0
        self._time_s = timeline.now_s
        """The boundary at which this state is valid; in the future while weights or prompts are read in."""
        self._kv = 0
        self._order = 0
        self._generated = 0
        self._busy_s = 0.0
        self._busy_from_s = 0.0
        self._preempted = 0
        self._plan = 0
        """Steps to the next event; 0 while nothing runs."""
        self._wakes = 0
        self._hung_since_s: float | None = None

    # --- requests from outside --------------------------------------------------------------------------------

    def submit(self, sample: Sample) -> None:
        """Queue a sample. Raise ``EngineFull`` if it can never fit."""
        need = sample.prompt + sample.length
        if self.kv_capacity and need > self.kv_capacity:
            raise EngineFull(f"a sample of {need} tokens does not fit into a KV cache of {self.kv_capacity}")
        sample.fate = Fate.DONE
        self._wait(sample)
        if self._num_waiting == 1 and self._fits(sample):
            self._wake_at_boundary()

    def interrupt(self, sample: Sample) -> None:
        """End a sample at the next boundary with the tokens that it has then, at least one."""
        if sample.fate is not Fate.DONE or sample.place is Place.OUT:
            return
        sample.fate = Fate.INTERRUPTED
        if sample.place is Place.RUNNING:
            self._end_by(sample, max(self._step + self._ahead(), sample.start + (sample.written == 0)))
        elif sample.written:
            self._end_waiting(sample)
            self._report_end_soon(sample)
        else:  # first in the queue, and finished after its first token
            sample.ticket += 1
            self._waiting.appendleft((sample.ticket, sample))
            self._wake_at_boundary()

    def withdraw(self, sample: Sample) -> None:
        """Release a sample at the next boundary with the tokens that it has then; it may be submitted again, here or
        elsewhere."""
        if sample.fate is not Fate.DONE or sample.place is Place.OUT:
            return
        sample.fate = Fate.WITHDRAWN
        if sample.place is Place.RUNNING:
            self._end_by(sample, self._step + self._ahead())
        else:
            self._end_waiting(sample)
            self._report_end_soon(sample)

    def abort(self, sample: Sample) -> None:
        """Discard a sample and its tokens."""
        sample.fate = Fate.ABORTED
        if sample.place is Place.RUNNING:
            self._end_by(sample, self._step + self._ahead())
        else:
            self._end_waiting(sample)

    def load(
        self, lineage: Lineage, version: Version, pause_s: float, on_loaded: Callable[[], None] = lambda: None
    ) -> None:
        """Load weights at the next boundary (``drain``: at the first one without running samples), pausing for
        ``pause_s``."""
        self._load = Load(lineage, version, pause_s, on_loaded)
        self._wake_at_boundary()

    def hang(self) -> None:
        """Stop from now on, in the middle of a step."""
        if self._hung_since_s is None:
            self._hung_since_s = self._timeline.now_s
            self._wakes += 1

    def resume(self) -> None:
        """Continue at the point of the hang."""
        if self._hung_since_s is None:
            return
        self._time_s += self._timeline.now_s - self._hung_since_s
        self._hung_since_s = None
        self._wake_in(self._plan)

    def stop(self) -> None:
        """Stop permanently: the engine is dead, and all its samples are lost."""
        self.hang()
        self._record_running(0, self._timeline.now_s)

    def hung_s(self) -> float:
        """Return the seconds since it was made to hang; 0 while it works."""
        return 0.0 if self._hung_since_s is None else self._timeline.now_s - self._hung_since_s

    def _now_s(self) -> float:
        return self._timeline.now_s if self._hung_since_s is None else self._hung_since_s

    @property
    def working(self) -> bool:
        """True if it has work and is not hung."""
        return bool(self._running or self._num_waiting) and self._hung_since_s is None

    def state(self) -> EngineState:
        """Return the state at the last boundary before this instant."""
        running = len(self._running)
        steps = self._whole_steps() if running else 0
        more = running * steps
        return EngineState(
            running=running,
            waiting=self._num_waiting,
            kv_tokens=self._kv + more,
            generated=self._generated + more,
            steps=self._step + steps,
            busy_s=self._busy_s + (self._timeline.now_s - self._busy_from_s if running else 0.0),
            preempted=self._preempted,
        )

    def written(self, sample: Sample) -> int:
        """Return the number of tokens of a sample at this instant."""
        if sample.place is not Place.RUNNING:
            return sample.written
        return sample.written + min(self._step + self._whole_steps(), sample.end) - sample.start

    def _whole_steps(self) -> int:
        """Return the number of steps finished by now."""
        seconds = self._now_s() - self._time_s
        running = len(self._running)
        steps = self.cost.steps_until(seconds, running, self._kv)
        if steps and self.cost.steps_s(steps, running, self._kv) > seconds + 1e-9:
            steps -= 1
        return min(steps, self._plan)

    # --- boundaries ------------------------------------------------------------------------------------------

    def _ahead(self) -> int:
        """Return the number of steps to the next boundary."""
        if not self._running:
            return 0
        seconds = self._now_s() - self._time_s
        return min(self.cost.steps_until(seconds, len(self._running), self._kv), self._plan)

    def _wake_at_boundary(self) -> None:
        """Wake up at the next boundary, which may have something to do."""
        if not self._running:
            self._time_s = max(self._time_s, self._now_s())
        self._wake_in(self._ahead())

    def _wake_in(self, steps: int) -> None:
        """Schedule the next wake-up after ``steps`` steps, replacing the previous one."""
        self._wakes += 1
        wake = self._wakes
        self._plan = steps
        if self._hung_since_s is not None:
            return
        due_s = self._time_s + self.cost.steps_s(steps, len(self._running), self._kv)
        self._timeline.at(due_s, lambda: self._at_boundary(due_s, steps) if wake == self._wakes else None)

    def _at_boundary(self, due_s: float, steps: int) -> None:
        running = len(self._running)
        if running:
            self._kv += running * steps
            self._generated += running * steps
            self._step += steps
        self._time_s = due_s
        over = self._collect_leaving()
        self._take_weights()
        if not (self._load is not None and self._on_update == "drain"):
            self._join()
        self._make_room()
        self._record_running(len(self._running), due_s)
        if self._running:
            self._wake_in(self._steps_to_event())
        else:
            self._plan = 0
        for sample in over:
            self.on_end(sample)

    def _steps_to_event(self) -> int:
        steps = self._ends[0].step - self._step
        if self.kv_capacity:
            steps = min(steps, (self.kv_capacity - self._kv) // len(self._running))
        return steps

    def _record_running(self, running: int, time_s: float) -> None:
        before = self.changes[-1][1] if self.changes else 0
        if running == before:
            return
        self.changes.append((time_s, running))
        if not before:
            self._busy_from_s = time_s
        elif not running:
            self._busy_s += time_s - self._busy_from_s

    # --- leaving ---------------------------------------------------------------------------------------------

    def _collect_leaving(self) -> list[Sample]:
        """Let samples leave whose step has come; return those whose end must be reported."""
        over: list[Sample] = []
        ends = self._ends
        while ends and (ends[0].step <= self._step or not _valid(ends[0])):
            end = heappop(ends)
            if not _valid(end):
                continue
            sample = end.sample
            self._vacate(sample)
            sample.place = Place.OUT
            if sample.fate is Fate.ABORTED:
                continue
            if sample.fate is Fate.DONE and sample.written < sample.length:
                self._send_to_tool(sample)
            else:
                over.append(sample)
        return over

    def _vacate(self, sample: Sample) -> None:
        """Stop running a sample; attribute its tokens to their versions."""
        del self._running[sample]
        steps = self._step - sample.start
        self._kv -= sample.prompt + sample.written + steps
        first = sample.start
        marks = self._marks
        at = len(marks) - 1
        while at > 0 and marks[at][0] > first:
            at -= 1
        for place in range(at, len(marks)):
            step, lineage, version = marks[place]
            until = marks[place + 1][0] if place + 1 < len(marks) else self._step
            sample.add(lineage, version, min(until, self._step) - max(step, first))
        sample.ticket += 1

    def _send_to_tool(self, sample: Sample) -> None:
        sample.place = Place.AWAY
        ticket = sample.ticket
        back_s = self._time_s + sample.next_turn()
        self._timeline.at(back_s, lambda: self.submit(sample) if sample.ticket == ticket else None)

    def _end_waiting(self, sample: Sample) -> None:
        """End a sample that waits or is at a tool."""
        waited = sample.place is Place.WAITING
        sample.place = Place.OUT
        sample.ticket += 1
        if waited:
            self._num_waiting -= 1
            if self._num_waiting and len(self._running) < self.slots:
                self._wake_at_boundary()  # it may have been the one that blocked the queue

    def _report_end_soon(self, sample: Sample) -> None:
        ticket = sample.ticket
        self._timeline.soon(lambda: self.on_end(sample) if sample.ticket == ticket else None)

    def _end_by(self, sample: Sample, step: int) -> None:
        sample.end = min(step, sample.end)
        sample.ticket += 1
        self._push_end(sample)
        if self._step + self._plan > sample.end:
            self._wake_in(sample.end - self._step)

    def _push_end(self, sample: Sample) -> None:
        self._order += 1
        heappush(self._ends, End(sample.end, self._order, sample.ticket, sample))

    # --- joining ---------------------------------------------------------------------------------------------

    def _wait(self, sample: Sample, *, first: bool = False) -> None:
        sample.place = Place.WAITING
        sample.ticket += 1
        self._num_waiting += 1
        if first:
            self._waiting.appendleft((sample.ticket, sample))
        else:
            self._waiting.append((sample.ticket, sample))

    def _fits(self, sample: Sample) -> bool:
        """Return whether a sample could join and every running sample write at least one more token."""
        running = len(self._running) + 1
        if running > self.slots:
            return False
        return not self.kv_capacity or self._kv + sample.prompt + sample.written + running <= self.kv_capacity

    def _join(self) -> None:
        waiting = self._waiting
        while waiting:
            ticket, sample = waiting[0]
            if ticket != sample.ticket or sample.place is not Place.WAITING:
                waiting.popleft()
                continue
            if not self._fits(sample):
                return
            waiting.popleft()
            self._num_waiting -= 1
            tokens = sample.prompt + sample.written
            self._time_s += self.cost.prefill_s * tokens
            self._kv += tokens
            sample.place = Place.RUNNING
            sample.start = self._step
            left = sample.turn_end - sample.written
            sample.end = self._step + (1 if sample.fate is Fate.INTERRUPTED else left)
            sample.ticket += 1
            self._running[sample] = None
            self._push_end(sample)

    def _make_room(self) -> None:
        """While the next step does not fit, move the newest sample back to the front of the queue."""
        while self.kv_capacity and self._kv + len(self._running) > self.kv_capacity:
            newest = next(reversed(self._running))
            self._vacate(newest)
            self._preempted += 1
            self._wait(newest, first=True)

    # --- weights ---------------------------------------------------------------------------------------------

    def _take_weights(self) -> None:
        load = self._load
        if load is None or (self._on_update == "drain" and self._running):
            return
        self._load = None
        begin_s = self._time_s
        pause_s = load.pause_s
        if self._on_update == "recompute":
            pause_s += self.cost.prefill_s * self._kv
        self._time_s += pause_s
        self.lineage, self.version = load.lineage, load.version
        oldest = min((sample.start for sample in self._running), default=self._step)
        while len(self._marks) > 1 and self._marks[1][0] <= oldest:
            del self._marks[0]
        self._marks.append((self._step, load.lineage, load.version))
        self.loads.append((begin_s, self._time_s, load.version))
        self._timeline.at(self._time_s, load.on_loaded)


def _valid(end: End) -> bool:
    return end.sample.place is Place.RUNNING and end.sample.ticket == end.ticket
