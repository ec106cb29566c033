"""Pools of rollout workers: ``[[rollout.pool]]`` gives workers settings that differ from ``[rollout]``. Pure."""

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.explain import decode
from staleflow.configs.own_settings import OWN
from staleflow.configs.presets import merge
from staleflow.configs.schema import Config

KEYS: Final = ("workers", "gpus", *OWN["rollout"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Rollout workers with equal settings."""

    key: str
    """Table of their settings: ``rollout``, or ``rollout.pool[0]``."""
    config: Config
    """Configuration of each of them; it has no pools."""

    @property
    def workers(self) -> int:
        """Number of workers that ``staleflow run`` starts."""
        return self.config.rollout.workers

    def named(self, error: ConfigError) -> ConfigError:
        """Return an error about a key of ``rollout`` as one about the key of this pool."""
        place = error.what.removeprefix("rollout.")
        return error if place == error.what else ConfigError(f"{self.key}.{place}", error.value, error.allowed)


def pools(config: Config) -> list[Pool]:
    """Return the pools of a run in order; without ``[[rollout.pool]]`` one, of all workers. Raises ``ConfigError``."""
    given = config.rollout.pool
    return [_pool(config, place) for place in range(len(given))] if given else [Pool(key="rollout", config=config)]


def _pool(config: Config, place: int) -> Pool:
    key, given = f"rollout.pool[{place}]", config.rollout.pool[place]
    for name, value in given.items():
        if name not in KEYS:
            raise ConfigError(f"{key}.{name}", value, f"a pool may set {', '.join(KEYS)}; workers share all other keys")
    table: dict[str, Any] = msgspec.to_builtins(config)
    rollout = table["rollout"] | {"pool": [], "workers": 1, "gpus": []}
    if "engine" in given or "engine_options" in given:
        rollout["engine_options"] = {}  # options belong to their engine
    try:
        return Pool(key=key, config=decode(table | {"rollout": merge(rollout, given)}))
    except ConfigError as error:
        raise Pool(key=key, config=config).named(error) from None


def workers(config: Config) -> list[Config]:
    """Return the configuration of each rollout worker that the run starts, in the order of their numbers."""
    return [pool.config for pool in pools(config) for _ in range(pool.workers)]


def at_most(config: Config) -> Config:
    """Return the configuration with as many rollout workers as ``rollout.elastic`` allows; further ones are of the last
    pool."""
    rollout = config.rollout
    if (more := rollout.elastic.max_workers - len(workers(config))) <= 0:
        return config
    if not rollout.pool:
        return msgspec.structs.replace(
            config, rollout=msgspec.structs.replace(rollout, workers=rollout.elastic.max_workers)
        )
    *others, last = rollout.pool
    larger = [*others, {**last, "workers": last.get("workers", 1) + more}]
    return msgspec.structs.replace(config, rollout=msgspec.structs.replace(rollout, pool=larger))


def gpus_of_engine(config: Config) -> int:
    """Return the number of GPUs of one worker."""
    rollout = config.rollout
    match rollout.engine:
        case "simulated" | "vllm_server":
            return 0
        case "vllm":
            return rollout.vllm.tensor_parallel * int(rollout.vllm.options.get("pipeline_parallel_size", 1))
        case _:
            return 1
