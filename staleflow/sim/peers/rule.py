"""Decisions of a peer: when groups start, what a batch is, what is lost, and which replica has which weights."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from staleflow.sim.engine import OnUpdate
from staleflow.sim.peers.pool import Group, Pool


class Rule(ABC):
    """One peer. Its methods are called after every event, before time advances."""

    on_update: ClassVar[OnUpdate] = "recompute"
    """Effect of new weights on running samples: by default they are prefilled again, as after an abort that keeps
    tokens and a second submission of all of them."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    @abstractmethod
    def begin(self) -> None:
        """Start every group that may start now."""

    def batch(self) -> Sequence[Group]:
        """Return the batch of the next step, among the finished groups; empty if there is none. Called when the trainer
        is free."""
        return tuple(self.pool.finished)[: self.pool.batch_size] if self.ready() else ()

    def ready(self) -> bool:
        """Return whether a batch is finished."""
        return len(self.pool.finished) >= self.pool.batch_size

    def published(self) -> None:
        """Handle the publish of ``pool.version``: by default every replica loads it."""
        for replica in self.pool.replicas:
            self.pool.load(replica)

    def arrived(self, group: Group) -> None:
        """Handle a group that left the engines and may be trained."""
        self.pool.finished[group] = None

    def filtered(self, group: Group) -> None:
        """Handle a group that left the engines and was filtered out."""
        return
