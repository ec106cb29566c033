"""Dispatch of single trajectories, as an upper limit: no lease binds a sample to the engine of its worker.

The simulated engines of a run form one pool. A sample waits in the pool, those of the oldest version first, until an
engine can decode it at once: the multi-level queue and the single-trajectory routing of StaleFlow (2601.12784), with
exact versions. The pool knows the state of every engine at every instant, and its messages take no time, so no protocol
could do better; only the prefill of a moved sample costs what it costs.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from heapq import heappop, heappush
from typing import Any, Literal
from unittest.mock import patch

from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.sim import world
from staleflow.sim.engine import SimEngine
from staleflow.sim.sample import Fate, Place, Sample
from staleflow.sim.timeline import Timeline

Mode = Literal["route", "move", "tail"]
"""``route``: each sample starts at the engine that decodes it fastest. ``move``: running samples also move to faster
engines. ``tail``: the longest ones move to engines that are reserved for them."""

MOVES_INTERVAL_S = 1.0
MAX_MOVES = 8
"""Maximum number of moves in one interval."""
MIN_GAP = 1.25
"""Ratio of the decode rates of two engines from which a sample moves."""
MIN_GAIN_S = 1.0
"""Minimum seconds that a move has to gain."""


class Pool:
    """All engines of one run."""

    def __init__(self, mode: Mode, tail_share: float, tail_tokens: int, tail_slots: int) -> None:
        """``tail``: a share of the engines, at most ``tail_slots`` samples each, for samples of more than
        ``tail_tokens`` tokens."""
        self.members: list[Member] = []
        self.moves = 0
        self._mode = mode
        self._tail_share, self._tail_tokens, self._tail_slots = tail_share, tail_tokens, tail_slots
        self._waiting: list[tuple[int, int, Sample]] = []
        self._order = 0
        self._owner: dict[Sample, Member] = {}
        self._at: dict[Sample, Member] = {}
        """Engine of each sample that does not wait in the pool."""
        self._moving: dict[Sample, Member] = {}
        self._ticking = False

    # --- requests of the workers -------------------------------------------------------------------------------

    def submit(self, owner: "Member", sample: Sample) -> None:
        """Let a sample wait for its first engine."""
        self._owner[sample] = owner
        sample.fate = Fate.DONE
        self._wait(sample, owner.version)
        if not self._ticking and self._mode != "route":
            self._ticking = True
            owner.timeline.after(MOVES_INTERVAL_S, lambda: self._tick(owner.timeline))

    def engine_of(self, sample: Sample) -> "Member | None":
        """Return the engine that has the sample; None while it waits."""
        return self._at.get(sample)

    def forget(self, sample: Sample) -> None:
        """Discard a sample."""
        self._owner.pop(sample, None)
        self._at.pop(sample, None)
        self._moving.pop(sample, None)

    def ended(self, sample: Sample) -> None:
        """Pass the end of a sample on to its worker, or let a moving one join its next engine."""
        owner = self._owner.get(sample)
        source = self._at.pop(sample, None)
        target = self._moving.pop(sample, None)
        if owner is not None and target is not None and sample.fate is Fate.WITHDRAWN:
            sample.fate = Fate.DONE
            old = source is not None and target.weights < source.weights
            self._start(sample, source if old and source is not None else target)
        elif owner is not None:
            del self._owner[sample]
            owner.finished(sample)
        self.deal()

    # --- placement ----------------------------------------------------------------------------------------------

    def _wait(self, sample: Sample, version: int) -> None:
        self._order += 1
        heappush(self._waiting, (version, self._order, sample))
        self.deal()

    def deal(self) -> None:
        """Start waiting samples, the oldest version first, each at the engine that decodes it fastest."""
        while self._waiting:
            sample = self._waiting[0][2]
            if sample not in self._owner or sample in self._at:
                heappop(self._waiting)
                continue
            target = self._best(sample)
            if target is None:
                return
            heappop(self._waiting)
            self._start(sample, target)

    def _start(self, sample: Sample, target: "Member") -> None:
        self._at[sample] = target
        target.take(sample)

    def _tail_members(self) -> list["Member"]:
        if self._mode != "tail":
            return []
        return self.members[: max(1, round(self._tail_share * len(self.members)))]

    def _best(self, sample: Sample) -> "Member | None":
        """Return the engine that decodes the sample fastest; None if that one has not loaded its weights yet, or if no
        engine has room. Otherwise the first engine to load a version would get all samples that wait for it."""
        owner = self._owner[sample]
        least = sample.segments[-1][:2] if sample.segments else owner.weights
        reserved = self._tail_members()
        fits = [m for m in self.members if m not in reserved and m.fits(sample)]
        best = max(fits, key=lambda member: (member.pace(1), -self.members.index(member)), default=None)
        return best if best is not None and best.weights >= least else None

    # --- moves ---------------------------------------------------------------------------------------------------

    def _tick(self, timeline: Timeline) -> None:
        self._move()
        timeline.after(MOVES_INTERVAL_S, lambda: self._tick(timeline))

    def _move(self) -> None:
        tails = self._tail_members()
        for _ in range(MAX_MOVES):
            if not (self._move_tail(tails) if tails else self._move_one(self.members)):
                break

    def _move_one(self, members: list["Member"]) -> bool:
        """Move the sample with the most tokens left from the slowest engine to the fastest."""
        busy = [m for m in members if m.running() > self.leaving(m)]
        if not busy:
            return False
        source = min(busy, key=lambda member: member.pace(0))
        target = max((m for m in members if m is not source), key=lambda member: member.pace(1))
        here, there = source.pace(0), target.pace(1)
        if there < MIN_GAP * here or target.weights < source.weights:
            return False
        return self._moved(source, target, here, there)

    def _move_tail(self, tails: list["Member"]) -> bool:
        """Move a long sample to an engine that is reserved for such."""
        open_tails = [m for m in tails if m.running() + m.arriving < self._tail_slots]
        if not open_tails:
            return False
        target = max(open_tails, key=lambda member: member.pace(1))
        sources = [m for m in self.members if m not in tails and m.weights <= target.weights]
        long = [
            (m.written(s), n, s, m)
            for n, (s, m) in enumerate(self._at.items())
            if m in sources and s.place is Place.RUNNING and s not in self._moving
            if m.written(s) >= self._tail_tokens and m.pace(0) * MIN_GAP <= target.pace(1)
        ]
        if not long:
            return False
        _, _, sample, source = max(long, key=lambda item: item[:2])
        return self._withdraw(sample, source, target)

    def _moved(self, source: "Member", target: "Member", here: float, there: float) -> bool:
        left = [
            (s.length - source.written(s), n, s)
            for n, (s, m) in enumerate(self._at.items())
            if m is source and s.place is Place.RUNNING and s not in self._moving and target.fits(s)
        ]
        if not left:
            return False
        tokens, _, sample = max(left, key=lambda item: item[:2])
        if tokens / here - tokens / there < MIN_GAIN_S:
            return False
        return self._withdraw(sample, source, target)

    def _withdraw(self, sample: Sample, source: "Member", target: "Member") -> bool:
        self._moving[sample] = target
        self.moves += 1
        SimEngine.withdraw(source, sample)
        return True

    def arriving_at(self, member: "Member") -> int:
        return sum(target is member for target in self._moving.values())

    def leaving(self, member: "Member") -> int:
        return sum(self._at.get(sample) is member for sample in self._moving)


class Member(SimEngine):
    """One engine of a pool. Its worker gives all requests to the pool."""

    def __init__(self, pool: Pool, timeline: Timeline, *args: Any, **kwargs: Any) -> None:
        super().__init__(timeline, *args, **kwargs)
        self.timeline = timeline
        self._pool = pool
        self.finished: Callable[[Sample], None] = self.on_end
        self._pooled = pool.ended
        pool.members.append(self)

    @property
    def weights(self) -> tuple[int, int]:
        return self.lineage, self.version

    @property
    def arriving(self) -> int:
        return self._pool.arriving_at(self)

    def running(self) -> int:
        return len(self._running) + self._num_waiting

    def pace(self, more: int) -> float:
        """Return the tokens a second of each sample with ``more`` samples of mean length."""
        state = self.state()
        samples = state.running + self._num_waiting + self.arriving - self._pool.leaving(self) + more
        kv = state.kv_tokens + (samples - state.running) * (state.kv_tokens // max(state.running, 1))
        return 1.0 / self.cost.steps_s(1, max(samples, 1), kv)

    def fits(self, sample: Sample) -> bool:
        """Return whether the engine could decode the sample at once."""
        return self.running() + self.arriving < self.slots and self._fits(sample)

    def take(self, sample: Sample) -> None:
        """Decode a sample."""
        SimEngine.submit(self, sample)

    def submit(self, sample: Sample) -> None:
        if self.on_end != self._pooled:
            self.finished, self.on_end = self.on_end, self._pooled
        self._pool.submit(self, sample)

    def interrupt(self, sample: Sample) -> None:
        if (member := self._pool.engine_of(sample)) is not None:
            SimEngine.interrupt(member, sample)

    def withdraw(self, sample: Sample) -> None:
        if (member := self._pool.engine_of(sample)) is not None:
            SimEngine.withdraw(member, sample)

    def abort(self, sample: Sample) -> None:
        member = self._pool.engine_of(sample)
        self._pool.forget(sample)
        if member is not None:
            SimEngine.abort(member, sample)

    def load(
        self, lineage: Lineage, version: Version, pause_s: float, on_loaded: Callable[[], None] = lambda: None
    ) -> None:
        def loaded() -> None:
            on_loaded()
            self._pool.deal()

        super().load(lineage, version, pause_s, loaded)


@contextmanager
def pooled(mode: Mode, *, tail_share: float = 0.125, tail_tokens: int = 3_000, tail_slots: int = 16) -> Generator[Pool]:
    """Let the engines of the runs within the context form a pool."""
    pool = Pool(mode, tail_share, tail_tokens, tail_slots)
    with patch.object(world, "SimEngine", partial(Member, pool)):
        yield pool
