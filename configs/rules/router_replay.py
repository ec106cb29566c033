"""Rules of ``trainer.router_replay``. Pure."""

from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config
from staleflow.protocols.wire.routed_experts import NAME
from staleflow.protocols.wire.typed_columns import MAX_COLUMNS

KEY = "trainer.router_replay"
UNRECORDED = ("simulated", "vllm", "vllm_server")
"""Shipped engines that do not record experts: ``simulated`` has none. vLLM 0.32 returns them from its Model Runner V2
only, which needs Triton and thus a GPU, where staleflow has not been tested with it."""


def check_replay(config: Config) -> None:
    """Raise ``ConfigError`` for keys that contradict ``trainer.router_replay``."""
    trainer = config.trainer
    if not trainer.router_replay:
        return
    for place, column in enumerate(config.column):
        if column.name == NAME:
            raise ConfigError(f"column[{place}].name", NAME, f"{KEY} adds this column; leave [[column]] out")
    if len(config.column) >= MAX_COLUMNS:
        allowed = f"with {KEY}, which adds one, a run has at most {MAX_COLUMNS - 1} columns"
        raise ConfigError("column", len(config.column), allowed)
    if trainer.backend == "simulated" and not trainer.run:
        raise ConfigError(KEY, True, 'with trainer.backend "simulated" there is no model; set it to false')
    if trainer.compile:
        raise ConfigError("trainer.compile", True, f"with {KEY} it must be false: compiled routers replay nothing")


def check_replay_engine(config: Config) -> None:
    """Raise ``ConfigError`` for an engine that does not record the experts that it chooses."""
    engine = config.rollout.engine
    if config.trainer.router_replay and engine in UNRECORDED:
        allowed = f'with {KEY} it must be "transformers" or an engine of your own: this one records no experts'
        raise ConfigError("rollout.engine", engine, allowed)
