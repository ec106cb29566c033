"""Columns that rollout workers push with their groups: ``[[column]]``, and the rules for it."""

import re
from collections.abc import Sequence
from typing import Annotated, Final, Literal

from msgspec import Meta, field

from staleflow.configs.engines import ENGINES
from staleflow.configs.errors import ConfigError, shown
from staleflow.configs.section import Positive, Section, Text
from staleflow.protocols.wire.routed_experts import COLUMN as ROUTED_EXPERTS
from staleflow.protocols.wire.typed_columns import (
    MAX_COLUMNS,
    MAX_SAMPLE_BYTES,
    MAX_TOKEN_BYTES,
    Dtype,
    TypedColumn,
)

MAX_DIMENSIONS: Final = 6
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
RESERVED: Final = (
    *("prompt_ids", "lengths", "token_ids", "logprobs", "loss_mask", "segments", "finish", "versions"),
    *("input_ids", "attention_mask", "behavior_logprobs", "token_versions", "rewards", "group_ids", "rows"),
)
"""Names of the built-in columns of a push and of a batch."""


class Column(Section, frozen=True, kw_only=True):
    """A typed column of values that rollout workers push with each sample and that the trainer gets: routed experts,
    log-probabilities of a teacher, images. At most 16.

    Workers are `RolloutClient` and engines of your own; the shipped engines make no columns but the one of
    `trainer.router_replay`.
    """

    name: Text
    """Lower-case letters, digits and ``_``, a letter first, at most 40. Names of built-in columns are refused."""
    per: Literal["token", "sample"]
    """Unit of one value. ``token``: a completion token; the prompt has no values. ``sample``: a sample."""
    dtype: Dtype
    """Type of the values. ``bytes``: a byte string of any length for each sample."""
    shape: list[Positive] = field(default_factory=list[Positive])
    """Dimensions of one value, at most 6; empty: a number. A value has at most 64 KiB a token and 16 MiB a sample."""
    max_bytes: Annotated[int, Meta(ge=1, le=MAX_SAMPLE_BYTES)] = 1 << 20
    """``bytes``: maximum length of a byte string; a longer one is refused."""
    required: bool = True
    """Refuse groups without the column. false: at the trainer, their values are 0 or empty."""


def typed_columns(columns: Sequence[Column], *, router_replay: bool = False) -> tuple[TypedColumn, ...]:
    """Return the declared columns as the wire protocol uses them, and the one that ``trainer.router_replay`` adds."""
    added = (ROUTED_EXPERTS,) if router_replay else ()
    return added + tuple(
        TypedColumn(
            name=column.name,
            per=column.per,
            dtype=column.dtype,
            shape=tuple(column.shape),
            max_bytes=column.max_bytes,
            required=column.required,
        )
        for column in columns
    )


def check_columns(columns: Sequence[Column], *, engine: str, environment: bool) -> None:
    """Raise ``ConfigError`` for the first column that breaks a rule. ``environment``: episodes make the samples."""
    if len(columns) > MAX_COLUMNS:
        raise ConfigError("column", len(columns), f"a run has at most {MAX_COLUMNS} columns")
    names = [column.name for column in columns]
    for place, (column, typed) in enumerate(zip(columns, typed_columns(columns), strict=True)):
        key = f"column[{place}]"
        if not _NAME.fullmatch(column.name):
            allowed = "it must be at most 40 lower-case letters, digits and '_', a letter first"
            raise ConfigError(f"{key}.name", column.name, allowed)
        if column.name in RESERVED:
            raise ConfigError(f"{key}.name", column.name, f"it must be none of {', '.join(RESERVED)}")
        if column.name in names[:place]:
            raise ConfigError(f"{key}.name", column.name, f"column[{names.index(column.name)}] has it already")
        if typed.is_bytes and column.per == "token":
            raise ConfigError(f"{key}.dtype", "bytes", 'with per = "token" use "uint8" and a shape')
        if typed.is_bytes and column.shape:
            raise ConfigError(f"{key}.shape", column.shape, 'with dtype = "bytes" leave it empty')
        if len(column.shape) > MAX_DIMENSIONS:
            raise ConfigError(f"{key}.shape", column.shape, f"it must have at most {MAX_DIMENSIONS} dimensions")
        if not typed.is_bytes and column.max_bytes != (default := 1 << 20):
            raise ConfigError(f"{key}.max_bytes", column.max_bytes, f'it is for dtype = "bytes"; leave it at {default}')
        most = MAX_TOKEN_BYTES if column.per == "token" else MAX_SAMPLE_BYTES
        if typed.value_bytes > most:
            allowed = f"a value of {column.dtype} takes {typed.value_bytes} bytes; at most {most} a {column.per}"
            raise ConfigError(f"{key}.shape", column.shape, allowed)
        if column.required and (environment or engine in ENGINES):
            producer = "environment.run" if environment else f"rollout.engine {shown(engine)}"
            allowed = f"{producer} makes no columns: set it to false, or use an engine of your own (module:Class)"
            raise ConfigError(f"{key}.required", True, allowed)
