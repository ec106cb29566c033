"""Check of a reward's return value: the probe at the start and the reward process of a run use the same rule."""

import numbers

LARGEST = 3.4028234e38
"""Largest absolute reward: rewards are stored and sent as float32."""


def objection(value: object) -> str:
    """Return the objection to a reward, to follow ``the reward is`` or ``it returned``; "" for a finite real number."""
    if not isinstance(value, numbers.Real):
        return f"{value!r:.200}; it must be a number"
    number = float(value)
    return "" if abs(number) <= LARGEST else f"{number}; it must be finite, in float32 too"
