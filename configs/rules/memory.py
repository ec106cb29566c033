"""Rules of the keys of ``[trainer]`` that save memory. Pure."""

from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config


def check_memory(config: Config) -> None:
    """Raise ``ConfigError`` for an option that the trainer's backend does not have."""
    trainer = config.trainer
    if trainer.optimizer == "adamw_8bit" and trainer.backend in ("deepspeed", "simulated"):
        allowed = f'with trainer.backend "{trainer.backend}" it must be "adamw"; torch, ddp and fsdp have both'
        raise ConfigError("trainer.optimizer", trainer.optimizer, allowed)
