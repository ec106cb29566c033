"""A curriculum: sums with larger numbers follow once the smaller ones are mostly right::

staleflow run configs/smoke.toml --run-dir runs/curriculum prompts.source= prompts.submitted=true
python -m staleflow.examples.curriculum runs/curriculum      # in another terminal
"""

import random
import sys
from collections import deque

import staleflow

LIMITS = (5, 10, 20)


def sums(limit: int, count: int) -> list[dict[str, str]]:
    """Return rows of random sums of two numbers below ``limit``."""
    pairs = [(random.randrange(limit), random.randrange(limit)) for _ in range(count)]
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]


def main(run: str) -> None:
    level, newest = 0, 0
    pending = set[int]()
    rewards = deque[float](maxlen=32)
    with staleflow.PromptClient(run) as client:
        while not client.ended:
            if len(pending) < 16:  # few rows ahead, so that a new level is trained soon
                pending.update(client.submit(sums(LIMITS[level], 16)))
            for outcome in client.outcomes(newest):  # waits for at least one; none once the run is over
                newest = outcome.number
                pending.discard(outcome.row)
                rewards.append(outcome.reward or 0.0)
            if len(rewards) == rewards.maxlen and sum(rewards) / len(rewards) > 0.8 and level + 1 < len(LIMITS):
                level += 1
                rewards.clear()
                print(f"outcome {newest}: now sums below {LIMITS[level]} + {LIMITS[level]}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
