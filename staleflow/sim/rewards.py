"""The reward workers of a simulated run."""

from collections.abc import Callable

from staleflow.sim.charges import Charges
from staleflow.sim.queues import Queue
from staleflow.sim.timeline import Timeline


class RewardWorkers:
    """Score groups in the order of their arrival. Without a cost for each group, any number is scored at once."""

    def __init__(self, timeline: Timeline, charges: Charges) -> None:
        self.workers = Queue(timeline, charges.config.reward.workers)
        self._timeline = timeline
        self._charges = charges

    def score(self, group: int, draw: int, done: Callable[[], object]) -> None:
        """Score a group, then call ``done``; another ``draw`` (such as its lease) gives another duration."""
        worker_s, more_s = self._charges.reward_worker_s(), self._charges.reward_s(group, draw)
        if worker_s:
            self.workers.add(worker_s, done, more_s=more_s)
        else:
            self._timeline.after(more_s, done)
