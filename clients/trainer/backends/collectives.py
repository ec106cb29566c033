# pyright: basic, reportMissingImports=false
"""The ranks of one trainer, and what they say to each other about a step: numbers and orders, never payload.

Two groups of the same processes: the devices' own (nccl, or gloo on a CPU), which the backends put gradients and
weights through, and one over main memory for orders, flags and counts, in which a rank may wait for days.
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

PATIENCE = datetime.timedelta(days=30)
"""For orders: the next batch may be long in coming. A rank that dies breaks its connections, which nobody waits for."""
DEVICE_PATIENCE = datetime.timedelta(minutes=30)
ORDER_INTS = 4
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Ranks(Protocol):
    """This process among the trainer's. Whatever is asked of the others is asked equally often by every rank."""

    place: Place
    device: torch.device

    def sum(self, values: Tensor) -> Tensor:
        """Element by element over the ranks; every rank gets it."""
        ...

    def max(self, values: Tensor) -> Tensor:
        """As ``sum``."""
        ...

    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""
        ...

    def gather(self, values: NDArray[Any]) -> NDArray[Any]:
        """Everybody's values in the order of the ranks, as one array."""
        ...


class OneRank:
    """A trainer of one process: nobody to ask."""

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


class ManyRanks:
    """Joined to ``torch.distributed``, also where there is one rank only: some backends shard over a group of one."""

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
            timeout=DEVICE_PATIENCE,
        )
        self._orders: Any = dist.new_group(backend="gloo", timeout=PATIENCE)

    def sum(self, values: Tensor) -> Tensor:
        return self._reduced(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        return self._reduced(values, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        return bool(self.max(torch.tensor([int(flag)]))[0])

    def gather(self, values: NDArray[Any]) -> NDArray[Any]:
        """Arrays of numbers that agree in all but the first extent."""
        lengths = torch.zeros(self.place.world, dtype=torch.int64)
        lengths[self.place.rank] = len(values)
        longest = int(self.sum(lengths).max())
        padded = np.zeros((longest, *values.shape[1:]), values.dtype)
        padded[: len(values)] = values
        mine = torch.from_numpy(padded)
        everybody = [torch.empty_like(mine) for _ in range(self.place.world)]
        dist.all_gather(everybody, mine, group=self._orders)
        counts = self.sum(lengths).tolist()
        return np.concatenate([part.numpy()[:count] for part, count in zip(everybody, counts, strict=True)])

    def tell(self, order: Sequence[int], text: str = "") -> None:
        """From rank 0 to the others, who are in ``hear``."""
        raw = text.encode()
        head = torch.tensor([*order, *[0] * (ORDER_INTS - len(order)), len(raw)], dtype=torch.int64)
        dist.broadcast(head, 0, group=self._orders)
        if raw:
            dist.broadcast(torch.frombuffer(bytearray(raw), dtype=torch.uint8), 0, group=self._orders)

    def hear(self) -> tuple[list[int], str]:
        """What rank 0 tells, as soon as it does."""
        head = torch.zeros(ORDER_INTS + 1, dtype=torch.int64)
        dist.broadcast(head, 0, group=self._orders)
        *order, length = head.tolist()
        raw = torch.zeros(length, dtype=torch.uint8)
        if length:
            dist.broadcast(raw, 0, group=self._orders)
        return order, raw.numpy().tobytes().decode()

    def barrier(self) -> None:
        """Returns once every rank is here."""
        dist.barrier(group=self._orders)

    def close(self) -> None:
        """Leave the groups; every rank does."""
        dist.destroy_process_group()

    def _reduced(self, values: Tensor, how: Any) -> Tensor:
        total = values.detach().clone()
        if total.device.type == "cpu":
            dist.all_reduce(total, how, group=self._orders)
        else:
            dist.all_reduce(total, how)
        return total


def open_ranks(backend: str) -> OneRank | ManyRanks:
    """The ranks that this process was started as one of."""
    if backend == "torch":
        return OneRank(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    where = place()
    if where.master_addr in LOOPBACK:
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    os.environ.setdefault("LOCAL_RANK", str(where.local_rank))  # DeepSpeed insists on it
    return ManyRanks(where)


def _store(where: Place) -> Any:
    """Where the ranks meet: nowhere when there is one, else at rank 0."""
    if where.world == 1:
        return dist.HashStore()
    listening = int(os.environ.get(LISTEN_FD, -1))
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun itself keeps the store then
    leads = where.rank == 0 and not agent
    more = {"master_listen_fd": listening} if leads and listening >= 0 else {}
    store = dist.TCPStore(
        where.master_addr,
        where.master_port,
        where.world,
        is_master=leads,
        wait_for_workers=False,
        timeout=DEVICE_PATIENCE,
        **more,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the agent's store outlives the ranks
    return dist.PrefixStore(f"staleflow/{attempt}", store)
