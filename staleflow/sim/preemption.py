"""Losses of preemptible engines: drawn from the seed, so that equal runs lose the same engines at the same times."""

import math
from collections.abc import Callable
from functools import partial

from staleflow.clients.rollout.engines.simulated_lengths import share
from staleflow.configs.schema import Config
from staleflow.sim.instance import SimInstance
from staleflow.sim.timeline import Timeline

_LOSS = 4
"""Added to the seed for draws of losses, so that they are independent of the other draws."""


class Preemptions:
    """Takes engines away and replaces them."""

    def __init__(
        self,
        config: Config,
        timeline: Timeline,
        lose: Callable[[int, SimInstance], None],
        join: Callable[[int], None],
    ) -> None:
        """``lose``: called with an engine number and its life, which ends now if it has not ended by itself; ``join``:
        called with the number of the engine that starts."""
        self._of = config.simulation.preemption
        self._handover_s = config.rollout.handover_s
        self._seed = config.seed + _LOSS
        self._timeline = timeline
        self._lose = lose
        self._join = join
        self._draws = 0
        self.returning = 0
        """Number of engines that will return."""

    def started(self, number: int, instance: SimInstance) -> None:
        """Draw the end of the life of a preemptible engine that starts now."""
        if not self._of.per_min:
            return
        self._draws += 1
        after_s = -math.log(share(self._seed, number, self._draws)) * 60.0 / self._of.per_min
        announced = share(self._seed, number, self._draws, 1) <= self._of.announced
        self._timeline.after(after_s, partial(self._announce if announced else self._end, number, instance))

    def _announce(self, number: int, instance: SimInstance) -> None:
        if instance.alive:
            instance.preempt(self._handover_s)
            self._timeline.after(self._of.notice_s, partial(self._end, number, instance, announced=True))

    def _end(self, number: int, instance: SimInstance, *, announced: bool = False) -> None:
        if instance.alive or announced:
            self._lose(number, instance)
            self.returning += 1
            self._timeline.after(self._of.return_s, partial(self._return, number))

    def _return(self, number: int) -> None:
        self.returning -= 1
        self._join(number)
