"""What happened to one id: the last effects, kept only in debug mode, for the message of an error."""

from collections import deque

from staleflow.protocols.consistency.effects import Effect

LENGTH = 4096


class Story:
    """A ring of the last effects."""

    __slots__ = ("_ring",)

    def __init__(self) -> None:
        self._ring: deque[Effect] = deque(maxlen=LENGTH)

    def add(self, effects: tuple[Effect, ...]) -> None:
        self._ring.extend(effects)

    def of(self, group: int) -> tuple[str, ...]:
        """The effects that name ``group``, oldest first."""
        return tuple(repr(effect) for effect in self._ring if getattr(effect, "group", None) == group)
