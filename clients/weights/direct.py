# pyright: basic, reportMissingImports=false
"""Protocol of a direct transfer of a version between trainer and reader, without the server.

- They meet at a store of ``torch.distributed`` in the trainer's process. The reader puts an ``Ask`` into its queue, the
  trainer puts an ``Answer`` under the name of the group that the ask proposes, and the reader confirms the answer. An
  expired ask is not answered, and no group is opened for a silent reader: it has left.
- Each transfer has its own group of two processes. A process that dies, hangs or leaves ends that group and no other,
  and no reader waits for a later one.
- A version travels as the bytes of its file, in order, span by span. gloo carries them; NCCL does where both have a GPU
  and it is not the same one, through one span of GPU memory on each side.
"""

import os
import socket
import threading
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray

from staleflow.configs.errors import ConfigError
from staleflow.net.addresses import split_tcp
from staleflow.protocols.consistency.ids import Lineage, Version

SPAN_BYTES = 4 << 20
"""Bytes of a span. A few spans stay in the cache between network, digest and copy; larger ones are slower."""
MAX_SPANS_IN_FLIGHT = 2
"""Spans handed to the group at once: one travels while the next is prepared, or the last one verified."""
ANSWER_TIMEOUT_S = 5.0
"""Timeout of the trainer's answer. A slower trainer is away, or too busy to be the faster source."""
CONFIRM_TIMEOUT_S = 1.0
"""Timeout of the reader's confirmation of an answer that it waits for. A slower reader has left."""
SPAN_TIMEOUT_S = 10.0
"""Timeout of a span. A slower peer hangs."""
_MAKING = threading.Lock()
_NCCL = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
ASKS = "asks"
"""Name of the queue at the store."""

Bytes = NDArray[np.uint8]
dist: Any = torch.distributed
"""Untyped, because much of the API used here has no type stubs."""
Store = Any


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """Request of a reader for a version."""

    group: str
    """Name of the transfer; never reused."""
    lineage: Lineage
    version: Version
    nbytes: int
    card: str
    """Identity of the reader's GPU; "" without one."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Reply of the trainer."""

    backend: Literal["gloo", "nccl", ""]
    """Backend of the group that the trainer opens; "" if it rejects the request, for the reason in ``why``."""
    why: str = ""
    span: Annotated[int, msgspec.Meta(ge=1)] = SPAN_BYTES
    """Bytes of a span. Both sides must use the same: gloo aborts the process that receives more than it expects."""


def check_torch() -> None:
    """Raise ``ConfigError`` if torch is too old."""
    if not hasattr(dist.TCPStore, "queue_push"):
        allowed = f'with torch {torch.__version__} it must be "server": direct transfers need torch 2.8'
        raise ConfigError("parameters.transport", "direct", allowed)


class Group:
    """Group of two processes, the trainer first. Blocking; raises ``RuntimeError`` if the peer does not keep up."""

    def __init__(self, answer: Answer, store: Store, name: str, *, rank: int) -> None:
        self._span = answer.span
        meeting, limit = dist.PrefixStore(name, store), timedelta(seconds=SPAN_TIMEOUT_S)
        self._root = dist.BroadcastOptions()
        self._root.rootRank = 0
        self._card: torch.device | None = None
        if answer.backend == "nccl":
            self._card = torch.device("cuda", 0)
            self._group: Any = _nccl(meeting, rank, limit)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(store))]
            options._timeout = limit
            self._group = dist.ProcessGroupGloo(meeting, rank, 2, options)

    def give(self, data: Bytes) -> None:
        """Send every byte (trainer)."""
        for _ in self._carried(data, giving=True):
            pass

    def take(self, data: Bytes) -> Iterator[int]:
        """Receive into ``data`` (reader); yield the number of received bytes after each span."""
        return self._carried(data, giving=False)

    def close(self) -> None:
        """Free the GPU memory."""
        if self._card is not None:
            self._group.shutdown()

    def _carried(self, data: Bytes, *, giving: bool) -> Iterator[int]:
        under_way: deque[tuple[int, Bytes, Any, torch.Tensor]] = deque()
        for start in range(0, len(data), self._span):
            span = data[start : start + self._span]
            under_way.append((start, span, *self._start_span(span, giving=giving)))
            if len(under_way) == MAX_SPANS_IN_FLIGHT:
                yield self._finish_span(*under_way.popleft(), giving=giving)
        while under_way:
            yield self._finish_span(*under_way.popleft(), giving=giving)

    def _start_span(self, span: Bytes, *, giving: bool) -> tuple[Any, torch.Tensor]:
        carried = torch.from_numpy(span)
        if self._card is not None:
            carried = carried.to(self._card) if giving else torch.empty_like(carried, device=self._card)
        return self._group.broadcast([carried], self._root), carried

    def _finish_span(self, start: int, span: Bytes, work: Any, carried: torch.Tensor, *, giving: bool) -> int:
        work.wait()
        if self._card is not None and not giving:
            torch.from_numpy(span).copy_(carried)
        elif self._card is not None:
            torch.cuda.current_stream().synchronize()  # the GPU memory may be reused after that
        return start + len(span)


def _nccl(meeting: Store, rank: int, limit: timedelta) -> Any:
    """Create a group over NCCL whose ``wait`` raises if the peer hangs. By default NCCL would abort this process."""
    with _MAKING:
        before = {name: os.environ.get(name) for name in _NCCL}
        os.environ.update(_NCCL)  # read once, when the group is created
        try:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            return dist.ProcessGroupNCCL(meeting, rank, 2, options)
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def connect(endpoint: str) -> Store:
    """Open a separate connection to the store at ``tcp://host:port``. Raise ``OSError`` if no process listens there."""
    host, port = split_tcp(endpoint)
    socket.create_connection(
        (host, port), timeout=ANSWER_TIMEOUT_S
    ).close()  # fail fast: the store's client would retry for its whole timeout
    limit = timedelta(seconds=ANSWER_TIMEOUT_S)
    return dist.TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)


def card() -> str:
    """Return the identity of the first visible GPU; "" without one, or without NCCL."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return ""
    return str(torch.cuda.get_device_properties(0).uuid)


def answer_key(group: str) -> str:
    """Return the store key of the answer to a request."""
    return f"{group}/answer"


def here_key(group: str) -> str:
    """Return the store key of the reader's confirmation."""
    return f"{group}/here"


def _own_address(store: Store) -> str:
    """Return the address of the interface that reaches the store's host."""
    with socket.socket(socket.AF_INET6 if ":" in store.host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((store.host, store.port))  # a UDP connect sends no packet
        return str(probe.getsockname()[0])
