"""Reference for ``SimEngine``: a slow, plain engine that loops over single steps and must give the same results."""

from dataclasses import dataclass, field

from staleflow.sim.cost import StepCost
from staleflow.sim.engine import OnUpdate

EARLY_S = 1e-9


@dataclass(slots=True)
class NaiveSample:
    """One trajectory."""

    id: int
    prompt: int
    turns: list[int]
    tools: list[float]
    turn: int = 0
    written: int = 0
    versions: list[int] = field(default_factory=list[int])
    """Version that wrote each token."""
    fate: str = "done"
    place: str = "out"
    ended_s: float = -1.0

    @property
    def held(self) -> int:
        return self.prompt + self.written


class NaiveEngine:
    """Engine that carries out each request at the first step boundary at or after the time of the request."""

    def __init__(self, cost: StepCost, *, slots: int, kv_capacity: int, on_update: OnUpdate) -> None:
        self.cost = cost
        self.slots = slots
        self.kv_capacity = kv_capacity
        self.on_update = on_update
        self.time_s: float = 0.0
        self.version = -1
        self.waiting: list[NaiveSample] = []
        self.running: list[NaiveSample] = []
        self.away: list[tuple[float, NaiveSample]] = []
        self.load: tuple[int, float] | None = None
        self.generated = 0
        self.preempted = 0

    def run(self, asked: list[tuple[float, str, NaiveSample | tuple[int, float]]]) -> None:
        """Carry out all requests in order of time, until no work is left."""
        asked = list(asked)
        while asked or self.running or self.waiting or self.away or self.load is not None:
            if not self.running and not self.waiting and self.load is None:
                comes = [asked[0][0]] if asked else []
                self.time_s = max(self.time_s, min([*comes, *(back for back, _ in self.away)]))
            begun_s = self.time_s
            self._hear(asked)
            self._leave()
            self._take_weights()
            self._join()
            self._make_room()
            # otherwise time passed without a step, and requests from that time come first
            if self.running and self.time_s == begun_s:
                self._write()

    def _hear(self, asked: list[tuple[float, str, NaiveSample | tuple[int, float]]]) -> None:
        """Apply the requests and tool returns since the last boundary, in order of time."""
        while True:
            back_s = min((back for back, _ in self.away), default=float("inf"))
            asked_s = asked[0][0] if asked else float("inf")
            if min(back_s, asked_s) > self.time_s + EARLY_S:
                return
            if back_s < asked_s:
                entry = next(entry for entry in self.away if entry[0] == back_s)
                self.away.remove(entry)
                entry[1].place = "waiting"
                self.waiting.append(entry[1])
                continue
            when_s, what, about = asked.pop(0)
            if isinstance(about, tuple):
                self.load = about
            else:
                self._hear_one(when_s, what, about)

    def _hear_one(self, when_s: float, what: str, sample: NaiveSample) -> None:
        if what == "submit":
            sample.place = "waiting"
            self.waiting.append(sample)
            return
        if sample.place == "out" or (what != "abort" and sample.fate != "done"):
            return
        sample.fate = {"interrupt": "interrupted", "withdraw": "withdrawn", "abort": "aborted"}[what]
        if sample.place == "running":
            return
        if what == "interrupt" and not sample.written:
            self.waiting.remove(sample)
            self.waiting.insert(0, sample)
            return
        if sample.place == "waiting":
            self.waiting.remove(sample)
        self.away = [entry for entry in self.away if entry[1] is not sample]
        self._out(sample, when_s)

    def _out(self, sample: NaiveSample, when_s: float) -> None:
        sample.place = "out"
        sample.ended_s = when_s

    def _leave(self) -> None:
        for sample in list(self.running):
            turn_over = sample.written >= sum(sample.turns[: sample.turn + 1])
            cut = sample.fate in ("withdrawn", "aborted") or (sample.fate == "interrupted" and sample.written)
            if not turn_over and not cut:
                continue
            self.running.remove(sample)
            if cut or sample.turn + 1 == len(sample.turns):
                self._out(sample, self.time_s)
            else:
                sample.place = "away"
                self.away.append((self.time_s + sample.tools[sample.turn], sample))
                sample.turn += 1

    def _take_weights(self) -> None:
        if self.load is None or (self.on_update == "drain" and self.running):
            return
        self.version, pause_s = self.load
        self.load = None
        if self.on_update == "recompute":
            pause_s += self.cost.prefill_s * sum(sample.held for sample in self.running)
        self.time_s += pause_s

    def _join(self) -> None:
        while self.waiting and not (self.load is not None and self.on_update == "drain"):
            sample = self.waiting[0]
            kv = sum(other.held for other in self.running) + sample.held
            if len(self.running) == self.slots:
                return
            if self.kv_capacity and kv + len(self.running) + 1 > self.kv_capacity:
                return
            self.running.append(self.waiting.pop(0))
            sample.place = "running"
            self.time_s += self.cost.prefill_s * sample.held

    def _make_room(self) -> None:
        while self.kv_capacity and sum(other.held + 1 for other in self.running) > self.kv_capacity:
            newest = self.running.pop()
            newest.place = "waiting"
            self.waiting.insert(0, newest)
            self.preempted += 1

    def _write(self) -> None:
        kv = sum(sample.held for sample in self.running)
        cost = self.cost
        running = len(self.running)
        self.time_s += cost.k1 * kv + max(cost.k2, cost.k3 * running) + cost.k4
        for sample in self.running:
            sample.written += 1
            sample.versions.append(self.version)
        self.generated += running
