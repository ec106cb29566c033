"""Checks of each step's mismatch by age: the engine against the trainer at the start, and how far the weights drift.

staleflow knows the exact version of each token. On tokens of age 0 engine and trainer had the same weights, so their
divergence is an error of one of them or of numerics. What older tokens show beyond that is the movement of the weights.
"""

import logging
from collections import deque
from collections.abc import Mapping
from statistics import fmean
from typing import Final

from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import Step

log = logging.getLogger(__name__)

MIN_TOKENS: Final = 64
"""Fewer tokens of age 0 do not decide: their mean divergence is noise."""
NOTICEABLE: Final = 0.02
"""Divergence at age 0, in nats a token, from which the start logs a warning. bfloat16 on both sides stays below."""
MIN_ESS: Final = 0.5
"""Effective sample size of the oldest tokens below which half of the rollout work of that age is lost."""
FRESH_ESS: Final = 0.8
"""Effective sample size of tokens of age 0 below which numerics, not drift, explain that of old tokens."""
MIN_SHARE: Final = 0.05
"""Share of a step's tokens from which an age is judged."""
STEPS: Final = 5
"""Number of steps whose mean is judged; single steps vary."""


class DriftWatch:
    """Judges the metrics of each step, in order. One for each trainer process."""

    def __init__(self, config: Config) -> None:
        self._config = config
        simulated = config.rollout.engine == "simulated"  # its log-probabilities are no model's
        self._compared = self._warned = simulated
        self._fresh = 1.0
        self._oldest = deque[float](maxlen=STEPS)
        """Effective sample size of the oldest judged tokens in the last steps."""

    def observe(self, step: Step, values: Mapping[str, float]) -> None:
        """Judge one step. ``ConfigError`` if engine and trainer disagree on the first tokens of the same weights."""
        tokens = values.get("off_policy/share/age_0", 0.0) * values.get("trainer/tokens", 0.0)
        if tokens >= MIN_TOKENS:
            self._fresh = values["is_weight/ess/age_0"]
            if not self._compared:
                self._compared = True
                self._compare(step, round(tokens), values["mismatch_k1/age_0"])
        if not self._warned:
            self._judge_drift(step, values)

    def _compare(self, step: Step, tokens: int, divergence: float) -> None:
        limit = self._config.trainer.max_mismatch
        size = abs(divergence)
        causes = "compare dtype, quantization, chat template, rollout.temperature and the sampling keys of both"
        if limit and size > limit:
            raise ConfigError(
                "trainer.max_mismatch",
                limit,
                f"engine and trainer differ by {size:.2g} nats a token on {tokens} tokens of the same weights, so they "
                f"do not compute the same model: {causes}",
            )
        if size > NOTICEABLE:
            log.warning("step %d: engine and trainer differ by %.2g nats a token: %s", step, size, causes)

    def _judge_drift(self, step: Step, values: Mapping[str, float]) -> None:
        ages = range(1, self._config.staleness.max_staleness + 1)
        oldest = max((age for age in ages if values.get(f"off_policy/share/age_{age}", 0.0) >= MIN_SHARE), default=0)
        if not oldest:
            return
        self._oldest.append(values[f"is_weight/ess/age_{oldest}"])
        ess = fmean(self._oldest)
        if len(self._oldest) < STEPS or ess >= MIN_ESS or self._fresh < FRESH_ESS:
            return
        self._warned = True
        log.warning(
            "step %d: the weights move too far while data waits: tokens %d versions old keep %.2f of their effective "
            "sample size (mean of %d steps; fresh tokens %.2f). Lower trainer.lr from %g, or "
            "staleness.max_staleness from %d",
            *(step, oldest, ess, STEPS, self._fresh, self._config.trainer.lr, self._config.staleness.max_staleness),
        )
