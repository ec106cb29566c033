"""Picture of the versioned window, as computed by the ledger after a few events."""

from collections.abc import Iterable, Iterator
from enum import StrEnum

from docs.generate.svg import box, picture, words
from staleflow.protocols.consistency.effects import Rejected
from staleflow.protocols.consistency.events import Consume, Event, Join, Occupy, Publish, Push, Reserve
from staleflow.protocols.consistency.groups import GroupView, State
from staleflow.protocols.consistency.ids import GroupId, Lineage, Segment, Step, Version, WorkerId
from staleflow.protocols.consistency.limits import Limits
from staleflow.protocols.consistency.machine import Machine

LIMITS = Limits(max_staleness=2, batch_size=4)
SHA = "0" * 64
SEAT, COLUMN, FRAME = 34, 46, 224
LINEAGE = Lineage(0)


class Seat(StrEnum):
    """Style of a place in a step."""

    LEASED = "leased"
    OCCUPIED = "occupied"
    PINNED = "pinned"
    SEALED = "sealed"
    EMPTY = "empty"


Columns = dict[int, list[tuple[Seat, Version]]]
"""Groups that have a place in each step, by step."""

LEGEND = {
    Seat.LEASED: "leased: being generated",
    Seat.OCCUPIED: "ready to train",
    Seat.PINNED: "pins its step",
    Seat.SEALED: "being trained",
    Seat.EMPTY: "free",
}


class Scene:
    """A ledger and the groups that were leased in it."""

    def __init__(self) -> None:
        self.machine = Machine(LIMITS)
        self.groups: list[GroupId] = []
        self._apply(Join(trainer=WorkerId("trainer"), lineage=LINEAGE, version=Version(0)))
        self._apply(Publish(trainer_term=self.machine.trainer_term, sha=SHA, nbytes=1))

    def lease(self, count: int) -> None:
        """Lease ``count`` more groups at the newest version."""
        for _ in range(count):
            group = GroupId(len(self.groups))
            self._apply(Reserve(group=group, worker=WorkerId("engine"), version=self.machine.version))
            self.groups.append(group)

    def finish(self, groups: Iterable[int]) -> None:
        """Push and occupy these groups."""
        for number in groups:
            view = self.machine.group(GroupId(number))
            assert view is not None
            segment = Segment(lineage=LINEAGE, version=view.version, tokens=1)
            self._apply(
                Push(
                    group=GroupId(number),
                    lease=view.lease,
                    worker=WorkerId("engine"),
                    shard=0,
                    sha=SHA,
                    nbytes=1,
                    truncated=False,
                    segments=(segment,),
                    sequence_tokens=segment.tokens,
                )
            )
            self._apply(Occupy(group=GroupId(number), lease=view.lease))

    def train(self) -> None:
        """Consume the step being trained, and publish its version."""
        step = Step(self.machine.version)
        sealed = self.machine.sealed_batch(step)
        assert sealed is not None
        term = self.machine.trainer_term
        self._apply(Consume(batch=sealed.batch, step=step, trainer_term=term, sha=SHA, nbytes=1))

    def _apply(self, event: Event) -> None:
        effects = self.machine.apply(event, now_ms=0)
        assert not any(isinstance(effect, Rejected) for effect in effects), effects


def window() -> str:
    """Return four moments of one small run."""
    parts = [part for place, (scene, caption) in enumerate(_frames()) for part in _frame(scene, caption, place * FRAME)]
    return picture(4 * FRAME, 268, [*parts, *_legend(250)], "four moments of a window of three steps")


def _frames() -> Iterator[tuple[Columns, tuple[str, str]]]:
    scene = Scene()
    scene.lease(12)
    yield _columns(scene), ("Version 0 is out: 12 groups", "are leased, the window is full.")
    scene.finish(range(5))
    yield _columns(scene), ("Five are done: step 0 has its", "batch, and trains.")
    scene.train()
    scene.lease(4)
    yield _columns(scene), ("Version 1 is out: four more", "may start, due at step 3.")
    scene.finish((5, 6, 7, 8, 9, 10, 12, 13, 14))
    scene.train()
    yield _columns(scene), ("Group 11 is late, and due at", "step 2: it pins that step.")


def _columns(scene: Scene) -> Columns:
    """Return the batch being trained and the next steps, with a seat for each live group: earliest deadline first."""
    machine = scene.machine
    version, step = machine.version, machine.next_step
    trained = machine.sealed_batch(Step(version))
    columns: Columns = {}
    if trained is not None:
        columns[version] = [(Seat.SEALED, member.version) for member in trained.members]
    live = [view for group in scene.groups if (view := machine.group(group)) and view.state <= State.OCCUPIED]
    live.sort(key=lambda view: (view.version, view.state is not State.OCCUPIED, view.group))
    seats = [(_seat(view, machine.pins()), view.version) for view in live]
    last = max(version + LIMITS.max_staleness, step)
    for place, due in enumerate(range(step, last + 1)):
        columns[due] = seats[place * LIMITS.batch_size : (place + 1) * LIMITS.batch_size]
    return columns


def _seat(view: GroupView, pins: tuple[GroupId, ...]) -> Seat:
    if view.group in pins:
        return Seat.PINNED
    return Seat.OCCUPIED if view.state is State.OCCUPIED else Seat.LEASED


def _frame(columns: Columns, caption: tuple[str, str], left: float) -> Iterator[str]:
    for row, text in enumerate(caption):
        yield words(left + 10, 18 + 17 * row, text)
    for place, (step, seats) in enumerate(columns.items()):
        x = left + 10 + place * COLUMN
        for row in range(LIMITS.batch_size):
            y = 50 + row * (SEAT + 4)
            kind, version = seats[row] if row < len(seats) else (Seat.EMPTY, None)
            yield box(x, y, COLUMN - 8, SEAT, kind)
            if version is not None:
                on = " on" if kind in (Seat.OCCUPIED, Seat.SEALED) else ""
                yield words(x + COLUMN / 2 - 4, y + 22, f"v{version}", f"middle{on}")
        yield words(x + COLUMN / 2 - 4, 218, f"step {step}", "middle small")


def _legend(y: float) -> Iterator[str]:
    for place, kind in enumerate(Seat):
        x = 10 + place * 175
        yield box(x, y - 11, 22, 14, kind)
        yield words(x + 30, y, LEGEND[kind], "small")
