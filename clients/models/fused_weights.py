# pyright: basic, reportMissingImports=false
"""Names of a model's tensors in its files, where ``transformers`` names or fuses them differently in memory.

A mixture of experts has one tensor per layer for all experts in memory, and one tensor per expert in its files. The
conversions are those that ``from_pretrained`` registers for the architecture, so that slices of a fused tensor can be
read without the rest of it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of stored tensors by name."""


Experts = list[list[str]]
"""Names of the stored tensors of each expert, in the order in which their rows are concatenated."""


def stored_shape(stored: str | Experts, shapes: Shapes) -> tuple[int, ...]:
    """Return the shape of one tensor of the model; empty if its experts have different shapes."""
    if isinstance(stored, str):
        return shapes[stored]
    each = [[shapes[name] for name in names] for names in stored]
    first = each[0]
    if any(other != first for other in each) or len({shape[1:] for shape in first}) != 1:
        return ()
    return (len(each), sum(shape[0] for shape in first), *first[0][1:])


def stored_names(model: Any, shapes: Shapes) -> dict[str, str | Experts] | None:
    """Return the stored name, or names, of each of the model's tensors; None if the files need another conversion.

    The conversions that apply are attached to the model like those of ``from_pretrained``, for ``as_stored``.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    names: dict[str, str | Experts] = {}
    parts: dict[str, dict[str, list[str]]] = {}
    for name in sorted(shapes, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters)
        if target in names:
            return None
        if pattern is None:
            names[target] = name
        else:
            parts.setdefault(target, {}).setdefault(pattern, []).append(name)
    for target, by_pattern in parts.items():
        converter = next(one for one in converters if by_pattern.keys() <= {*one.source_patterns})
        columns = [by_pattern.get(pattern, []) for pattern in converter.source_patterns]
        if not _stacks(converter) or len({len(column) for column in columns}) != 1:
            return None
        names[target] = [list(expert) for expert in zip(*columns, strict=True)]
    model._weight_conversions = [one for one in conversions if one.was_used()]
    return names


def as_stored(model: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a complete tensor of the model under the names, and in the parts, of the files that it was loaded from."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions and all(isinstance(one, WeightRenaming) or _stacks(one) for one in conversions):
        yield from revert_weight_conversion(model, {name: tensor}).items()
    else:  # other conversions may need several tensors at once; from_pretrained also loads the model's own names
        yield name, tensor


def _stacks(converter: WeightConverter) -> bool:
    """Return whether it only stacks the experts in the first dimension, and concatenates their rows."""
    match converter.operations:
        case [MergeModulelist(dim=0)]:
            return len(converter.source_patterns) == len(converter.target_patterns) == 1
        case [MergeModulelist(dim=0), Concatenate(dim=1)]:
            return len(converter.target_patterns) == 1
        case _:
            return False
