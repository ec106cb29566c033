"""The learning-rate schedule. Pure."""

import math

from staleflow.configs.trainer import Trainer


def learning_rate(config: Trainer, number: int) -> float:
    """Return the rate of train step ``number``, from 0: linear warm-up over ``warmup_steps``, then the schedule.

    With p from 0 (warm-up done) to 1 (last step) and m = ``lr_min_share``: linear 1 - (1 - m) p, cosine
    m + (1 - m) (1 + cos(pi p)) / 2 (Loshchilov and Hutter 2017, "SGDR"); both end at m. Before all that, the rate of
    the ``critic_warmup`` steps is 0.
    """
    number -= config.critic_warmup
    if number < 0:
        return 0.0
    if number < config.warmup_steps:
        return config.lr * (number + 1) / config.warmup_steps
    least, falls = config.lr_min_share, config.steps - 1 - config.critic_warmup - config.warmup_steps
    share = min(1.0, (number - config.warmup_steps) / falls) if falls > 0 else 0.0
    match config.lr_schedule:
        case "constant":
            return config.lr
        case "linear":
            return config.lr * (1 - (1 - least) * share)
        case "cosine":
            return config.lr * (least + (1 - least) * (1 + math.cos(math.pi * share)) / 2)
