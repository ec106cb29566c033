"""Consistency of ``[[eval]]`` sets. Pure: reads no file and imports no user code."""

import re

from staleflow.configs.errors import MISSING, ConfigError
from staleflow.configs.evals import EvalSet
from staleflow.configs.schema import Config

VLLM_TEMPERATURE = 0.01
"""vLLM raises lower temperatures above 0 to this value, and reports it only in its own log."""
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,39}")


def check_evals(config: Config) -> None:
    """Raise ``ConfigError`` for the first set that cannot be played."""
    names = [given.name for given in config.eval]
    for place, given in enumerate(config.eval):
        key = f"eval[{place}]"
        if not _NAME.fullmatch(given.name):
            allowed = "it must be at most 40 lower-case letters, digits, '.', '_' and '-', a letter or digit first"
            raise ConfigError(f"{key}.name", given.name, allowed)
        if given.name in names[:place]:
            raise ConfigError(f"{key}.name", given.name, f"eval[{names.index(given.name)}] has it already")
        _check_source(key, given)
        _check_sampling(key, given, config)


def _check_source(key: str, given: EvalSet) -> None:
    if bool(given.path) == bool(given.source):
        value = f"{given.path} and {given.source}" if given.path else MISSING
        raise ConfigError(f"{key}.path", value, f"exactly one of it and {key}.source must be set")
    if given.path and not given.path.startswith("hf://") and not given.path.endswith((".jsonl", ".parquet")):
        allowed = "it must end in .jsonl or .parquet, or be hf://ORGANIZATION/NAME"
        raise ConfigError(f"{key}.path", given.path, allowed)
    if given.options and not given.source:
        raise ConfigError(f"{key}.options", given.options, f"these are options of {key}.source, which is missing")


def _check_sampling(key: str, given: EvalSet, config: Config) -> None:
    if given.samples > 1 and given.temperature == 0:
        allowed = f"with {key}.samples = {given.samples} it must be above 0: greedy samples are all the same"
        raise ConfigError(f"{key}.temperature", given.temperature, allowed)
    if config.rollout.engine in ("vllm", "vllm_server") and 0 < given.temperature < VLLM_TEMPERATURE:
        allowed = f'with rollout.engine "{config.rollout.engine}" it must be 0 or at least {VLLM_TEMPERATURE}'
        raise ConfigError(f"{key}.temperature", given.temperature, allowed)
