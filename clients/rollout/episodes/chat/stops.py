"""Stop strings: cut an answer at the first one. Pure."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.rollout.engines.base import Trajectory
from staleflow.clients.rollout.episodes.chat.transcript import Turn, cut
from staleflow.protocols.wire.trajectory import Finish


def cut_at_stop(
    given: NDArray[np.int32],
    trajectory: Trajectory,
    stops: Sequence[str],
    decode: Callable[[NDArray[np.int32]], str],
) -> tuple[Turn, str, str | None]:
    """Return the turn, its text up to the first stop string, and that string.

    The end of a text is a function of the tokens up to there, so later tokens can be discarded without changing the
    probabilities of the earlier ones. An engine that cuts at stop strings itself
    omits special tokens there, which ``decode`` may keep.
    """
    token_ids, text = trajectory.token_ids, decode(trajectory.token_ids)
    if not any(stop in text for stop in stops):
        return Turn(given=given, segments=trajectory.segments, finish=trajectory.finish), text, None
    # Binary search for the first token after which the text contains a stop string.
    low, high = 1, len(token_ids)
    while low < high:
        middle = (low + high) // 2
        written = decode(token_ids[:middle])
        low, high = (low, middle) if any(stop in written for stop in stops) else (middle + 1, high)
    text = decode(token_ids[:low])
    stop = min((stop for stop in stops if stop in text), key=text.index)
    turn = Turn(given=given, segments=cut(trajectory.segments, low), finish=Finish.STOP, by_text=True)
    return turn, text[: text.index(stop)], stop
