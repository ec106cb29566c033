"""Consistency of ``trainer.minibatches`` and ``trainer.epochs``, the optimizer updates of one step. Pure."""

from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config


def check_updates(config: Config) -> None:
    """Raise ``ConfigError`` for several updates in a step that cannot have them."""
    trainer = config.trainer
    if trainer.minibatches > trainer.batch_size:
        allowed = f"each needs a group: at most trainer.batch_size = {trainer.batch_size}"
        raise ConfigError("trainer.minibatches", trainer.minibatches, allowed)
    for key, count in (("minibatches", trainer.minibatches), ("epochs", trainer.epochs)):
        if trainer.streaming and count > 1:
            allowed = "with trainer.streaming it must be 1: a step of several updates needs its whole batch"
            raise ConfigError(f"trainer.{key}", count, allowed)
