"""Weights of which each rank has some rows, without torch."""

from collections.abc import Iterable, Iterator

from staleflow.clients.weights.sharded import Span
from staleflow.clients.weights.tensors import NamedTensors, layout, tensor_of
from staleflow.protocols.wire.messages import Manifest
from staleflow.protocols.wire.tensors import Array


class Rows:
    """Weights whose rows are distributed over the ranks in turn."""

    def __init__(self, weights: NamedTensors, rank: int = 0, world: int = 1) -> None:
        self._weights = weights
        self._rank, self._world = rank, world

    def items(self) -> Iterable[tuple[str, Array]]:
        return self._weights.items()

    def layout(self) -> Manifest:
        return layout(self._weights)

    def spans(self) -> Iterator[Span]:
        for entry, (name, array) in zip(self.layout().tensors, self._weights.items(), strict=True):
            data = tensor_of(name, array).data
            nbytes = len(data) // len(array)
            for start in range(self._rank * nbytes, len(data), self._world * nbytes):
                yield Span(entry.offset + start, data[start : start + nbytes])
