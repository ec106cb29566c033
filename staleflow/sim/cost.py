"""Duration of an engine's steps: ``k1 * kv + max(k2, k3 * n) + k4`` seconds."""

import math
from dataclasses import dataclass

from staleflow.configs.simulation import Simulated

_EARLY_S = 1e-9
"""A boundary that rounding puts this much before an instant is at that instant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Coefficients in seconds: per token in the KV cache, minimum of a step, per running sample, overhead, per token of
    prefill."""

    k1: float
    k2: float
    k3: float
    k4: float
    prefill_s: float = 0.0

    @classmethod
    def of(cls, simulated: Simulated, *, prefill_s: float = 0.0, speed: float = 1.0) -> "StepCost":
        """Return the coefficients of the configuration, ``speed`` times as fast."""
        return cls(
            k1=simulated.k1 / speed,
            k2=simulated.k2 / speed,
            k3=simulated.k3 / speed,
            k4=simulated.k4 / speed,
            prefill_s=prefill_s / speed,
        )

    def steps_s(self, steps: int, running: int, kv: int) -> float:
        """Return the seconds of ``steps`` steps of ``running`` samples that start with ``kv`` tokens and add one each
        per step."""
        each = max(self.k2, self.k3 * running) + self.k4
        return steps * each + self.k1 * (steps * kv + running * (steps * (steps - 1) // 2))

    def steps_until(self, seconds: float, running: int, kv: int) -> int:
        """Return the smallest number of such steps that last at least ``seconds``."""
        seconds -= _EARLY_S
        if seconds <= 0:
            return 0
        grows = self.k1 * running / 2
        first = max(self.k2, self.k3 * running) + self.k4 + self.k1 * kv
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
