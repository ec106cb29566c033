"""Picture of a group's life: the states of the ledger and the transitions between them."""

from collections.abc import Iterator

from docs.generate.svg import arrow, box, picture, words
from staleflow.protocols.consistency.groups import State

STEPS = (
    (State.LEASED, "a rollout worker generates it", "push"),
    (State.PUSHED, "payload stored, stages run", "occupy"),
    (State.OCCUPIED, "ready to train", "seal"),
    (State.SEALED, "in the batch of a step", "consume"),
    (State.CONSUMED, "trained once", ""),
)
LOST = (
    (State.RELEASED, (State.LEASED, State.PUSHED), "expired, aborted, filtered, …: its place is free again"),
    (State.DROPPED, (State.OCCUPIED,), "surplus, overdue, damaged: gone for good"),
)
WIDTH, HEIGHT, GAP = 140, 44, 58


def life() -> str:
    """Return the picture."""
    return picture(len(STEPS) * (WIDTH + GAP) + 60, 210, _parts(), "leased, pushed, occupied, sealed, consumed")


def _parts() -> Iterator[str]:
    at = {state: 60 + place * (WIDTH + GAP) for place, (state, _, _) in enumerate(STEPS)}
    yield words(4, 56, "reserve", "small")
    yield arrow(4, 62, 56, 62)
    for state, caption, verb in STEPS:
        x = at[state]
        yield box(x, 40, WIDTH, HEIGHT, "box")
        yield words(x + WIDTH / 2, 67, state.name.lower(), "middle bold")
        yield words(x + WIDTH / 2, 30, caption, "middle small")
        if verb:
            yield words(x + WIDTH + GAP / 2, 56, verb, "middle small")
            yield arrow(x + WIDTH + 4, 62, x + WIDTH + GAP - 4, 62)
    for state, sources, caption in LOST:
        first, last = at[sources[0]], at[sources[-1]] + WIDTH
        yield box(first, 140, last - first, HEIGHT - 8, "box")
        yield words((first + last) / 2, 163, state.name.lower(), "middle bold")
        yield words((first + last) / 2, 196, caption, "middle small")
        for source in sources:
            middle = at[source] + WIDTH / 2
            yield arrow(middle, 88, middle, 136)
            yield words(middle + 8, 116, "drop" if state is State.DROPPED else "release", "small")
