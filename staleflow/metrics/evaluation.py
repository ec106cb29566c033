"""Metrics of an evaluation set: mean reward, avg@n and pass@k.

``pass@k`` is the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, section 2.1): of n samples of a prompt, c
pass; the estimate of the probability that at least one of k samples passes is ``1 - C(n - c, k) / C(n, k)``, averaged
over prompts.
"""

import math
from collections.abc import Sequence
from statistics import fmean

from staleflow.protocols.wire.messages.evaluation import PromptScores

PREFIX = "eval/"


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Estimate the probability that at least one of ``k`` samples of a prompt passes, from ``passed`` of ``samples``.

    ``k`` must not exceed ``samples``. The integer quotient is exact, so no product of many factors loses digits.
    """
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def powers(samples: int) -> list[int]:
    """Return 1, 2, 4, ... below ``samples``, and ``samples``."""
    return [1 << power for power in range((samples - 1).bit_length())] + [samples]


def set_metrics(name: str, scores: Sequence[PromptScores], *, samples: int, pass_reward: float) -> dict[str, float]:
    """Return the metrics of a set, each under ``eval/NAME/``.

    Samples without a reward are in no mean; ``failed`` is their number. avg@n and pass@k are means over the prompts, of
    which a prompt with fewer than k scored samples is left out. A value without any sample is omitted rather than 0.
    """
    values: dict[str, float] = {}
    rewards = [reward for one in scores for reward in one.rewards]
    if rewards:
        values["reward"] = fmean(rewards)
        values["length"] = fmean(length for one in scores for length in one.lengths)
        values["truncated"] = sum(one.truncated for one in scores) / len(rewards)
    counts = [(len(one.rewards), sum(reward >= pass_reward for reward in one.rewards)) for one in scores]
    if shares := [passed / scored for scored, passed in counts if scored]:
        values[f"avg@{samples}"] = fmean(shares)
    for k in powers(samples):
        if estimates := [pass_at_k(scored, passed, k) for scored, passed in counts if scored >= k]:
            values[f"pass@{k}"] = fmean(estimates)
    for number in dict.fromkeys(number for one in scores for number in one.numbers):
        values[number] = fmean(value for one in scores for value in one.numbers.get(number, ()))
    if failed := sum(one.failed for one in scores):
        values["failed"] = float(failed)
    return {f"{PREFIX}{name}/{key}": value for key, value in values.items()}
