# pyright: basic, reportMissingImports=false
"""Build a ready engine from a model directory."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from staleflow.clients.models.lora import adapt
from staleflow.clients.models.routers import Routers
from staleflow.clients.prompts import Encode
from staleflow.clients.rollout.engines.transformers.engine import TransformersEngine
from staleflow.clients.texts import tokenizer_decoder
from staleflow.clients.tokens import check_vocabulary, encoder, open_tokenizer, stop_ids
from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.presence import check_model_dir
from staleflow.configs.schema import Config


def open_model(directory: Path, dtype: str, threads: int = 1) -> Any:
    """Load the model of a directory for inference, on the first GPU if one is available."""
    check_model_dir(directory, "model directory")
    if threads:  # else OMP_NUM_THREADS, which `staleflow run` sets to the share of this process
        torch.set_num_threads(threads)
    quiet: Any = disable_progress_bar
    quiet()  # standard error is a log file here, or the terminal of staleflow eval
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError("model directory", str(directory), f"its model cannot be read: {error}") from error
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval().requires_grad_(False)


def open_transformers(config: Config, directory: Path) -> tuple[TransformersEngine, Encode]:
    """Return the engine and the tokenizer of a run's model directory."""
    tokenizer = open_tokenizer(directory)
    encode = encoder(tokenizer, chat_template=config.prompts.chat_template, system=config.prompts.system)
    torch.set_float32_matmul_precision(config.model.matmul_precision)
    model = open_model(directory, config.model.dtype, config.rollout.threads)
    check_vocabulary(tokenizer, model)
    if config.model.lora.rank:
        adapt(model, config.model.lora, directory, seed=config.seed)
        model.requires_grad_(False)
    routers = None
    if config.trainer.router_replay:
        routers = Routers(model)
        routers.check(model, model, model.device)
    engine = TransformersEngine(
        model,
        stop_ids(model, tokenizer),
        decode=tokenizer_decoder(directory),
        slots=config.rollout.max_inflight,
        recompute=config.rollout.on_update == "recompute",
        routers=routers,
    )
    return engine, encode
