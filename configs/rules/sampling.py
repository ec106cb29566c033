"""Settings of ``rollout`` under which engines sample from another distribution than the trainer computes."""

from collections.abc import Iterator

from staleflow.configs.algorithm import Algorithm
from staleflow.configs.errors import shown
from staleflow.configs.rules.algorithm import TO_OLD
from staleflow.configs.schema import Config, Rollout

SHAPING = ("top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
"""Keys that change the engines' distribution and not the trainer's. The trainer divides by ``temperature`` as well."""


def warnings(config: Config) -> Iterator[str]:
    """Yield a line for each key of ``rollout`` that biases the importance weights of the run."""
    algorithm = config.trainer.algorithm
    if "simulated" in (config.trainer.backend, config.rollout.engine) or _ignores_engine(algorithm):
        return
    for key in SHAPING:
        value, default = getattr(config.rollout, key), getattr(Rollout(), key)
        if value != default:
            yield (
                f"rollout.{key} is {shown(value)}, so engines do not sample from the distribution that the trainer "
                f"computes (the softmax over all tokens): {_biased(algorithm)} is biased, at staleness 0 too; leave "
                f'it at {shown(default)}, or use trainer.algorithm.loss "ppo_clip" with ratio_to "old" and correction '
                '"none", which ignores staleness'
            )


def _ignores_engine(algorithm: Algorithm) -> bool:
    """Return whether the loss makes no use of the engines' log-probabilities."""
    corrects = algorithm.loss not in TO_OLD or algorithm.ratio_to == "behavior" or algorithm.correction != "none"
    return not corrects and not algorithm.kl_in_reward


def _biased(algorithm: Algorithm) -> str:
    """Return the first part of the loss that divides by the engines' probabilities."""
    if algorithm.loss in TO_OLD and algorithm.ratio_to == "old":
        if algorithm.correction == "none":
            return "the divergence of trainer.algorithm.kl_in_reward"
        return f"the weight of trainer.algorithm.correction {shown(algorithm.correction)}"
    return f"the ratio of trainer.algorithm.loss {shown(algorithm.loss)}"
