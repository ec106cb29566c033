# pyright: basic, reportMissingImports=false
"""Communication between the ranks of one trainer about a step: numbers, orders and trajectories.

The same processes form two groups. The devices' group (nccl, or gloo on a CPU) transmits the gradients and weights of
the backends. The other one works in main memory for orders, flags and counts; a rank may wait in it for days.
"""

import datetime
import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as torch_distributed
from numpy.typing import NDArray
from torch import Tensor

from staleflow.configs.ranks import LISTEN_FD, Place, place

dist: Any = torch_distributed

ORDER_TIMEOUT = datetime.timedelta(days=30)
"""For orders, as the next batch may take long. A rank that dies breaks its connections, so nothing waits for it."""
DEVICE_TIMEOUT = datetime.timedelta(minutes=30)
ORDER_INTS = 4
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Ranks(Protocol):
    """This process as one of the trainer's ranks. Every rank must make the same number of calls to each method."""

    place: Place
    device: torch.device

    def sum(self, values: Tensor) -> Tensor:
        """Sum element by element over the ranks; every rank gets the result."""
        ...

    def max(self, values: Tensor) -> Tensor:
        """Return the maximum, as ``sum`` does."""
        ...

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is True on any rank."""
        ...

    def gather(self, values: NDArray[Any]) -> NDArray[Any]:
        """Concatenate the values of all ranks in rank order."""
        ...

    def exchange(self, blobs: Sequence[bytes]) -> list[bytes]:
        """Send one blob to each rank, and return the blob from each rank."""
        ...


class OneRank:
    """A trainer of one process, without communication."""

    def __init__(self, device: torch.device) -> None:
        self.place = Place()
        self.device = device

    def sum(self, values: Tensor) -> Tensor:
        return values

    def max(self, values: Tensor) -> Tensor:
        return values

    def any(self, flag: bool) -> bool:
        return flag

    def gather(self, values: NDArray[Any]) -> NDArray[Any]:
        return values

    def exchange(self, blobs: Sequence[bytes]) -> list[bytes]:
        return list(blobs)


class ManyRanks:
    """``torch.distributed``, even with a single rank: some backends need a group to shard over."""

    def __init__(self, where: Place) -> None:
        self.place = where
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", where.local_rank) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=_store(where),
            rank=where.rank,
            world_size=where.world,
            timeout=DEVICE_TIMEOUT,
        )
        self._orders: Any = dist.new_group(backend="gloo", timeout=ORDER_TIMEOUT)
        self._writers: Any = dist.new_group(backend="gloo", timeout=ORDER_TIMEOUT)
        """For the threads that write checkpoints: calls of two threads in one group could mix."""
        self.uploads = ByteChannel(where)
        """For the threads that upload a version."""

    def sum(self, values: Tensor) -> Tensor:
        return self._reduced(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        return self._reduced(values, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        return bool(self.max(torch.tensor([int(flag)]))[0])

    def gather(self, values: NDArray[Any]) -> NDArray[Any]:
        """Concatenate numeric arrays that agree in all but the first dimension."""
        lengths = torch.zeros(self.place.world, dtype=torch.int64)
        lengths[self.place.rank] = len(values)
        longest = int(self.sum(lengths).max())
        padded = np.zeros((longest, *values.shape[1:]), values.dtype)
        padded[: len(values)] = values
        mine = torch.from_numpy(padded)
        gathered = [torch.empty_like(mine) for _ in range(self.place.world)]
        dist.all_gather(gathered, mine, group=self._orders)
        counts = self.sum(lengths).tolist()
        return np.concatenate([part.numpy()[:count] for part, count in zip(gathered, counts, strict=True)])

    def exchange(self, blobs: Sequence[bytes]) -> list[bytes]:
        sizes = torch.tensor([len(blob) for blob in blobs], dtype=torch.int64)
        coming = torch.empty_like(sizes)
        dist.all_to_all_single(coming, sizes, group=self._orders)
        sent = torch.from_numpy(np.frombuffer(bytearray().join(blobs), np.uint8))
        received = torch.empty(int(coming.sum()), dtype=torch.uint8)
        dist.all_to_all_single(received, sent, coming.tolist(), sizes.tolist(), group=self._orders)
        ends = coming.cumsum(0).numpy()
        return [part.tobytes() for part in np.split(received.numpy(), ends[:-1])]

    def broadcast(self, order: Sequence[int], text: str = "") -> None:
        """Send an order from rank 0 to the others, which wait in ``receive``."""
        raw = text.encode()
        head = torch.tensor([*order, *[0] * (ORDER_INTS - len(order)), len(raw)], dtype=torch.int64)
        dist.broadcast(head, 0, group=self._orders)
        if raw:
            dist.broadcast(torch.frombuffer(bytearray(raw), dtype=torch.uint8), 0, group=self._orders)

    def receive(self) -> tuple[list[int], str]:
        """Wait for the next order from rank 0 and return it."""
        head = torch.zeros(ORDER_INTS + 1, dtype=torch.int64)
        dist.broadcast(head, 0, group=self._orders)
        *order, length = head.tolist()
        raw = torch.zeros(length, dtype=torch.uint8)
        if length:
            dist.broadcast(raw, 0, group=self._orders)
        return order, raw.numpy().tobytes().decode()

    def written(self, ok: bool) -> list[int]:
        """Return the ranks whose part of a checkpoint failed, once every rank has reported. For the writing threads."""
        mine = torch.tensor([int(ok)])
        flags = [torch.empty_like(mine) for _ in range(self.place.world)]
        dist.all_gather(flags, mine, group=self._writers)
        return [rank for rank, flag in enumerate(flags) if not int(flag)]

    def barrier(self) -> None:
        """Return once every rank has called it."""
        dist.barrier(group=self._orders)

    def close(self) -> None:
        """Destroy the groups; call it on every rank."""
        dist.destroy_process_group()

    def _reduced(self, values: Tensor, how: Any) -> Tensor:
        total = values.detach().clone()
        if total.device.type == "cpu":
            dist.all_reduce(total, how, group=self._orders)
        else:
            dist.all_reduce(total, how)
        return total


class ByteChannel:
    """Bytes between the ranks, over a process group of its own. One thread of each rank may use it."""

    def __init__(self, where: Place) -> None:
        self._place = where
        self._group: Any = dist.new_group(backend="gloo", timeout=ORDER_TIMEOUT)

    def broadcast(self, data: bytes) -> bytes:
        """Return the bytes of rank 0 on every rank; those of the others are ignored."""
        size = torch.tensor([len(data)])
        dist.broadcast(size, 0, group=self._group)
        raw = torch.zeros(int(size), dtype=torch.uint8)
        if self._place.leads:
            raw.numpy()[:] = np.frombuffer(data, np.uint8)
        if len(raw):
            dist.broadcast(raw, 0, group=self._group)
        return raw.numpy().tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, in the order of the ranks."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self._place.world)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self._group)
        mine = torch.zeros(int(max(sizes)), dtype=torch.uint8)
        mine.numpy()[: len(data)] = np.frombuffer(data, np.uint8)
        every = [torch.empty_like(mine) for _ in sizes]
        dist.all_gather(every, mine, group=self._group)
        return [one.numpy()[: int(size)].tobytes() for one, size in zip(every, sizes, strict=True)]


def open_ranks(backend: str) -> OneRank | ManyRanks:
    """Return the ranks of this process, according to how it was launched."""
    if backend == "torch":
        return OneRank(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    where = place()
    if where.master_addr in LOOPBACK:
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    os.environ.setdefault("LOCAL_RANK", str(where.local_rank))  # DeepSpeed requires it
    return ManyRanks(where)


def _store(where: Place) -> Any:
    """Return the rendezvous store: local for a single rank, otherwise on rank 0."""
    if where.world == 1:
        return dist.HashStore()
    listening = int(os.environ.get(LISTEN_FD, -1))
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # then torchrun itself hosts the store
    leads = where.rank == 0 and not agent
    more = {"master_listen_fd": listening} if leads and listening >= 0 else {}
    store = dist.TCPStore(
        where.master_addr,
        where.master_port,
        where.world,
        is_master=leads,
        wait_for_workers=False,
        timeout=DEVICE_TIMEOUT,
        **more,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the agent's store outlives the ranks
    return dist.PrefixStore(f"staleflow/{attempt}", store)
