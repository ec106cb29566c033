# pyright: basic, reportMissingImports=false
"""A copy of what optimizer updates change, in main memory, to undo the updates of a step that fails.

Restoring copies into the existing tensors: it allocates no device memory and communicates with no other rank, so it
also works after an out-of-memory error and while other ranks wait.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from staleflow.clients.trainer.backends.adamw import plain_parts


class Snapshot:
    """A copy of weights and of the state of their optimizer; of sharded tensors, this rank's part."""

    def __init__(
        self,
        weights: Iterable[Tensor],
        optimizer: torch.optim.Optimizer,
        restored: Callable[[], object] = lambda: None,
    ) -> None:
        """``restored`` is called after each ``restore``."""
        self._optimizer = optimizer
        self._restored = restored
        self._states = {
            parameter: {key: value for key, value in state.items() if isinstance(value, Tensor)}
            for parameter, state in optimizer.state.items()
        }
        entries = [entry for state in self._states.values() for entry in state.items()]
        changed = [*weights, *(part for entry in entries for _, part in plain_parts(*entry))]
        self._copies = [(tensor, _local(tensor).to("cpu", copy=True)) for tensor in changed]

    def restore(self) -> None:
        """Undo all updates since the snapshot. State that the optimizer created since then is removed."""
        for parameter in [*self._optimizer.state]:
            if parameter not in self._states:
                del self._optimizer.state[parameter]
        with torch.no_grad():
            for tensor, copy in self._copies:
                _local(tensor).copy_(copy)
        self._restored()


def _local(tensor: Tensor) -> Tensor:
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
