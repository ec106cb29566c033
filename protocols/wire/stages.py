"""Names and kinds of stage columns: one value for each sample, or one for each completion token.

A length does not determine the kind (a group of one-token completions has as many tokens as samples), so the kind is
part of the name: ``stage/<stage>/<column>`` has a value for each sample, ``stage/<stage>/<column>:token`` one for each
token. The columns of shipped stages have their kind here instead. ``trajectory`` checks the arrays.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

STAGE: Final = "stage/"
"""Every column of a stage is named ``stage/<stage>/<column>``."""

LOGPROB_TOLERANCE: Final = 1e-3
"""Amount by which a log-probability may exceed 0, because of rounding in the engine."""

REWARD: Final = "reward"
REFERENCE: Final = "reference"
CRITIC: Final = "critic"


class Kind(StrEnum):
    """Unit for which a column has one value."""

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
"""Columns that each shipped stage must make, by stage."""

COLUMNS: Final = {
    f"{STAGE}{stage}/{name}": column for stage, columns in STAGES.items() for name, column in columns.items()
}
"""Columns of the shipped stages, by full name."""

REWARD_COLUMN: Final = f"{STAGE}{REWARD}/reward"
"""Full name of the reward column, which every group has after the reward stage."""

ENVIRONMENT: Final = f"{STAGE}environment/"
"""Prefix of the columns that come with the push: numbers returned by the episodes, one value a sample, by any name."""

ENVIRONMENT_REWARD: Final = f"{ENVIRONMENT}reward"
"""Column that, if a push has it, is the reward."""

TOKEN_SUFFIX: Final = ":token"
"""Suffix of a user's column with one value for each completion token, in the configuration and on the wire."""
SAMPLE_SUFFIX: Final = ":sample"
"""Optional suffix of a user's column with one value for each sample, in the configuration only."""

_SAMPLE: Final = Column(kind=Kind.SAMPLE)
_TOKEN: Final = Column(kind=Kind.TOKEN)


def column_of(name: str) -> Column:
    """Return kind and bound of the column of this full name."""
    return COLUMNS.get(name) or (_TOKEN if name.endswith(TOKEN_SUFFIX) else _SAMPLE)


def is_per_token(name: str) -> bool:
    """Return True if the column of this full name has one value for each completion token."""
    return column_of(name).kind is Kind.TOKEN


def full_name(stage: str, declared: str) -> str:
    """Return the wire name of a column declared in ``makes``: ``score``, ``score:sample`` or ``score:token``."""
    return f"{STAGE}{stage}/{declared.removesuffix(SAMPLE_SUFFIX)}"


def short_name(name: str) -> str:
    """Return ``stage/column``, the name of the column in a configuration and in a trainer's batch."""
    return name.removeprefix(STAGE).removesuffix(TOKEN_SUFFIX)
