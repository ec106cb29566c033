"""Stop strings: the first token after which the text of a completion contains one of them.

Engines know token ids only. The end of a text is a function of the tokens up to there, so tokens behind it can be
discarded without a change to the log-probabilities of those before.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.texts import Decode

SPLIT_LETTER = 4
"""Maximum number of tokens that write the bytes of one letter."""


class StopStrings:
    """The stop strings of one completion. ``decode`` omits special tokens, as the reward's text does."""

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops = tuple(stops)
        self._decode = decode
        # A token writes at least one byte, unless it is special: the string that a token completes lies within these.
        self._window = max((len(stop.encode()) for stop in self._stops), default=0) + SPLIT_LETTER

    def end(self, token_ids: NDArray[np.int32], checked: int) -> int:
        """Return the number of tokens up to the one that completes a stop string; 0 if none does.

        The first ``checked`` tokens contain none. Only a short text before the new tokens is decoded.
        """
        if not self._stops:
            return 0
        start = max(0, checked - self._window)
        if not self._contains(token_ids[start:]):
            return 0
        return next(count for count in range(checked + 1, len(token_ids) + 1) if self._contains(token_ids[start:count]))

    def _contains(self, token_ids: NDArray[np.int32]) -> bool:
        (text,) = self._decode([token_ids])
        return any(stop in text for stop in self._stops)
