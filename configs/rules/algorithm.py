"""Consistency of ``trainer.algorithm``, and settings elsewhere that depend on the algorithm.

Keys that do not apply must be left at their defaults. Import paths contain a colon, shipped names do not.
"""

from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from staleflow.configs.algorithm import Algorithm
from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config
from staleflow.configs.trainer import Trainer

ADVANTAGES: Final = ("dr_grpo", "gae", "grpo", "none", "reinforce_pp", "reinforce_pp_baseline", "rloo")
LOSSES: Final = ("aipo", "cispo", "dppo", "gmpo", "gspo", "m2po", "opsm", "ppo_clip")
PER_TOKEN: Final = ("gae", "reinforce_pp")
"""Advantages with one value for each token, whose rewards may include the divergence."""
OVER_BATCH: Final = ("reinforce_pp_baseline",)
"""Advantages with one value for each trajectory, relative to the whole batch."""

TO_OLD: Final = ("gspo", "ppo_clip")
"""Losses whose ratio may be to the old policy (``ratio_to``), with a ``correction`` for that policy's distance from the
engine."""

IN_GROUP: Final = ("dr_grpo", "grpo", "rloo")
"""Advantages relative to the group itself: if all rewards of a group are equal, they are 0."""

FilterName = Literal["none", "zero_spread"]


def filter_of(config: Config) -> FilterName:
    """Return ``rollout.filter``; if it is empty, the filter that removes only groups without an advantage.

    Relative to a batch or a critic, a group of equal rewards has an advantage, and a teacher or a user's function may
    give it one.
    """
    if config.rollout.filter:
        return config.rollout.filter
    algorithm = config.trainer.algorithm
    return "zero_spread" if algorithm.advantage in IN_GROUP and not algorithm.distill_coef else "none"


def import_paths(algorithm: Algorithm) -> dict[str, str]:
    """Return the user's own functions, by key."""
    functions = {"advantage": algorithm.advantage, "loss": algorithm.loss}
    return {f"trainer.algorithm.{key}": spec for key, spec in functions.items() if ":" in spec}


def check_algorithm(algorithm: Algorithm) -> None:
    """Raise ``ConfigError`` for the first key of ``trainer.algorithm`` that contradicts the others."""
    for key, value, names in (("advantage", algorithm.advantage, ADVANTAGES), ("loss", algorithm.loss, LOSSES)):
        if value not in names and ":" not in value:
            named = ", ".join(f'"{name}"' for name in names)
            raise ConfigError(_key(key), value, f"it must be one of {named}, or module:function or file.py:function")
    if 0 < algorithm.dual_clip <= 1:
        raise ConfigError(_key("dual_clip"), algorithm.dual_clip, "it must be above 1, or 0 to switch it off")
    if algorithm.mask_low >= algorithm.mask_high:
        allowed = f"it must be below trainer.algorithm.mask_high = {algorithm.mask_high:g}"
        raise ConfigError(_key("mask_low"), algorithm.mask_low, allowed)
    if algorithm.advantage == "none" and not algorithm.distill_coef:
        raise ConfigError(
            _key("advantage"), "none", "nothing would train; it needs trainer.algorithm.distill_coef above 0"
        )
    if not algorithm.kl_coef and algorithm.kl_in_reward:
        raise ConfigError(_key("kl_in_reward"), True, "it needs trainer.algorithm.kl_coef above 0")
    if algorithm.tis_cap_by_age and algorithm.tis_cap != _default("tis_cap"):
        raise ConfigError(
            _key("tis_cap"), algorithm.tis_cap, f"tis_cap_by_age replaces it; leave it at {_default('tis_cap')!r}"
        )
    if algorithm.loss == "gspo" and algorithm.ratio_to == "behavior":
        for key in ("gspo_low", "gspo_high"):
            if (value := getattr(algorithm, key)) == _default(key):
                allowed = 'with ratio_to "behavior" numeric noise alone exceeds it; set it, for example to 0.01'
                raise ConfigError(_key(key), value, allowed)
    for meaningful, keys, allowed in _conditions(algorithm):
        for key in () if meaningful else keys:
            if (value := getattr(algorithm, key)) != _default(key):
                raise ConfigError(_key(key), value, f"{allowed}; leave it at {_default(key)!r}")


def check_critic_warmup(trainer: Trainer) -> None:
    """Raise ``ConfigError`` if there is no critic to warm up, or if the policy would never be trained."""
    steps = trainer.critic_warmup
    if steps and trainer.algorithm.advantage != "gae":
        allowed = 'the run has no critic: trainer.algorithm.advantage is not "gae"; leave it at 0'
        raise ConfigError("trainer.critic_warmup", steps, allowed)
    if steps >= trainer.steps:
        allowed = f"the policy is trained after it: it must be below trainer.steps = {trainer.steps}"
        raise ConfigError("trainer.critic_warmup", steps, allowed)


def warnings(trainer: Trainer) -> Iterator[str]:
    """Yield a line for settings of the algorithm that work and that few runs want."""
    decay = trainer.algorithm.gae_lambda
    if trainer.algorithm.advantage == "gae" and decay < 1 and not trainer.critic_warmup:
        yield (
            f"trainer.algorithm.gae_lambda is {decay:g} and trainer.critic_warmup is 0: until the critic has learned, "
            f"a token n steps before the reward gets {decay:g}^n of it; set trainer.critic_warmup, for example to 20, "
            "or leave gae_lambda at 1"
        )


def _conditions(algorithm: Algorithm) -> Iterator[tuple[bool, tuple[str, ...], str]]:
    """Yield (whether the keys apply, the keys, when they apply)."""
    loss, to_old = algorithm.loss, algorithm.loss in TO_OLD and algorithm.ratio_to == "old"
    clips = ("clip_low", "clip_high", "dual_clip")
    yield loss in ("ppo_clip", "opsm"), clips, 'it is a bound of the losses "ppo_clip" and "opsm"'
    yield loss in TO_OLD, ("ratio_to",), 'only the losses "gspo" and "ppo_clip" have the choice'
    corrects = 'it corrects "gspo" and "ppo_clip" with ratio_to "old"; the others are corrections themselves'
    yield to_old, ("correction",), corrects
    for correction, keys in (
        ("tis", ("tis_cap_by_age",)),
        ("masked_is", ("mask_low", "mask_high")),
        ("masked_is_sequence", ("sequence_cap",)),
        ("masked_is_geometric", ("geometric_low", "geometric_high")),
    ):
        yield to_old and algorithm.correction == correction, keys, f'it is a bound of the correction "{correction}"'
    capped = to_old and algorithm.correction in ("tis", "masked_is_geometric")
    yield capped, ("tis_cap",), 'it is a bound of the corrections "tis" and "masked_is_geometric"'
    for name, keys in (
        ("gspo", ("gspo_low", "gspo_high")),
        ("gmpo", ("gmpo_low", "gmpo_high")),
        ("dppo", ("dppo_low", "dppo_high")),
        ("cispo", ("cispo_low", "cispo_high")),
        ("aipo", ("aipo_cap",)),
        ("m2po", ("m2_threshold",)),
        ("opsm", ("opsm_delta",)),
    ):
        yield loss == name, keys, f'it is a bound of the loss "{name}"'
    yield loss == "dppo", ("dppo_divergence",), 'it is the distance of the loss "dppo"'
    yield algorithm.distill_coef > 0, ("teacher",), "it is the teacher of distill_coef, which is 0"
    yield algorithm.kl_coef > 0 and not algorithm.kl_in_reward, ("kl",), "it is the estimator of a KL term in the loss"
    yield algorithm.advantage in PER_TOKEN, ("kl_in_reward",), 'it is for the advantages "gae" and "reinforce_pp"'
    of_gae = ("gamma", "gae_lambda", "whiten_advantages")
    yield algorithm.advantage == "gae", of_gae, 'it is a key of the advantage "gae"'


def _default(key: str) -> object:
    return getattr(msgspec.convert({}, Algorithm), key)


def _key(name: str) -> str:
    return f"trainer.algorithm.{name}"
