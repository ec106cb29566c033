"""What a reward may return: the start tries it, and the process that calls it in a run judges by the same rule."""

import numbers

LARGEST = 3.4028234e38
"""Rewards travel as float32."""


def objection(value: object) -> str:
    """What is wrong with a reward, after ``the reward is`` or ``it returned``; empty for a finite real number."""
    if not isinstance(value, numbers.Real):
        return f"{value!r:.200}; it must be a number"
    number = float(value)
    return "" if abs(number) <= LARGEST else f"{number}; it must be finite, in float32 too"
