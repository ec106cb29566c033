"""A group as a user's stage receives it, and the check of the columns that it returns. Numpy only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from staleflow.protocols.wire.stages import is_per_token, short_name
from staleflow.protocols.wire.tensors import Array
from staleflow.protocols.wire.trajectory import GroupPayload


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """The n trajectories of one prompt. Every list has n entries; arrays in lists have one value per completion
    token."""

    row: dict[str, Any]
    """Row of the prompt."""
    completions: list[str]
    """Completions as text, without special tokens."""
    prompt_ids: NDArray[np.int32]
    """Tokens of the prompt, which all samples share."""
    token_ids: list[NDArray[np.int32]]
    logprobs: list[NDArray[np.float32]]
    """Log-probability of each token, as the engine sampled it; 0 for tokens of the environment."""
    sampled: list[NDArray[np.bool_]]
    """True for tokens of the policy, False for tokens of the environment."""
    columns: dict[str, NDArray[np.float32]]
    """Per-sample columns, [n], by ``stage/column``: those that the stage needs, and those of the environment."""
    token_columns: dict[str, list[NDArray[np.float32]]]
    """Per-token columns by ``stage/column``, as far as the stage needs them."""

    @property
    def prompt(self) -> str:
        """Prompt of the row as text."""
        prompt = self.row.get("prompt", "")
        return prompt if isinstance(prompt, str) else str(prompt)

    @property
    def num_samples(self) -> int:
        return len(self.token_ids)

    @classmethod
    def of(cls, row: dict[str, Any], completions: Sequence[str], payload: GroupPayload) -> "Group":
        """Build it from the data of a stage worker; arrays are views."""
        cuts = np.cumsum(payload.lengths)[:-1]
        stages = {short_name(name): (is_per_token(name), column) for name, column in payload.stages.items()}
        return cls(
            row=row,
            completions=list(completions),
            prompt_ids=payload.prompt_ids,
            token_ids=np.split(payload.token_ids, cuts),
            logprobs=np.split(payload.logprobs, cuts),
            sampled=np.split(payload.loss_mask != 0, cuts),
            columns={name: column for name, (per_token, column) in stages.items() if not per_token},
            token_columns={name: np.split(column, cuts) for name, (per_token, column) in stages.items() if per_token},
        )


class WrongColumns(Exception):
    """A stage returned other columns than it declares; the text is one line."""


def checked_columns(group: Group, makes: Sequence[str], returned: object) -> dict[str, Array]:
    """Return the columns, float32, by their full names. Raise ``WrongColumns`` for the first that is missing or
    wrong."""
    names = {short_name(name).partition("/")[2]: name for name in makes}
    if not isinstance(returned, Mapping):
        raise WrongColumns(f"it returned {type(returned).__name__}; it must be a dict of {', '.join(names)}")
    columns = cast(Mapping[str, object], returned)
    if unknown := [str(name) for name in columns if name not in names]:
        raise WrongColumns(f"it returned {', '.join(unknown)}; it declares {', '.join(names)}")
    if missing := [name for name in names if name not in columns]:
        raise WrongColumns(f"it returned no {', '.join(missing)}")
    return {
        full: _of_tokens(name, group, columns[name]) if is_per_token(full) else _of_samples(name, group, columns[name])
        for name, full in names.items()
    }


def _of_samples(name: str, group: Group, values: object) -> Array:
    column = _numbers(name, values)
    if column.shape != (group.num_samples,):
        detail = f"{name} has {_size(column)}; the group has {group.num_samples} samples"
        raise WrongColumns(detail)
    return column


def _of_tokens(name: str, group: Group, values: object) -> Array:
    """Check and join a sequence of sequences: one per sample, with one value per completion token."""
    listed = isinstance(values, Sequence | np.ndarray)
    sequences = list(cast(Sequence[object], values)) if listed else []
    if len(sequences) != group.num_samples:
        has = f"{len(sequences)} entries" if listed else type(values).__name__
        raise WrongColumns(
            f"{name} has {has}; the group has {group.num_samples} samples, each with one value per token"
        )
    parts = list[Array]()
    for sample, (part, tokens) in enumerate(zip(sequences, group.token_ids, strict=True)):
        column = _numbers(name, part)
        if column.shape != tokens.shape:
            raise WrongColumns(f"{name} of sample {sample} has {_size(column)}; it has {len(tokens)} completion tokens")
        parts.append(column)
    return np.concatenate(parts)


def _numbers(name: str, values: object) -> Array:
    """Convert to float32. Raise ``WrongColumns`` unless all values are finite."""
    try:
        numbers = np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise WrongColumns(f"{name} is {values!r:.80}; it must hold numbers") from error
    with np.errstate(over="ignore"):
        small = numbers.astype(np.float32)
    if not np.isfinite(small).all():
        raise WrongColumns(f"{name} holds a value that is not finite in float32")
    return small


def _size(column: Array) -> str:
    return f"{len(column)} values" if column.ndim == 1 else f"shape {list(column.shape)}"
