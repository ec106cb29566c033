"""What each stage makes of a group: its columns, and whether a column holds a value a sample or a completion token.

A length says nothing about the kind (a group of one-token completions has as many tokens as samples), so the kind
belongs to the name: ``stage/<stage>/<column>`` is looked up here, and a column that nobody declares holds one value a
sample. Names and kinds only; ``trajectory`` checks the arrays.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

STAGE: Final = "stage/"
"""Every column of a stage is named ``stage/<stage>/<column>``."""

LOGPROB_TOLERANCE: Final = 1e-3
"""A log-probability may exceed 0 by this much, from rounding in the engine."""

REWARD: Final = "reward"
REFERENCE: Final = "reference"
CRITIC: Final = "critic"


class Kind(StrEnum):
    """How many values a column holds: one for each of these."""

    SAMPLE = "sample"
    TOKEN = "completion token"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One float32 column. Its values are finite and at most ``most``."""

    kind: Kind
    most: float = math.inf


STAGES: Final[Mapping[str, Mapping[str, Column]]] = {
    REWARD: {"reward": Column(kind=Kind.SAMPLE)},
    REFERENCE: {"logprobs": Column(kind=Kind.TOKEN, most=LOGPROB_TOLERANCE)},
    CRITIC: {"values": Column(kind=Kind.TOKEN)},
}
"""Stage -> the columns that it must make."""

COLUMNS: Final = {f"{STAGE}{stage}/{name}": column for stage, made in STAGES.items() for name, column in made.items()}
"""By full name."""

REWARD_COLUMN: Final = f"{STAGE}{REWARD}/reward"
"""Of every group that has been through the first stage."""

ENVIRONMENT: Final = f"{STAGE}environment/"
"""Columns that come with the push: what the episodes returned, one value a sample, by any name."""

ENVIRONMENT_REWARD: Final = f"{ENVIRONMENT}reward"
"""Where it is there, it is the reward."""

UNDECLARED: Final = Column(kind=Kind.SAMPLE)


def is_per_token(name: str) -> bool:
    """Whether the column of this full name holds one value a completion token."""
    return COLUMNS.get(name, UNDECLARED).kind is Kind.TOKEN
