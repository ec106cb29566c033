"""Which stages a run has, in order, and how long each may take for a group. Pure."""

from staleflow.configs.schema import Config
from staleflow.protocols.wire.stages import CRITIC, REFERENCE, REWARD


def stages(config: Config) -> tuple[str, ...]:
    """The reward is always the first; the others are there when the algorithm needs what they make."""
    algorithm = config.trainer.algorithm
    found = [REWARD]
    if algorithm.kl_coef > 0:
        found.append(REFERENCE)
    if algorithm.advantage == "gae":
        found.append(CRITIC)
    return tuple(found)


def seconds_a_group(config: Config) -> dict[str, float]:
    """By stage: the most seconds that a worker needs for one group when nothing is wrong with it.

    A model is shared by the worker's calls to all trajectory servers, which wait for each other.
    """
    reward, shards = config.reward, config.trajectories.shards
    return {
        REWARD: reward.timeout_s * (reward.retries + 1) * config.rollout.group_size,
        REFERENCE: config.reference.timeout_s * shards,
        CRITIC: config.critic.timeout_s * shards,
    }


def batch_of(config: Config, stage: str) -> int:
    """Groups that a worker of a stage takes at once."""
    return {REWARD: config.reward.batch, REFERENCE: config.reference.batch, CRITIC: config.critic.batch}[stage]
