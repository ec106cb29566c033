"""Features of a prompt that predict the lengths of its completions, for the scheduler's length ranker.

The ``FEATURES`` values of a row are cheap to compute and none of them is learned:

- 0 to 2: logarithms of the number of characters, words and lines of the prompt
- 3 to 6: shares of its characters that are digits, capitals, neither letters nor digits nor space, and not ASCII
- 7: mean letters per word; 8: share of distinct words
- 9 to 11: logarithms of the count of numbers, of the digits of the longest number, and of the count of question marks
- 12 to 31: words of the prompt, hashed into twenty buckets with a sign, as logarithms of counts. Other columns of the
  row are hashed as ``column=value`` if they are whole numbers, booleans or short texts. A column that names a level, a
  kind or a source of the problem predicts lengths well, so keep such columns in the rows.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np

from staleflow.configs.loading.row_files import PROMPT
from staleflow.net.client import Client
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.wire.messages import FEATURES, PromptFeatures, PromptFeaturesReply
from staleflow.protocols.wire.tensors import Array, specs_and_frames
from staleflow.servers.trajectories.prompts import Prompts

MAX_CHARS = 20_000
"""Number of leading characters of a prompt that are analyzed."""
MAX_KIND_CHARS = 40
"""Maximum length of another column's text that counts as a category."""
_COUNTED = 12
"""Number of values before the hashed words."""

_WORD = re.compile(r"\w+")
_NUMBER = re.compile(r"\d+")
_OTHER = re.compile(r"[^\w\s]|_")


def feature_matrix(rows: Sequence[Mapping[str, Any]]) -> Array:
    """Return the features of these rows, float16 [len(rows), FEATURES]."""
    return np.array([features(row) for row in rows], np.float16).reshape(len(rows), FEATURES)


def features(row: Mapping[str, Any]) -> Array:
    """Return the features of one row, float16 [FEATURES]."""
    prompt: str = row[PROMPT]
    text = prompt[:MAX_CHARS]
    words, numbers = _WORD.findall(text.lower()), _NUMBER.findall(text)
    chars, num_words = max(len(text), 1), max(len(words), 1)
    counted = (
        np.log1p(len(prompt)),
        np.log1p(len(words)),
        np.log1p(text.count("\n") + 1),
        sum(map(len, numbers)) / chars,
        sum(map(str.isupper, text)) / chars,
        len(_OTHER.findall(text)) / chars,
        (len(text) - len(text.encode("ascii", "ignore"))) / chars,
        sum(map(len, words)) / num_words,
        len(set(words)) / num_words,
        np.log1p(len(numbers)),
        np.log1p(max(map(len, numbers), default=0)),
        np.log1p(text.count("?")),
    )
    return np.concatenate((counted, _hashed([*words, *_kinds(row)]))).astype(np.float16)


def _kinds(row: Mapping[str, Any]) -> list[str]:
    """Return the other columns whose values are categories rather than texts or measures."""
    return [
        f"{column}={value}"
        for column, value in row.items()
        if column != PROMPT and (isinstance(value, int) or (isinstance(value, str) and len(value) <= MAX_KIND_CHARS))
    ]


def _hashed(words: Sequence[str]) -> Array:
    """Return signed counts of the words per bucket, as logarithms that keep the sign."""
    counts = np.zeros(FEATURES - _COUNTED)
    for word in words:
        bits = crc32(word.encode())
        counts[bits % len(counts)] += 1.0 if bits >> 31 else -1.0
    marks: Array = np.sign(counts) * np.log1p(np.abs(counts))
    return marks


async def describe(scheduler: Client, prompts: Prompts, shard: int) -> None:
    """Serve feature requests until the run is over."""
    rows: list[int] = []
    while True:
        try:
            fetched = await prompts.fetch([GroupId(row) for row in rows])
            found = {row: columns for row in rows if (columns := fetched[GroupId(row)]) is not None}
            matrix = await asyncio.to_thread(feature_matrix, list(found.values()))
            rows = list(found)
            specs, frames = specs_and_frames({"features": matrix} if rows else {})
            answer = await scheduler.ask(
                PromptFeatures(shard=shard, rows=rows, frames=specs), PromptFeaturesReply, frames, timeout_s=None
            )
        except Refused:
            return
        rows = answer.rows
