"""Consistency of ``trainer.streaming``, which trains groups before the batch is complete. Pure."""

from typing import Final

from staleflow.configs.errors import ConfigError
from staleflow.configs.rules.algorithm import ADVANTAGES, LOSSES
from staleflow.configs.schema import Config

WHOLE_BATCH: Final = {"advantage": ("reinforce_pp", "reinforce_pp_baseline"), "loss": ("m2po",)}
"""Shipped algorithms that need the whole batch before the first gradient."""


def check_streaming(config: Config) -> None:
    """Raise ``ConfigError`` for keys that contradict ``trainer.streaming`` or have no effect without it."""
    trainer = config.trainer
    if not trainer.streaming:
        if trainer.stream_groups != 1:
            allowed = "it is for trainer.streaming, which is false; leave it at 1"
            raise ConfigError("trainer.stream_groups", trainer.stream_groups, allowed)
        return
    if trainer.stream_groups > trainer.batch_size:
        allowed = f"a step has trainer.batch_size = {trainer.batch_size} groups: at most as many"
        raise ConfigError("trainer.stream_groups", trainer.stream_groups, allowed)
    if config.simulation.publish == "start":
        allowed = 'with trainer.streaming a step begins before its batch is there: "end"'
        raise ConfigError("simulation.publish", "start", allowed)
    algorithm = trainer.algorithm
    _group_alone("advantage", algorithm.advantage, ADVANTAGES)
    if algorithm.advantage == "gae" and algorithm.whiten_advantages:
        allowed = "it needs all advantages of the batch; with trainer.streaming it must be false"
        raise ConfigError("trainer.algorithm.whiten_advantages", True, allowed)
    _group_alone("loss", algorithm.loss, LOSSES)


def check_pieces(config: Config, nproc: int) -> None:
    """Check that ``nproc`` ranks can share every micro-batch of a batch."""
    trainer = config.trainer
    rest = trainer.batch_size % trainer.stream_groups
    if trainer.streaming and (trainer.stream_groups < nproc or 0 < rest < nproc):
        allowed = (
            f"each of {nproc} ranks needs a group of every micro-batch: {nproc} at least, and of trainer.batch_size = "
            f"{trainer.batch_size} none or at least {nproc} may be left over"
        )
        raise ConfigError("trainer.stream_groups", trainer.stream_groups, allowed)


def _group_alone(key: str, value: str, names: tuple[str, ...]) -> None:
    """Check that an algorithm needs no more than one group.

    A user's loss gets some whole trajectories in any case. A user's advantage gets the batch and may need all of it.
    """
    batch, named = WHOLE_BATCH[key], ", ".join(f'"{name}"' for name in names if name not in WHOLE_BATCH[key])
    if value in batch or (key == "advantage" and ":" in value):
        allowed = f"it may need the whole batch; with trainer.streaming it must be one of {named}"
        raise ConfigError(f"trainer.algorithm.{key}", value, allowed)
