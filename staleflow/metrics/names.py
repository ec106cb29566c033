"""Names of all numbers in ``metrics.jsonl``, the same there, in Prometheus, TensorBoard and W&B.

In Prometheus ``off_policy/in_queue/mean`` is ``staleflow_off_policy_in_queue_mean``.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

PREFIX: Final = "staleflow_"
EVAL: Final = "reward/eval"
"""Mean reward of the trainer's own evaluation."""
EVAL_REWARD: Final = re.compile(r"eval/[^/]+/reward")
"""Mean reward of an evaluation set."""
PLACES: Final = ("step", "lineage", "version", "t")
"""Keys of a line that place it in the run. ``t`` is unix seconds."""


@dataclass(frozen=True, slots=True)
class Metric:
    """Unit and meaning of a number."""

    unit: str
    """Empty for a plain number."""
    meaning: str


METRICS: Final[dict[str, Metric]] = {
    "reward/mean": Metric("", "mean reward of the trained trajectories"),
    "reward/std": Metric("", "standard deviation of the rewards of the trained trajectories"),
    "reward/eval": Metric("", "mean reward of the held-out prompts"),
    "reward/eval_failed": Metric("prompts", "held-out prompts that have no reward"),
    "length/mean": Metric("tokens", "mean length of the trained trajectories, sampled tokens only"),
    "length/p99": Metric("tokens", "99th percentile of the length of the trained trajectories"),
    "length/truncated": Metric(
        "share", "trained trajectories without an end of their own: cut at rollout.max_new_tokens, or by on_overdue"
    ),
    "length/eval": Metric("tokens", "mean length of the completions of the held-out prompts"),
    "length/ranker_tau": Metric("", "Kendall's tau between expected and real lengths; 1 is a perfect order"),
    "length/ranker_n": Metric("groups", "groups that length/ranker_tau is of"),
    "loss": Metric("", "loss of the step"),
    "grad_norm": Metric("", "L2 norm of the gradient before it is clipped; with several updates in a step, their mean"),
    "grad_norm/max": Metric("", "largest L2 norm of the gradients of a step, if it has several updates"),
    "lr": Metric("", "learning rate, scaled by trainer.algorithm.ess_scaled_lr if that is set"),
    "clip/low": Metric("share", "trained tokens whose ratio is clipped from below"),
    "clip/high": Metric("share", "trained tokens whose ratio is clipped from above"),
    "masked/token": Metric("share", "trained tokens that a mask of the algorithm left out"),
    "masked/sequence": Metric("share", "trajectories that lost all of their tokens to a mask of the algorithm"),
    "router/aux_loss": Metric(
        "", "loss that balances a mixture of experts, before its coefficient; 1 if all get equal shares"
    ),
    "router/replay_changed": Metric(
        "share", "replayed choices of a router, one for each token and layer, that differ from its own (router_replay)"
    ),
    "kl/reference": Metric("nats", "divergence from the reference model, a token"),
    "kl/teacher": Metric("nats", "estimated divergence from the teacher (trainer.algorithm.teacher), a trained token"),
    "entropy": Metric(
        "nats",
        "entropy of the policy that wrote, a trained token; estimated by the tokens' own log-probabilities. With"
        " trainer.algorithm.entropy_coef: exact, of the trainer's model",
    ),
    "mismatch_kl": Metric("nats", "divergence between the engine that wrote and the trainer's model, a token"),
    "approx_kl": Metric(
        "nats",
        "divergence of the trained policy from the one at the start of the step, a token; mean over several updates",
    ),
    "is_weight/mean": Metric("", "mean importance weight of the trained tokens"),
    "is_weight/max": Metric("", "largest importance weight"),
    "is_weight/ess": Metric("share", "effective sample size of the importance weights"),
    "is_weight/truncated": Metric("share", "tokens whose importance weight was cut to its cap"),
    "off_policy/mean": Metric("versions", "mean age of what the step trained"),
    "off_policy/max": Metric("versions", "largest age of what the step trained"),
    "off_policy/in_flight/mean": Metric("versions", "mean age of the groups that are being generated"),
    "off_policy/in_flight/max": Metric("versions", "largest age of the groups that are being generated"),
    "off_policy/in_queue/mean": Metric("versions", "mean age of the groups that wait to be trained"),
    "off_policy/in_queue/max": Metric("versions", "largest age of the groups that wait to be trained"),
    "staleness/violations": Metric(
        "groups", "groups delivered beyond the bound since the run began; anything but 0 is a bug"
    ),
    "staleness/masked_token_ratio": Metric("share", "tokens of the step that were too old to train"),
    "staleness/dropped": Metric("groups", "groups that were ready to train and were dropped, since the run began"),
    "staleness/length_bias": Metric("", "mean length trained over mean length sampled; 1 is no bias"),
    "rollout/instances": Metric("instances", "engines that are attached"),
    "rollout/running": Metric("samples", "samples that the engines decode"),
    "rollout/waiting": Metric("samples", "samples that wait at the engines"),
    "rollout/idle_ratio": Metric("share", "time of the engines in which they decoded nothing"),
    "perf/tokens_per_second": Metric("tokens/s", "tokens of the trained trajectories a second"),
    "perf/samples_per_second": Metric("samples/s", "trained trajectories a second"),
    "perf/mfu": Metric("share", "floating point operations of the trainer over what its devices can do"),
    "time/step": Metric("s", "one step of the trainer: training and all stalls"),
    "time/wait_for_batch": Metric("s", "time in which the trainer had no batch"),
    "time/train": Metric("s", "forward and backward passes and the optimizer"),
    "time/publish": Metric(
        "s",
        "time that training waited for a version: for its copy, for the previous version, or until it was durable",
    ),
    "time/publish_total": Metric("s", "time from the start of publishing the step's version until it was durable"),
    "time/pull": Metric("s", "mean time from the order to load a version until an engine had it"),
    "time/pause": Metric("s", "mean time for which an engine stopped decoding to load a version"),
    "time/reserve": Metric("s", "mean time for which a group was reserved: from its lease until it was pushed"),
    "time/checkpoint": Metric("s", "waiting for a checkpoint: for its copy, or until it is written"),
    "time/eval": Metric("s", "evaluating on the held-out prompts"),
    "trainer/idle_ratio": Metric(
        "share",
        "time of the step in which the trainer did not train: no batch, publishing, a checkpoint, its own evaluation",
    ),
    "elastic/starved": Metric("share", "time in which the trainer waited for groups that were being generated"),
    "elastic/blocked": Metric("share", "time in which the trainer waited for stages, prompts or loads of weights"),
    "elastic/pinned": Metric("share", "time in which the trainer had enough groups and waited for older ones"),
    "elastic/engines": Metric("engines", "engines that the scheduler recommends to add; negative: to remove"),
    "elastic/expected_steps_per_min": Metric("steps/min", "predicted rate if the recommendation is followed"),
    "trainer/tokens": Metric("tokens", "tokens that the step trained"),
    "trainer/updates": Metric("updates", "optimizer updates that the step took, if it has several"),
    "trainer/sampled_tokens": Metric("tokens", "tokens of the step's trajectories, masked ones included"),
    "trainer/bad_steps": Metric("steps", "steps whose loss or gradient was not finite, since the run began"),
}

FAMILIES: Final[dict[str, Metric]] = {
    "reward/NAME": Metric("", "mean of the component NAME of the reward, before its weight (reward.functions)"),
    "environment/NAME": Metric("", "mean of the number NAME that episodes of the environment returned"),
    "off_policy/share/age_N": Metric(
        "share", "trained tokens that are N versions old; ages above 15, or above max_staleness, count as that"
    ),
    "mismatch_kl/age_N": Metric("nats", "mismatch_kl of the tokens of age N; age 0 shows numerics alone, no staleness"),
    "mismatch_k1/age_N": Metric(
        "nats", "mean of log engine/trainer over the tokens of age N: as mismatch_kl, with less weight on outliers"
    ),
    "is_weight/ess/age_N": Metric("share", "effective sample size of the importance weights of age N"),
    "is_weight/truncated/age_N": Metric("share", "tokens of age N whose importance weight was cut to its cap"),
    "clip/age_N": Metric("share", "tokens of age N whose ratio is clipped"),
    "stage/STAGE/COLUMN": Metric("", "mean of a column of a stage, over its samples or over their completion tokens"),
    "eval/SET/reward": Metric("", "mean reward of the samples of the evaluation set SET, at the version of the line"),
    "eval/SET/avg@N": Metric("share", "samples of SET with a reward of at least pass_reward; mean over prompts"),
    "eval/SET/pass@K": Metric("share", "prompts of SET of which one of K samples passes, unbiased estimate"),
    "eval/SET/length": Metric("tokens", "mean length of the samples of SET, sampled tokens only"),
    "eval/SET/truncated": Metric("share", "samples of SET that reached the maximum length"),
    "eval/SET/failed": Metric("samples", "samples of SET that have no reward; absent if there are none"),
    "eval/SET/time": Metric("s", "time from the first worker's order until the last score"),
    "eval/SET/NUMBER": Metric("", "mean over SET of reward/NAME, environment/NAME or stage/STAGE/COLUMN"),
}
"""Metrics whose names come from the configuration or from user code."""


def held_out(names: Iterable[str]) -> list[str]:
    """Return the metrics among ``names`` that are mean rewards of held-out prompts, the trainer's own first."""
    sets = [name for name in dict.fromkeys(names) if EVAL_REWARD.fullmatch(name)]
    return [EVAL, *sorted(sets)]


def prometheus(name: str) -> str:
    """Return the metric's name in Prometheus."""
    return PREFIX + "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in name)
