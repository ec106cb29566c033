"""Every reachable state of a tiny ledger is correct: batches of two, max_staleness 0, 1 and 2, up to six groups.

States that differ only in the names of groups, leases and batches are one. In each state every admission and readiness
is compared with the naive buffers, and every invariant is checked. The ledger must also be able to continue: it has
room, or a group to finish, or a batch to train.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from staleflow.protocols.consistency.effects import Rejected, Sealed
from staleflow.protocols.consistency.groups import GroupView, State
from staleflow.protocols.consistency.ids import GroupId, Step, Version
from staleflow.protocols.consistency.ledger import STEP_ROWS
from staleflow.protocols.consistency.limits import Bound
from staleflow.protocols.consistency.machine import Machine
from tests.protocols.consistency.naive import Entry, Naive
from tests.protocols.consistency.scenes import Scene

Key = tuple[object, ...]


@dataclass(frozen=True)
class Tiny:
    max_staleness: int
    groups: int
    rollbacks: int
    bound: Bound = Bound.TRAJECTORY
    max_spares: int = 0


class Explorer:
    """Breadth-first search over the states; a state is a stored ledger that can be restored."""

    def __init__(self, tiny: Tiny) -> None:
        self.tiny = tiny
        self.scene = Scene(tiny.max_staleness, 2, bound=tiny.bound, max_spares=tiny.max_spares)
        self.limits = self.scene.limits
        self.num_transitions = 0

    def run(self) -> int:
        """Visit every state; return the number of states."""
        seen = {self.key()}
        frontier = [self.stored()]
        while frontier:
            state = frontier.pop()
            self.load(state)
            self.judge()
            for act in list(self.acts()):
                self.load(state)
                self.do(act)
                self.num_transitions += 1
                key = self.key()
                if key not in seen:
                    seen.add(key)
                    frontier.append(self.stored())
        return len(seen)

    def stored(self) -> tuple[object, ...]:
        return self.scene.machine.snapshot()

    def load(self, state: tuple[object, ...]) -> None:
        globals_row, rows = state
        self.scene.machine = Machine.restore(self.limits, globals_row, rows, 0)  # type: ignore[arg-type]

    def views(self) -> list[GroupView]:
        views = (self.scene.machine.group(GroupId(group)) for group in range(self.tiny.groups))
        return [view for view in views if view is not None]

    def place(self, view: GroupView, order: dict[int, int]) -> Key:
        newest = max((segment.version for segment in view.segments), default=view.version)
        step = -1 if view.step is None else view.step
        return view.state, view.version, newest, step, view.spare, view.claimed, order.get(view.group, -1)

    def key(self) -> Key:
        """Return the state without its names."""
        machine = self.scene.machine
        orders = {key: row[7] for key, row in machine.rows().items() if key < 1 << 61 and row[7]}
        ranks = {
            group: rank for rank, group in enumerate(sorted(orders, key=lambda group: str(orders[group]).zfill(9)))
        }
        places = sorted(self.place(view, ranks) for view in self.views() if view.state is not State.RELEASED)
        fresh = sum(not machine.retired(GroupId(group)) for group in range(self.tiny.groups))
        kept = machine.oldest_checkpoint[1], machine.checkpoint[1]
        return (machine.version, machine.next_step, machine.lineage, kept, fresh, *places)

    def acts(self) -> Iterator[tuple[str, int, int]]:
        machine = self.scene.machine
        free = [g for g in range(self.tiny.groups) if self.state(g) is State.RELEASED]
        for version in range(machine.version + 1):
            if free and machine.room(Version(version)):
                yield "reserve", free[0], version
        seen: set[Key] = set()
        for view in self.views():
            alike = self.place(view, {}) if view.state in (State.LEASED, State.PUSHED) else (view.group,)
            if alike not in seen:
                seen.add(alike)
                yield from self.acts_on(view)
        if machine.sealed_batch(Step(machine.version)):
            yield "train", machine.version, 0
        if machine.checkpoint[1] < machine.version:
            yield "checkpoint", machine.version, 2
        if machine.oldest_checkpoint[1] < machine.version:
            yield "checkpoint", machine.version, 1
        if machine.lineage < self.tiny.rollbacks:
            for to in range(machine.oldest_checkpoint[1], machine.version):
                yield "rollback", to, 0

    def acts_on(self, view: GroupView) -> Iterator[tuple[str, int, int]]:
        match view.state:
            case State.LEASED:
                for newest in {view.version, self.scene.machine.version}:
                    yield "push", view.group, newest
                yield "release", view.group, 0
            case State.PUSHED:
                yield "occupy", view.group, 0
                yield "release", view.group, 0
            case State.OCCUPIED if not view.claimed:
                yield "drop", view.group, 0
            case State.SEALED:
                yield "quarantine", view.group, 0
            case _:
                pass
        if self.scene.machine.claimable() == view.group:
            yield "claim", view.group, self.scene.machine.next_step

    def state(self, group: int) -> State:
        """Return the state of a group; a group that was never leased counts as released."""
        if self.scene.machine.retired(GroupId(group)):
            return State.DROPPED
        view = self.scene.machine.group(GroupId(group))
        return State.RELEASED if view is None else view.state

    def do(self, act: tuple[str, int, int]) -> None:
        name, what, how = act
        scene = self.scene
        match name:
            case "reserve":
                effects = scene.reserve(what, version=how)
            case "push":
                oldest = scene.view(what).version
                effects = scene.push(what, *[(version, 1) for version in sorted({oldest, how})])
            case "train":
                effects = scene.train(what)
            case "checkpoint":
                effects = scene.checkpointed(what, scene.machine.lineage_of(Version(what)), keep=how)
            case "rollback":
                lineage = scene.machine.lineage_of(Version(what))
                before = scene.machine.row(STEP_ROWS + what)
                effects = scene.join(what, lineage, trainer=f"t{scene.machine.trainer_term}")
                (sealed, *_) = [effect for effect in effects if isinstance(effect, Sealed)]
                assert before is not None
                assert sealed.digest in before, "another batch than before"
            case "claim":
                effects = scene.claim(what, how)
            case _:
                effects = getattr(scene, name)(what)
        assert effects
        assert not any(isinstance(effect, Rejected) for effect in effects), (act, effects)

    def judge(self) -> None:
        """Check the conditions of every state; the invariants were already checked when the state was made."""
        machine = self.scene.machine
        views = self.views()
        claimed = any(view.claimed for view in views)
        if not self.tiny.max_spares and not claimed:
            naive = self.naive(views)
            for version in range(machine.version + 1):
                assert (machine.room(Version(version)) > 0) == naive.may_reserve(version)
            assert naive.ready() is None
        waiting = machine.sealed_batch(Step(machine.version)) is not None
        unfinished = any(view.state in (State.LEASED, State.PUSHED) for view in views)
        assert waiting or unfinished or machine.room(machine.version), "the ledger is stuck"

    def naive(self, views: list[GroupView]) -> Naive:
        machine = self.scene.machine
        token_bound = self.tiny.bound is Bound.TOKEN
        naive = Naive(self.tiny.max_staleness, 2, token_bound, machine.version, machine.next_step)
        rows = machine.rows()
        for view in views:
            if view.state <= State.OCCUPIED:
                order = rows[view.group][7]
                assert isinstance(order, int)
                naive.live.append(Entry(view.group, view.version, view.version, order))
        return naive


def named(tiny: Tiny) -> str:
    words = f"max_staleness {tiny.max_staleness}, {tiny.groups} groups, {tiny.rollbacks} rollbacks, {tiny.bound} bound"
    return f"{words}, {tiny.max_spares} spares"


def explore(tiny: Tiny) -> None:
    explorer = Explorer(tiny)
    num_states = explorer.run()
    print(f"{num_states} states, {explorer.num_transitions} transitions")
    assert num_states > 100


QUICK = [
    Tiny(max_staleness=0, groups=6, rollbacks=1),
    Tiny(max_staleness=1, groups=5, rollbacks=1),
    Tiny(max_staleness=2, groups=5, rollbacks=0),
    Tiny(max_staleness=0, groups=5, rollbacks=1, max_spares=1),
    Tiny(max_staleness=1, groups=4, rollbacks=1, max_spares=1),
    Tiny(max_staleness=1, groups=5, rollbacks=0, bound=Bound.TOKEN),
]
DEEP = [
    Tiny(max_staleness=1, groups=6, rollbacks=1),
    Tiny(max_staleness=2, groups=6, rollbacks=1),
    Tiny(max_staleness=1, groups=6, rollbacks=0, max_spares=1),
    Tiny(max_staleness=1, groups=6, rollbacks=1, bound=Bound.TOKEN),
]


@pytest.mark.parametrize("tiny", QUICK, ids=named)
def test_every_reachable_state_is_sound_and_goes_on(tiny: Tiny) -> None:
    explore(tiny)


@pytest.mark.long
@pytest.mark.parametrize("tiny", DEEP, ids=named)
def test_every_reachable_state_of_six_groups_is_sound_and_goes_on(tiny: Tiny) -> None:
    explore(tiny)
