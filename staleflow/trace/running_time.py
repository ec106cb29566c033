"""Running time of a run: seconds during which a scheduler served it, read from the trace."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple


class _Piece(NamedTuple):
    """One incarnation, by the monotonic clock of its boot."""

    begin_s: float
    end_s: float
    """Time of its last line."""
    zero_s: float
    """Second 0 of the axis on this clock."""


class Axis:
    """Map monotonic clocks to seconds since the first line of a trace.

    The time between the last line of an incarnation and the next ``open`` does not count, within one boot or across
    two.
    """

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []

    def see(self, event: Mapping[str, Any]) -> float:
        """Return the time of the next line of the trace."""
        mono_s: float = event["m"] / 1e9
        last = self._pieces[-1] if self._pieces else _Piece(mono_s, mono_s, mono_s)
        if not self._pieces or event["ev"] == "open" or mono_s < last.end_s:
            self._pieces.append(_Piece(mono_s, mono_s, mono_s - (last.end_s - last.zero_s)))
        else:
            self._pieces[-1] = last._replace(end_s=mono_s)
        return mono_s - self._pieces[-1].zero_s

    def at(self, mono_s: float) -> float:
        """Return the time of any moment; a moment between two incarnations maps to the end of the first."""
        if not self._pieces:
            return mono_s
        started = [piece for piece in self._pieces if piece.begin_s <= mono_s] or self._pieces[:1]
        inside = (piece for piece in started if mono_s <= piece.end_s)
        piece = next(inside, None) or max(started, key=lambda piece: piece.end_s)
        return (mono_s if piece is self._pieces[-1] else min(mono_s, piece.end_s)) - piece.zero_s


def timed(events: Iterable[Mapping[str, Any]]) -> Iterator[tuple[float, Mapping[str, Any]]]:
    """Yield each event with its time in seconds."""
    axis = Axis()
    for event in events:
        yield axis.see(event), event
