# pyright: basic, reportMissingImports=false
# mypy: disable-error-code="no-untyped-call"
"""From a model directory to a vLLM engine that is ready."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from staleflow.clients.rollout.engines.base import EngineError
from staleflow.clients.rollout.engines.vllm.package import advice, open_package, prepare
from staleflow.clients.rollout.engines.vllm.plugin import BACKEND, register
from staleflow.clients.tokens import Encode, check_vocabulary, encoder, open_tokenizer, stop_ids
from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.presence import check_model_dir
from staleflow.configs.schema import Config

STREAM_TOKENS = 16
"""Tokens of a request that come from vLLM's output loop at once, its first one aside."""
CPU_BLOCK = 32
"""Tokens of a KV block. The CPU build's own 128 make even the shortest trajectory hold 128."""


async def open_vllm(config: Config, directory: Path) -> tuple[Any, Encode]:
    """Engine and tokenizer of a run's model directory.

    ``ConfigError`` when this machine or this model cannot do it; ``EngineError`` when it failed, and may not again.
    """
    cpu = not torch.cuda.is_available()
    prepare(config.rollout.threads, cpu=cpu)
    open_package()
    tokenizer = open_tokenizer(directory)
    encode = encoder(tokenizer, chat_template=config.prompts.chat_template)
    model = skeleton(directory, config.model.dtype)
    check_vocabulary(tokenizer, model)
    context = context_of(model, config.rollout.vllm.max_model_len)
    check_devices(config.rollout.vllm.tensor_parallel, cpu=cpu)
    if cpu:
        check_heads(model, directory, head_sizes())
    register()

    from staleflow.clients.rollout.engines.vllm.engine import VllmEngine

    llm, counters = await asyncio.to_thread(start_engine, config, directory, context, cpu=cpu)
    engine = VllmEngine(
        llm, counters, model, stop_ids(model, tokenizer), context=context, on_update=config.rollout.on_update
    )
    try:
        await engine.start()
    except Exception as error:  # the engine core tells its own reason in the worker's output
        await engine.close()
        raise failure(error, checked=True) from error
    return engine, encode


def skeleton(directory: Path, dtype: str) -> Any:
    """The model of ``transformers`` without its weights: names, shapes, dtypes and which of them are tied."""
    check_model_dir(directory, "model directory")
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        if (directory / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError("model directory", str(directory), f"its model cannot be read: {error}") from error
    return model


def context_of(model: Any, wanted: int) -> int:
    """Most tokens of prompt and completion: the model's own, or fewer when that is wanted."""
    own = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 0
    if own and wanted > own:
        raise ConfigError("rollout.vllm.max_model_len", wanted, f"the model's context is {own} tokens: at most that")
    if not own and not wanted:
        raise ConfigError("rollout.vllm.max_model_len", wanted, "the model does not say how long its context is")
    return wanted or own


def check_devices(tensor_parallel: int, *, cpu: bool) -> None:
    """One device a rank. The CPU build is one process of as many threads as ``rollout.threads`` says."""
    found = 1 if cpu else torch.cuda.device_count()
    if tensor_parallel > found:
        devices = "no GPU" if cpu else f"{found} GPU{'s' * (found > 1)}"
        raise ConfigError(
            "rollout.vllm.tensor_parallel", tensor_parallel, f"this machine has {devices}: at most {found}"
        )


def head_sizes() -> list[int]:
    """Widths of attention heads that the CPU build has kernels for. It finds out itself only at the first token."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return list(CPUAttentionBackend.get_supported_head_sizes())


def check_heads(model: Any, directory: Path, sizes: Sequence[int]) -> None:
    """``ConfigError`` for a model whose attention heads have no kernel."""
    config = model.config.get_text_config()
    found = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if found not in sizes:
        allowed = f"its attention heads have {found} numbers; vLLM on a CPU needs one of {', '.join(map(str, sizes))}"
        raise ConfigError("model directory", str(directory), allowed)


def start_engine(config: Config, directory: Path, context: int, *, cpu: bool) -> tuple[Any, Any]:
    """vLLM's asynchronous engine, its core started with the directory's own weights, and its counters."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    from staleflow.clients.rollout.engines.vllm.counters import Counters

    counters, checked = Counters(), False
    try:
        args = AsyncEngineArgs(**arguments(config, directory, context, cpu=cpu))
        found = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
        checked = True
        llm = AsyncLLM.from_vllm_config(found, stat_loggers=[counters.of], disable_log_stats=args.disable_log_stats)
    except Exception as error:  # vLLM raises whatever its parts do; the engine core's own reason is in the log above
        raise failure(error, checked=checked) from error
    return llm, counters


def failure(error: Exception, *, checked: bool) -> ConfigError | EngineError:
    """What a worker ends with when vLLM raises: ``ConfigError`` where its checks refuse the arguments.

    What comes once they are ``checked`` may pass, whatever its type: a port in use, memory that another process has not
    given back yet. The worker is started again, and given up on if that goes on.
    """
    text = f"vLLM does not start with this model on this machine: {advice(error)}"
    if not checked and isinstance(error, (ValueError, TypeError, NotImplementedError)):
        return ConfigError("rollout.engine", "vllm", text)
    return EngineError(text)


def arguments(config: Config, directory: Path, context: int, *, cpu: bool) -> dict[str, Any]:
    """vLLM's engine arguments for a run."""
    rollout, vllm = config.rollout, config.rollout.vllm
    found: dict[str, Any] = {
        "model": str(directory),
        "skip_tokenizer_init": True,
        "dtype": config.model.dtype,
        "seed": config.seed % (1 << 32),
        "max_model_len": context,
        "max_num_seqs": rollout.max_inflight,
        "tensor_parallel_size": vllm.tensor_parallel,
        "enable_prefix_caching": vllm.prefix_caching,
        "enforce_eager": vllm.enforce_eager or cpu,  # the CPU build would compile for minutes
        "generation_config": "vllm",  # no sampling defaults of the model's directory
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
        "stream_interval": STREAM_TOKENS,
        "disable_log_stats": True,
        "weight_transfer_config": {"backend": BACKEND},
    }
    if cpu:
        found |= {
            "distributed_executor_backend": "uni",
            "block_size": CPU_BLOCK,
            "kv_cache_memory_bytes": vllm.kv_cache_mb << 20,
        }
    else:
        found["gpu_memory_utilization"] = vllm.gpu_memory_utilization
    return found
