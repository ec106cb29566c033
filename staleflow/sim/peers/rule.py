"""What a peer decides: who begins when, what a batch is, what is lost, who has which weights."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from staleflow.sim.engine import OnUpdate
from staleflow.sim.peers.pool import Group, Pool


class Rule(ABC):
    """One peer. It is asked again after whatever happens, before time goes on."""

    on_update: ClassVar[OnUpdate] = "recompute"
    """What new weights mean for samples that run: by default they are read in anew, as after an abort that keeps tokens
    and a second submission of all of them."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    @abstractmethod
    def begin(self) -> None:
        """Begin every group that may begin now."""

    def batch(self) -> Sequence[Group]:
        """The batch of the next step, among the finished; empty while there is none. The trainer is free."""
        return tuple(self.pool.finished)[: self.pool.batch_size] if self.ready() else ()

    def ready(self) -> bool:
        """Whether a batch is finished."""
        return len(self.pool.finished) >= self.pool.batch_size

    def published(self) -> None:
        """``pool.version`` is out: by default every replica takes it."""
        for replica in self.pool.replicas:
            self.pool.load(replica)

    def arrived(self, group: Group) -> None:
        """A group came out of the engines and may be trained."""
        self.pool.finished[group] = None

    def filtered(self, group: Group) -> None:
        """A group came out of the engines and is gone: the filter refused it."""
        return
