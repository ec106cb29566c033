# pyright: basic, reportMissingImports=false
"""Count the bytes of tensors while they exist, real or fake ones."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within this context, ``live`` has the bytes of all storages created in it, and ``peak`` their maximum so far.

    Backward passes count only if they run in the same thread, as on a CPU. Memory that a kernel allocates and releases
    within one call does not count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._known: set[int] = set()

    def reset_peak(self) -> int:
        """Start a new maximum; return the bytes that exist now."""
        self.peak = self.live
        return self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor):
                self._record(value.untyped_storage(), counted=False)  # older than this context
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._record(value.untyped_storage(), counted=True)
        return result

    def _record(self, storage: torch.UntypedStorage, *, counted: bool) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        nbytes = storage.nbytes() if counted else 0
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, key, nbytes)

    def _release(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes
