"""Variants of dispatch that the product does not have, as patches of the simulator.

All runs of the benchmark draw a trajectory's length from its prompt and its place in the group alone, not from its
lease, so that every variant meets the same lengths.
"""

import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Literal
from unittest.mock import patch

import numpy as np

from staleflow.clients.rollout import groups
from staleflow.protocols.coordination import cost, overbooking
from staleflow.protocols.coordination.view import Next
from staleflow.sim import world
from staleflow.sim.engine import SimEngine
from staleflow.sim.sample import Place, Sample
from staleflow.sim.workload import Workload

Order = Literal["longest", "expected", "shortest"]
"""Order of an engine's queue by the tokens left: exactly known, longest or shortest first; or by the part of the length
that the prompt determines, longest first."""


class Lengths:
    """The expected length of every sample that was drawn."""

    def __init__(self) -> None:
        self.expected: dict[Sample, float] = {}


@contextmanager
def same_lengths() -> Generator[Lengths]:
    """Draw the same lengths in every run; yield those to be expected from the prompts."""
    lengths, drawn = Lengths(), Workload.samples

    def samples(workload: Workload, group: int, draw: int) -> list[Sample]:
        result = drawn(workload, group, 0)
        lengths.expected |= dict.fromkeys(result, workload.expected(group))
        return result

    with patch.object(Workload, "samples", samples):
        yield lengths


@contextmanager
def queue_order(order: Order, lengths: Lengths) -> Generator[type[SimEngine]]:
    """Let each engine decode its waiting samples in ``order`` instead of first in, first out; yield its class."""
    keys: dict[Order, Callable[[Sample], float]] = {
        "longest": lambda sample: sample.written - sample.length,
        "expected": lambda sample: sample.written - lengths.expected[sample],
        "shortest": lambda sample: sample.length - sample.written,
    }
    key = keys[order]

    class Ordered(SimEngine):
        def _join(self) -> None:
            if self._num_waiting and len(self._running) < self.slots:
                valid = [one for one in self._waiting if one[0] == one[1].ticket and one[1].place is Place.WAITING]
                self._waiting = deque(sorted(valid, key=lambda one: key(one[1])))
            super()._join()

    with patch.object(world, "SimEngine", Ordered):
        yield Ordered


@contextmanager
def places(factor: float) -> Generator[None]:
    """Let an engine hold a fixed number of groups, whose samples are ``factor`` times its slots."""

    def held(slots: int, started: int) -> int:
        return max(2, math.ceil(factor * slots / started))

    with patch.object(groups, "groups_held", held), patch.object(overbooking, "MAX_OVERBOOKING", 1):
        yield


@contextmanager
def typical_length(quantile: float) -> Generator[None]:
    """Size the shares of ``cost_model`` by a quantile of the expected lengths instead of their mean."""

    def sized(groups: Sequence[Next]) -> float:
        lengths = [item.length for item in groups if item.length > 0]
        return float(np.quantile(lengths, quantile)) if lengths else 0.0

    with patch.object(cost, "typical_length", sized):
        yield
