"""Rules of the keys of ``[trainer]`` that save memory or time. Pure."""

from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config


def check_memory(config: Config) -> None:
    """Raise ``ConfigError`` for an option that the trainer's backend does not have."""
    trainer, own = config.trainer, ("deepspeed", "simulated")
    if trainer.optimizer == "adamw_8bit" and trainer.backend not in ("torch", "ddp"):
        allowed = f'with trainer.backend "{trainer.backend}" it must be "adamw"; torch and ddp have both'
        raise ConfigError("trainer.optimizer", trainer.optimizer, allowed)
    needed = {"none": trainer.backend, "optimizer": "torch", "parameters": "fsdp"}[trainer.offload]
    if trainer.backend != needed:
        allowed = f'it is for trainer.backend "{needed}", not for "{trainer.backend}"; leave it at "none"'
        raise ConfigError("trainer.offload", trainer.offload, allowed)
    if trainer.compile and trainer.backend in own:
        allowed = f'with trainer.backend "{trainer.backend}" it must be false; torch, ddp and fsdp have it'
        raise ConfigError("trainer.compile", True, allowed)
    if trainer.compile and trainer.gradient_checkpointing == "selective":
        allowed = 'with trainer.gradient_checkpointing "selective", which needs single operations, it must be false'
        raise ConfigError("trainer.compile", True, allowed)
    if trainer.offload_activations and trainer.backend in own:
        allowed = f'with trainer.backend "{trainer.backend}" it must be false; torch, ddp and fsdp have it'
        raise ConfigError("trainer.offload_activations", True, allowed)
