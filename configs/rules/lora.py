"""Rules of ``[model.lora]``. Pure."""

from staleflow.configs.errors import ConfigError, shown
from staleflow.configs.lora import Lora
from staleflow.configs.schema import Config

BACKENDS = ("torch", "ddp")


def check_lora(config: Config) -> None:
    """Raise ``ConfigError`` for keys without an adapter, or a trainer that cannot train one."""
    lora, trainer = config.model.lora, config.trainer
    if not lora.rank:
        for key in ("alpha", "target_modules", "path"):
            value, default = getattr(lora, key), getattr(Lora(), key)
            if value != default:
                allowed = f"it is for model.lora.rank above 0; leave it at {shown(default)}"
                raise ConfigError(f"model.lora.{key}", value, allowed)
        return
    if trainer.run:
        allowed = "with model.lora only the built-in trainer knows what to publish; leave it empty"
        raise ConfigError("trainer.run", trainer.run, allowed)
    if trainer.backend not in BACKENDS:
        allowed = f"with model.lora it must be one of {', '.join(map(shown, BACKENDS))}: others train no adapter"
        raise ConfigError("trainer.backend", trainer.backend, allowed)


def check_lora_engine(config: Config) -> None:
    """Raise ``ConfigError`` for an engine that cannot load adapters."""
    if config.model.lora.rank and config.rollout.engine == "vllm_server":
        allowed = 'a running server gets whole models only; with model.lora use "vllm" or "transformers"'
        raise ConfigError("rollout.engine", "vllm_server", allowed)
