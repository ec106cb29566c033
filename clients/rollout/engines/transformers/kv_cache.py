# pyright: basic, reportMissingImports=false
"""A key-value cache for continuous batching behind the cache interface of ``transformers``.

Each running trajectory has one row, and rows are packed at the front. Every row starts at position 0 and has its own
length. Nothing is padded on the left, so a row that joins or leaves never shifts the positions of others. The model
receives the rows in use up to the longest one, and a mask limits what each row attends to.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

GROWTH = 64
"""The capacity is a multiple of this many tokens."""


@dataclass(slots=True)
class PassPlan:
    """Cache usage of the current forward pass; shared by all layers."""

    slots: int
    capacity: int = 0
    rows: Any = None
    """Decoding: the rows 0 .. n - 1; ``None`` during a prefill."""
    positions: Any = None
    """Decoding: the column that each row writes."""
    width: int = 0
    """Decoding: number of columns that the longest row needs."""
    first: int = 0
    """Prefill: the first joining row."""
    sources: Any = None
    """Prefill: index of the prompt in this pass for each joining row."""


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of one layer: ``[slots, kv_heads, capacity, head_dim]``."""

    is_sliding = False
    keys: Any
    values: Any

    def __init__(self, plan: PassPlan) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.plan = plan

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        def rows(states: torch.Tensor) -> torch.Tensor:
            _, heads, _, size = states.shape
            return states.new_zeros((self.plan.slots, heads, self.plan.capacity, size))

        self.keys, self.values = rows(key_states), rows(value_states)
        self.is_initialized = True

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Store the new states and return the states that the queries attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        plan = self.plan
        if plan.rows is None:
            rows = slice(plan.first, plan.first + len(plan.sources))
            self.keys[rows, :, : key_states.shape[2]] = key_states.index_select(0, plan.sources)
            self.values[rows, :, : key_states.shape[2]] = value_states.index_select(0, plan.sources)
            return key_states, value_states
        self.keys[plan.rows, :, plan.positions] = key_states[:, :, 0]
        self.values[plan.rows, :, plan.positions] = value_states[:, :, 0]
        size = len(plan.rows)
        return self.keys[:size, :, : plan.width], self.values[:size, :, : plan.width]

    def move(self, sources: torch.Tensor, targets: torch.Tensor, width: int) -> None:
        self.keys[targets, :, :width] = self.keys[sources, :, :width]
        self.values[targets, :, :width] = self.values[sources, :, :width]

    def grow(self, capacity: int) -> None:
        if not self.is_initialized:
            return
        pad = (0, 0, 0, capacity - self.keys.shape[2])
        with torch.inference_mode(False), torch.no_grad():  # passes of a sharded model do not run in inference mode
            self.keys = torch.nn.functional.pad(self.keys, pad)
            self.values = torch.nn.functional.pad(self.values, pad)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0  # decode masks are computed in masks.py; a prefill must see an empty cache

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """Rows of every layer. Call either ``reading`` or ``writing`` before each forward pass."""

    def __init__(self, layers: int, slots: int) -> None:
        self.plan = PassPlan(slots)
        self.rows = [SlotLayer(self.plan) for _ in range(layers)]
        super().__init__(layers=list(self.rows))

    def reading(self, first: int, sources: torch.Tensor, width: int) -> None:
        """Prepare a pass over prompts of at most ``width`` tokens; row ``first + i`` gets prompt ``sources[i]``."""
        self._fit(width)
        self.plan.rows = self.plan.positions = None
        self.plan.first, self.plan.sources = first, sources

    def writing(self, rows: torch.Tensor, positions: torch.Tensor, width: int) -> None:
        """Prepare a pass that adds one token to each row."""
        self._fit(width)
        self.plan.rows, self.plan.positions, self.plan.width = rows, positions, width

    def move(self, sources: torch.Tensor, targets: torch.Tensor, width: int) -> None:
        """Copy the first ``width`` columns of ``sources`` into ``targets``."""
        for layer in self.rows:
            layer.move(sources, targets, width)

    def _fit(self, width: int) -> None:
        plan = self.plan
        if width > plan.capacity:
            plan.capacity = grown(plan.capacity, width)
            for layer in self.rows:
                layer.grow(plan.capacity)


def grown(capacity: int, width: int) -> int:
    """Return the next capacity of a cache that has to hold ``width`` tokens a row: at least half as much again."""
    return max(-(-width // GROWTH) * GROWTH, capacity * 3 // 2)
