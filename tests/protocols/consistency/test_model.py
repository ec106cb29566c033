"""In random histories the machine admits, batches and waits exactly as the naive buffers of the paper do."""

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from staleflow.protocols.consistency.effects import Effect, Rejected, ReleaseWhy, Reserved
from staleflow.protocols.consistency.groups import State
from staleflow.protocols.consistency.ids import GroupId, Version
from staleflow.protocols.consistency.limits import Bound
from tests.protocols.consistency.naive import Naive
from tests.protocols.consistency.scenes import Scene, seals

INDEX = st.integers(0, 1 << 16)


class SameAsTheBuffers(RuleBasedStateMachine):
    """Every rule applies one action to both and compares grants and seals."""

    scene: Scene
    naive: Naive

    @initialize(max_staleness=st.integers(0, 3), batch_size=st.integers(1, 3), token_bound=st.booleans())
    def begin(self, max_staleness: int, batch_size: int, token_bound: bool) -> None:
        bound = Bound.TOKEN if token_bound else Bound.TRAJECTORY
        self.scene = Scene(max_staleness, batch_size, bound=bound)
        self.naive = Naive(max_staleness, batch_size, token_bound)
        self.next_group = 0
        self.trainers = 0
        self.states: dict[int, State] = {}

    def same(self, effects: tuple[Effect, ...], sealed: list[tuple[int, list[int]]]) -> None:
        assert not any(isinstance(effect, Rejected) for effect in effects)
        assert seals(effects) == [(step, tuple(groups)) for step, groups in sealed]

    def pick(self, index: int, *states: State) -> int | None:
        views = (self.scene.machine.group(GroupId(group)) for group in range(self.next_group))
        found = [view.group for view in views if view is not None and view.state in states]
        return found[index % len(found)] if found else None

    @rule(age=st.integers(-1, 4), again=st.booleans(), index=INDEX)
    def reserve(self, age: int, again: bool, index: int) -> None:
        version = self.scene.machine.version - age
        group = self.pick(index, State.RELEASED) if again else None
        if group is None:
            group = self.next_group
            self.next_group += 1
        (effect,) = self.scene.reserve(group, version=version)
        assert isinstance(effect, Reserved) == self.naive.reserve(group, version)

    @rule(index=INDEX, age=st.integers(0, 3))
    def push(self, index: int, age: int) -> None:
        group = self.pick(index, State.LEASED)
        if group is not None:
            oldest = self.scene.view(group).version
            newest = max(oldest, self.scene.machine.version - age)
            parts = [(oldest, 3)] if newest == oldest else [(oldest, 3), (newest, 4)]
            self.same(self.scene.push(group, *parts), [])
            self.naive.push(group, newest)

    @rule(index=INDEX)
    def occupy(self, index: int) -> None:
        group = self.pick(index, State.PUSHED)
        if group is not None:
            effects = self.scene.occupy(group)
            self.naive.occupy(group)
            self.same(effects, self.naive.seal())

    @rule(index=INDEX)
    def finish(self, index: int) -> None:
        self.push(index, 0)
        self.occupy(index)

    @rule(index=INDEX, filtered=st.booleans())
    def release(self, index: int, filtered: bool) -> None:
        group = self.pick(index, State.LEASED, State.PUSHED)
        if group is not None:
            effects = self.scene.release(group, ReleaseWhy.FILTERED if filtered else ReleaseWhy.ABORTED)
            self.naive.leave(group)
            self.same(effects, self.naive.seal())

    @rule(index=INDEX)
    def drop(self, index: int) -> None:
        group = self.pick(index, State.OCCUPIED)
        if group is not None:
            effects = self.scene.drop(group)
            self.naive.leave(group)
            self.same(effects, self.naive.seal())

    @rule(index=INDEX)
    def migrate(self, index: int) -> None:
        group = self.pick(index, State.LEASED)
        if group is not None:
            self.scene.migrate(group, "other")

    @rule(index=INDEX)
    def quarantine(self, index: int) -> None:
        group = self.pick(index, State.SEALED)
        if group is not None:
            effects = self.scene.quarantine(group)
            self.naive.unseal(group)
            self.same(effects, self.naive.seal())

    @precondition(lambda self: self.scene.machine.next_step > self.scene.machine.version)
    @rule()
    def train(self) -> None:
        effects = self.scene.train(self.scene.machine.version)
        self.naive.consume()
        self.same(effects, self.naive.seal())

    @rule(keep=st.integers(1, 3))
    def checkpoint(self, keep: int) -> None:
        machine = self.scene.machine
        self.scene.checkpointed(machine.version, machine.lineage_of(machine.version), keep=keep)

    @rule(back=st.integers(1, 5))
    def rollback(self, back: int) -> None:
        machine = self.scene.machine
        to = max(machine.oldest_checkpoint[1], machine.version - back)
        if to < machine.version:
            self.trainers += 1
            effects = self.scene.join(to, machine.lineage_of(Version(to)), trainer=f"t{self.trainers}")
            self.same(effects, self.naive.rollback(to))

    @rule()
    def restart(self) -> None:
        before = self.scene.machine.snapshot()
        self.scene.machine = self.scene.restart()
        assert self.scene.machine.snapshot() == before

    @invariant()
    def same_state(self) -> None:
        machine, naive = self.scene.machine, self.naive
        assert (machine.version, machine.next_step) == (naive.version, naive.step)
        for version in range(machine.version + 1):
            assert (machine.room(Version(version)) > 0) == naive.may_reserve(version)
        starved = sum(entry.occupied > 0 for entry in naive.live) < naive.batch_size
        assert machine.starved() == starved
        assert naive.ready() is None

    @invariant()
    def pins_are_what_keeps_the_step(self) -> None:
        """The step has a batch once all groups that pin it are gone, and none while one of them remains."""
        machine, naive = self.scene.machine, self.naive
        pins = machine.pins()
        if naive.step <= naive.version + 1 and pins:
            live = naive.live
            for kept in range(len(pins) + 1):
                naive.live = [entry for entry in live if entry.group not in pins[kept:]]
                assert (naive.ready() is None) == (kept > 0)
            naive.live = live


TestSameAsTheBuffers = SameAsTheBuffers.TestCase
TestSameAsTheBuffers.settings = settings(
    max_examples=int(os.environ.get("STALEFLOW_EXAMPLES", "120")),
    stateful_step_count=60,
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much),
)
