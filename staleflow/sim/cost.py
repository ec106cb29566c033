"""Duration of an engine's steps: ``k1 * kv + max(k2, k3 * n) + k4`` seconds, and more with a mixture of experts."""

import math
from dataclasses import dataclass, replace

from staleflow.configs.costs import EngineCosts
from staleflow.configs.simulation import Simulated

_EARLY_S = 1e-9
"""A boundary that rounding puts this much before an instant is at that instant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Coefficients in seconds: per token in the KV cache, minimum of a step, per running sample, overhead, per token of
    prefill, to read all experts. ``active_share``: experts that a token chooses, of all."""

    k1: float
    k2: float
    k3: float
    k4: float
    prefill_s: float = 0.0
    experts_s: float = 0.0
    active_share: float = 0.0

    @classmethod
    def of(
        cls,
        simulated: Simulated | EngineCosts,
        *,
        prefill_s: float = 0.0,
        speed: float = 1.0,
        compute: float = 0.0,
    ) -> "StepCost":
        """Return the coefficients of the configuration, ``speed`` times as fast; ``compute``: speed of its arithmetic,
        0 if it is the same."""
        cost = cls(
            k1=simulated.k1 / speed,
            k2=simulated.k2 / speed,
            k3=simulated.k3 / (compute or speed),
            k4=simulated.k4 / speed,
            prefill_s=prefill_s / (compute or speed),
        )
        if isinstance(simulated, EngineCosts) and simulated.experts:
            share = simulated.active / simulated.experts
            return replace(cost, experts_s=simulated.experts_s / speed, active_share=share)
        return cost

    def _constant_s(self, running: int) -> float:
        """Return the seconds of a step without its time for the KV cache."""
        read_s = self.k2
        if self.experts_s:  # samples that choose experts evenly choose this share of them
            read_s += self.experts_s * (1.0 - (1.0 - self.active_share) ** running)
        return max(read_s, self.k3 * running) + self.k4

    def steps_s(self, steps: int, running: int, kv: int) -> float:
        """Return the seconds of ``steps`` steps of ``running`` samples that start with ``kv`` tokens and add one each
        per step."""
        each = self._constant_s(running)
        return steps * each + self.k1 * (steps * kv + running * (steps * (steps - 1) // 2))

    def steps_until(self, seconds: float, running: int, kv: int) -> int:
        """Return the smallest number of such steps that last at least ``seconds``."""
        seconds -= _EARLY_S
        if seconds <= 0:
            return 0
        grows = self.k1 * running / 2
        first = self._constant_s(running) + self.k1 * kv
        linear = first - grows
        root = 2 * seconds / (linear + math.sqrt(linear * linear + 4 * grows * seconds))
        steps = max(math.ceil(root), 1)
        while self.steps_s(steps, running, kv) < seconds:
            steps += 1
        while self.steps_s(steps - 1, running, kv) >= seconds:
            steps -= 1
        return steps

    def tokens_per_s(self, running: int, kv: int) -> float:
        """Return the decode rate ``T(n, kv)``."""
        return running / self.steps_s(1, running, kv)
