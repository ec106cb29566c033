"""Simulated trajectory lengths: a distribution, and one deterministic draw per trajectory.

A trajectory's place in the distribution is a standard normal deviate. ``prompt_share`` of its variance belongs to the
prompt, so that part is predictable; the rest belongs to the sample. Equal seeds, prompts and samples give equal length,
both in a real run of the simulated engine and in ``staleflow simulate``.
"""

import math
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist

from staleflow.configs.loading.length_trace import read_lengths
from staleflow.configs.simulation import Simulated

Quantile = Callable[[float, int], float]
"""Map (standard normal deviate, longest) to a length, before rounding and bounds."""

_NORMAL = NormalDist()
_EDGE = 1e-12
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class SimulatedLengths:
    """SimulatedLengths in tokens. Raise ``ConfigError`` if the length trace cannot be read."""

    def __init__(self, simulated: Simulated, seed: int) -> None:
        self._seed = seed
        self._of_prompt = math.sqrt(simulated.prompt_share)
        self._of_sample = math.sqrt(1.0 - simulated.prompt_share)
        self._quantile = quantile(simulated)

    def tokens(self, prompt: int, sample: int, longest: int) -> int:
        """Return the length of one trajectory of a prompt, 1 to ``longest``."""
        deviate = self._of_prompt * self.deviate(prompt) + self._of_sample * normal(self._seed, sample, 1)
        return min(max(round(self._quantile(deviate, longest)), 1), longest)

    def expected(self, prompt: int, longest: int) -> float:
        """Return the median length of a prompt's trajectories, which is the predictable part of their length."""
        return min(max(self._quantile(self._of_prompt * self.deviate(prompt), longest), 1.0), float(longest))

    def deviate(self, prompt: int) -> float:
        """Return the prompt's own deviate, the only predictable part of its trajectories' lengths."""
        return normal(self._seed, prompt)


def mixed(*numbers: int) -> int:
    """Return 64 pseudorandom bits from ``numbers``: splitmix64 (Steele et al. 2014), applied number by number."""
    bits = 0
    for number in numbers:
        bits = (bits ^ (number & _MASK)) + _GOLDEN & _MASK
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & _MASK
        bits ^= bits >> 31
    return bits


def share(*numbers: int) -> float:
    """Return a pseudorandom number in (0, 1) from ``numbers``, as ``mixed`` does."""
    return ((mixed(*numbers) >> 12) + 0.5) * 2.0**-52


def normal(*numbers: int) -> float:
    """Return a pseudorandom standard normal deviate from ``numbers``, as ``mixed`` does."""
    return _NORMAL.inv_cdf(share(*numbers))


def quantile(simulated: Simulated) -> Quantile:
    """Return the configured distribution."""
    match simulated.lengths:
        case "lognormal":
            lognormal = _lognormal(simulated.mean_tokens, simulated.sigma)
            return lambda deviate, _: lognormal(deviate)
        case "power_law":
            least, power = simulated.min_tokens, -1.0 / simulated.tail
            return lambda deviate, _: least * max(_NORMAL.cdf(-deviate), _EDGE) ** power
        case "bimodal":
            return _bimodal(simulated)
        case "uniform":
            return _uniform(simulated)
        case "trace":
            return _empirical(read_lengths(Path(simulated.trace), simulated.trace_column))


def _lognormal(mean: float, sigma: float) -> Callable[[float], float]:
    mu = math.log(mean) - sigma**2 / 2
    return lambda deviate: math.exp(mu + sigma * deviate)


def _bimodal(simulated: Simulated) -> Quantile:
    """Use the short mode for the lower part of the distribution and the long mode for the rest.

    A prompt therefore stays in one mode for most of its samples.
    """
    short = _lognormal(simulated.mean_tokens, simulated.sigma)
    long = _lognormal(simulated.long_tokens, simulated.sigma)
    border = 1.0 - simulated.long_share

    def at(deviate: float, _: int) -> float:
        place = _NORMAL.cdf(deviate)
        mode, begin, end = (short, 0.0, border) if place < border else (long, border, 1.0)
        inside = (place - begin) / (end - begin) if end > begin else 0.5
        return mode(_NORMAL.inv_cdf(min(max(inside, _EDGE), 1.0 - _EDGE)))

    return at


def _uniform(simulated: Simulated) -> Quantile:
    least, most = simulated.min_tokens, simulated.max_tokens

    def at(deviate: float, longest: int) -> float:
        # each integer from least to most gets an equal part of the probability
        return math.ceil(least - 1 + ((most or longest) - least + 1) * max(_NORMAL.cdf(deviate), _EDGE))

    return at


def _empirical(lengths: list[int]) -> Quantile:
    ordered = sorted(lengths)
    last = len(ordered) - 1
    return lambda deviate, _: ordered[min(int(_NORMAL.cdf(deviate) * len(ordered)), last)]
