"""MiniMax Forge: windowed FIFO, a bounded look ahead of the oldest group."""

from collections.abc import Sequence
from itertools import takewhile
from typing import ClassVar

from staleflow.sim.engine import OnUpdate
from staleflow.sim.peers.pool import Group, Pool
from staleflow.sim.peers.rule import Rule


class Forge(Rule):
    """The trainer takes finished groups in order of their start, within a window that begins at the oldest group it has
    not taken; a finished group beyond the window waits until that oldest group is taken.

    MiniMax publishes the idea (Forge, minimax.io, 13 February 2026; arXiv 2605.26494, section 6.2.4) but no code, and
    the paper was not read: the rule, its capacity and its bound are those of an open implementation that names it as
    its reference, pytorch/torchtitan: torchtitan/experiments/rl/components/work_buffer.py and pull request 3927. At
    most ``capacity`` groups are started and not trained, and the slots of a batch are free again once its weights are
    loaded. A group is then at most ``(capacity + window - 2) // batch_size`` versions old. This model takes a capacity
    of ``max_staleness`` batches and the largest window that keeps the bound, a batch and one group; at a bound of 1 or
    0, where such a buffer would make the run synchronous, one batch more and a window of one group, which is strict
    FIFO. MiniMax does not publish the treatment of running samples at new weights; here they continue with their KV
    cache.

    Bound in versions: ``max_staleness``, hard, by the size of buffer and window. Nothing is lost. The price is waiting
    for the oldest group.
    """

    on_update: ClassVar[OnUpdate] = "keep"

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        windowed = pool.max_staleness > 1
        self.capacity = (pool.max_staleness + (not windowed)) * pool.batch_size
        self.window = pool.batch_size + 1 if windowed else 1
        self._waiting: dict[Group, None] = {}
        """Groups that are not taken, in order of starting."""
        self._taken: list[Group] = []
        """Groups that wait in the trainer's queue."""
        self._filtered = 0

    def begin(self) -> None:
        pool = self.pool
        self._take()
        if not pool.loaded():
            return
        most = self.capacity + pool.version * pool.batch_size + self._filtered
        while len(pool.started) < most and pool.begin():
            self._waiting[pool.started[-1]] = None

    def batch(self) -> Sequence[Group]:
        self._take()
        size = self.pool.batch_size
        if len(self._taken) < size:
            return ()
        batch, self._taken = self._taken[:size], self._taken[size:]
        return batch

    def _take(self) -> None:
        """Take finished groups inside the window until there is none; the window moves with its oldest group."""
        while self._waiting:
            end = next(iter(self._waiting)).number + self.window
            inside = takewhile(lambda group: group.number < end, self._waiting)  # noqa: B023
            group = next((group for group in inside if group in self.pool.finished), None)
            if group is None:
                return
            del self._waiting[group]
            self._taken.append(group)

    def filtered(self, group: Group) -> None:
        del self._waiting[group]
        self._filtered += 1
