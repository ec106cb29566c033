# pyright: basic, reportMissingImports=false
"""What trainer and reader agree on when a version goes from one's memory into the other's, without the server.

- They meet at a store of ``torch.distributed`` in the trainer's process: the reader puts an ``Ask`` into its
  queue, the trainer an ``Answer`` under the name of the group that the ask proposes, and the reader says that it has
  it. An ask that has grown old is not answered, and no group is opened for a reader that is silent: it has left.
- Each transfer has a group of its own, of two. Whoever dies, hangs or leaves ends that group and no other, and nobody
  waits for who comes later.
- A version travels as the bytes of its file, from first to last, a span after another. gloo carries them; NCCL where
  both have a GPU and it is not the same one, through one span of memory on each.
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
"""Of which a few stay in the cache between the network, the digest and the copy: larger ones are slower."""
UNDER_WAY = 2
"""Spans handed to the group at once: one is carried while the next is made ready, or the last one looked at."""
MEET_S = 5.0
"""In which the trainer answers a reader. One that takes longer is away, or too busy to be the faster way."""
HERE_S = 1.0
"""In which a reader says that it has its answer, for which it waits. One that takes longer has left."""
STALLED_S = 10.0
"""In which a span arrives. A peer that takes longer hangs."""
_MAKING = threading.Lock()
_NCCL = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
ASKS = "asks"
"""The queue at the store."""

Bytes = NDArray[np.uint8]
dist: Any = torch.distributed
"""Half of what is needed of it has no types."""
Store = Any


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A reader wants a version now."""

    group: str
    """Names the transfer; no other ever has the same."""
    lineage: Lineage
    version: Version
    nbytes: int
    card: str
    """Identity of the reader's GPU; empty: it has none."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer says to it."""

    backend: Literal["gloo", "nccl", ""]
    """Of the group that the trainer now opens; empty: it does not, and ``why`` says what is in the way."""
    why: str = ""
    span: Annotated[int, msgspec.Meta(ge=1)] = SPAN_BYTES
    """Bytes of a span. Both must have the same: gloo ends the process of whoever gets more than it waits for."""


def check_torch() -> None:
    """``ConfigError`` for a torch that is too old."""
    if not hasattr(dist.TCPStore, "queue_push"):
        allowed = f'with torch {torch.__version__} it must be "server": readers queue at its store from 2.8 on'
        raise ConfigError("parameters.transport", "direct", allowed)


class Group:
    """Two processes, of which the trainer is the first. Blocking; ``RuntimeError`` when the other does not keep up."""

    def __init__(self, answer: Answer, store: Store, name: str, *, rank: int) -> None:
        self._span = answer.span
        meeting, limit = dist.PrefixStore(name, store), timedelta(seconds=STALLED_S)
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
        """The trainer's part: every byte."""
        for _ in self._carried(data, giving=True):
            pass

    def take(self, data: Bytes) -> Iterator[int]:
        """The reader's: fills ``data``, and says after each span how many of its bytes are there."""
        return self._carried(data, giving=False)

    def close(self) -> None:
        """Give a card's memory back."""
        if self._card is not None:
            self._group.shutdown()

    def _carried(self, data: Bytes, *, giving: bool) -> Iterator[int]:
        under_way: deque[tuple[int, Bytes, Any, torch.Tensor]] = deque()
        for start in range(0, len(data), self._span):
            span = data[start : start + self._span]
            under_way.append((start, span, *self._begun(span, giving=giving)))
            if len(under_way) == UNDER_WAY:
                yield self._ended(*under_way.popleft(), giving=giving)
        while under_way:
            yield self._ended(*under_way.popleft(), giving=giving)

    def _begun(self, span: Bytes, *, giving: bool) -> tuple[Any, torch.Tensor]:
        carried = torch.from_numpy(span)
        if self._card is not None:
            carried = carried.to(self._card) if giving else torch.empty_like(carried, device=self._card)
        return self._group.broadcast([carried], self._root), carried

    def _ended(self, start: int, span: Bytes, work: Any, carried: torch.Tensor, *, giving: bool) -> int:
        work.wait()
        if self._card is not None and not giving:
            torch.from_numpy(span).copy_(carried)
        elif self._card is not None:
            torch.cuda.current_stream().synchronize()  # the card's memory may be used again
        return start + len(span)


def _nccl(meeting: Store, rank: int, limit: timedelta) -> Any:
    """A group over NCCL whose ``wait`` raises when the other hangs. Left to itself it would end this process."""
    with _MAKING:
        before = {name: os.environ.get(name) for name in _NCCL}
        os.environ.update(_NCCL)  # read once, by the group that is made now
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
    """A connection of one's own to the store at ``tcp://host:port``. ``OSError`` when nobody is there."""
    host, port = split_tcp(endpoint)
    socket.create_connection((host, port), timeout=MEET_S).close()  # the store's client would try again and again
    limit = timedelta(seconds=MEET_S)
    return dist.TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)


def card() -> str:
    """Identity of this process's GPU, the first that it sees; empty without one, or without NCCL."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return ""
    return str(torch.cuda.get_device_properties(0).uuid)


def answer_key(group: str) -> str:
    """Where the answer to an ask is."""
    return f"{group}/answer"


def here_key(group: str) -> str:
    """Where the reader says that it has the answer."""
    return f"{group}/here"


def _own_address(store: Store) -> str:
    """That of the interface by which the store's host is reached."""
    with socket.socket(socket.AF_INET6 if ":" in store.host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((store.host, store.port))  # sends nothing
        return str(probe.getsockname()[0])
