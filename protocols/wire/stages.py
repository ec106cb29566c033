"""What each stage makes of a group: its columns, and whether a column holds a value a sample or a completion token.

A length says nothing about the kind (a group of one-token completions has as many tokens as samples), so the kind
belongs to the name: ``stage/<stage>/<column>`` has a value a sample, ``stage/<stage>/<column>:token`` one a token. The
columns of shipped stages have their kind here instead. Names and kinds only; ``trajectory`` checks the arrays.
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

TOKEN_SUFFIX: Final = ":token"
"""Ends the name of a user's column of one value a completion token, in a configuration as on the wire."""
SAMPLE_SUFFIX: Final = ":sample"
"""May end the name of the others in a configuration."""

_SAMPLE: Final = Column(kind=Kind.SAMPLE)
_TOKEN: Final = Column(kind=Kind.TOKEN)


def column_of(name: str) -> Column:
    """What the column of this full name holds."""
    return COLUMNS.get(name) or (_TOKEN if name.endswith(TOKEN_SUFFIX) else _SAMPLE)


def is_per_token(name: str) -> bool:
    """Whether the column of this full name holds one value a completion token."""
    return column_of(name).kind is Kind.TOKEN


def full_name(stage: str, made: str) -> str:
    """On the wire, of a column as ``makes`` declares it: ``score``, ``score:sample`` or ``score:token``."""
    return f"{STAGE}{stage}/{made.removesuffix(SAMPLE_SUFFIX)}"


def short_name(name: str) -> str:
    """``stage/column``, as a configuration and a trainer's batch name the column of this full name."""
    return name.removeprefix(STAGE).removesuffix(TOKEN_SUFFIX)
