"""Numbers that say something about how long the answers to a prompt will be, for the scheduler's length ranker.

What the ``FEATURES`` values of a row mean, all of them cheap and none of them learned:

- 0 to 2: logarithms of the prompt's characters, words and lines
- 3 to 6: shares of its characters that are digits, capitals, neither letters nor digits nor space, and not ASCII
- 7: mean letters a word; 8: share of its words that are different ones
- 9 to 11: logarithms of how many numbers it holds, of the digits of the longest, and of its question marks
- 12 to 31: words of the prompt, hashed into twenty places with a sign, as logarithms of counts. The other columns of
  the row take part as ``column=value`` when they are whole numbers, truth values or short texts: a column that names
  a level, a kind or a source of the problem tells much about lengths, so keep such columns in the rows.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np

from staleflow.configs.loading.prompt_rows import PromptRows
from staleflow.configs.loading.row_files import PROMPT
from staleflow.protocols.wire.messages import FEATURES
from staleflow.protocols.wire.tensors import Array

LONGEST = 20_000
"""Characters of a prompt that are looked at."""
SHORT = 40
"""Most characters of another column's text that count as a kind."""
_COUNTED = 12
"""Values that stand before the hashed words."""

_WORD = re.compile(r"\w+")
_NUMBER = re.compile(r"\d+")
_OTHER = re.compile(r"[^\w\s]|_")


def described(prompts: PromptRows, rows: Sequence[int]) -> Array:
    """Features of these rows, float16 [len(rows), FEATURES]."""
    return np.array([features(prompts[row]) for row in rows], np.float16).reshape(len(rows), FEATURES)


def features(row: Mapping[str, Any]) -> Array:
    """Those of one row, float16 [FEATURES]."""
    prompt: str = row[PROMPT]
    text = prompt[:LONGEST]
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
    """The other columns, where their values are names rather than texts or measures."""
    return [
        f"{column}={value}"
        for column, value in row.items()
        if column != PROMPT and (isinstance(value, int) or (isinstance(value, str) and len(value) <= SHORT))
    ]


def _hashed(words: Sequence[str]) -> Array:
    """Signed counts of the words by place, as logarithms that keep the sign."""
    counts = np.zeros(FEATURES - _COUNTED)
    for word in words:
        bits = crc32(word.encode())
        counts[bits % len(counts)] += 1.0 if bits >> 31 else -1.0
    marks: Array = np.sign(counts) * np.log1p(np.abs(counts))
    return marks
