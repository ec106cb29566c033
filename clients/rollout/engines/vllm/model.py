# pyright: basic, reportMissingImports=false
# mypy: disable-error-code="no-untyped-call"
"""Build a ready vLLM engine from a model directory."""

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from staleflow.clients.models.lora import adapt
from staleflow.clients.prompts import Encode
from staleflow.clients.rollout.engines.base import EngineError
from staleflow.clients.rollout.engines.vllm.package import advice, open_package, prepare
from staleflow.clients.rollout.engines.vllm.plugin import BACKEND, register
from staleflow.clients.texts import tokenizer_decoder
from staleflow.clients.tokens import check_vocabulary, encoder, open_tokenizer, stop_ids
from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.presence import check_model_dir
from staleflow.configs.schema import Config
from staleflow.configs.vllm_options import KEY as OPTIONS
from staleflow.configs.vllm_options import check_names
from staleflow.process.host import usable_cores

STREAM_TOKENS = 16
"""Number of tokens per output of vLLM's output loop, except the first token of a request."""
CPU_BLOCK = 32
"""Number of tokens in a KV block. The CPU build's default makes even the shortest trajectory occupy 128 tokens."""


async def open_vllm(config: Config, directory: Path) -> tuple[Any, Encode]:
    """Return the engine and the tokenizer of a run's model directory.

    Raise ``ConfigError`` if the machine or model is unsuitable, ``EngineError`` for a failure that may be transient.
    """
    cpu = not torch.cuda.is_available()
    vllm, precision = config.rollout.vllm, config.model.matmul_precision
    prepare(config.rollout.threads, cpu=cpu, ranks=vllm.tensor_parallel, matmul_precision=precision)
    open_package()
    tokenizer = open_tokenizer(directory)
    encode = encoder(tokenizer, chat_template=config.prompts.chat_template, system=config.prompts.system)
    model = skeleton(directory, config.model.dtype)
    check_vocabulary(tokenizer, model)
    context = context_of(model, config.rollout.vllm.max_model_len)
    check_devices(config.rollout.vllm.tensor_parallel, cpu=cpu)
    if cpu:
        check_heads(model, directory, head_sizes())
    register()

    from staleflow.clients.rollout.engines.vllm.engine import VllmEngine

    adapter = None
    if (lora := config.model.lora).rank:
        from staleflow.clients.rollout.engines.vllm.adapter import AdapterFolder

        await asyncio.to_thread(adapt, model, lora, directory)
        adapter = AdapterFolder(model)
    llm, counters = await asyncio.to_thread(start_engine, config, directory, context, cpu=cpu)
    engine = VllmEngine(
        llm,
        counters,
        model,
        stop_ids(model, tokenizer),
        tokenizer_decoder(directory),
        context=context,
        on_update=config.rollout.on_update,
        adapter=adapter,
    )
    try:
        await engine.start()
    except Exception as error:  # the engine core writes the reason to the worker's output
        await engine.close()
        raise failure(error, checked=True) from error
    return engine, encode


async def open_vllm_server(config: Config, directory: Path) -> tuple[Any, Encode]:
    """Return the engine of a running server and the tokenizer of the run's model directory.

    Raise ``ConfigError`` if the server cannot serve the run, ``EngineError`` if it does not answer.
    """
    prepare(config.rollout.threads, cpu=not torch.cuda.is_available())
    open_package()
    tokenizer = open_tokenizer(directory)
    model = skeleton(directory, config.model.dtype)
    check_vocabulary(tokenizer, model)

    from staleflow.clients.rollout.engines.vllm.counters import Counters
    from staleflow.clients.rollout.engines.vllm.engine import VllmEngine
    from staleflow.clients.rollout.engines.vllm.server import ServerClient

    counters, url = Counters(), config.rollout.vllm_server.url
    client = ServerClient(url, counters)
    try:
        theirs = await client.open()
        context = check_server(theirs, url, config.model.dtype)
        cache = theirs["cache_config"]
        counters.slots = theirs["scheduler_config"]["max_num_seqs"]
        counters.kv_capacity = (cache["num_gpu_blocks"] or 0) * cache["block_size"]
        engine = VllmEngine(
            client,
            counters,
            model,
            stop_ids(model, tokenizer),
            tokenizer_decoder(directory),
            context=context_of(model, context),
            on_update=config.rollout.on_update,
        )
        await engine.start()
    except BaseException:
        await client.close()
        raise
    return engine, encoder(tokenizer, chat_template=config.prompts.chat_template, system=config.prompts.system)


def check_server(theirs: Mapping[str, Any], url: str, dtype: str) -> int:
    """Return the context of a server, whose configuration is ``theirs``. Raise ``ConfigError`` for a wrong one."""
    model, transfer = theirs["model_config"], theirs["weight_transfer_config"] or {}
    for option, wanted, value in (
        ("--weight-transfer-config", f'{{"backend": "{BACKEND}"}}', f'{{"backend": "{transfer.get("backend")}"}}'),
        ("--logprobs-mode", "processed_logprobs", model["logprobs_mode"]),
        ("--dtype", dtype, model["dtype"].removeprefix("torch.")),
        ("--data-parallel-size", "1", str(theirs["parallel_config"]["data_parallel_size"])),
    ):
        if value != wanted:
            allowed = f"the server has {option} {value}; start it with {option} '{wanted}'"
            raise ConfigError("rollout.vllm_server.url", url, allowed)
    return int(model["max_model_len"])


def skeleton(directory: Path, dtype: str) -> Any:
    """Build the ``transformers`` model without weights: names, shapes, dtypes and ties."""
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
    """Return the maximum number of tokens of prompt and completion: the model's own limit, or ``wanted`` if smaller."""
    own = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 0
    if own and wanted > own:
        raise ConfigError("rollout.vllm.max_model_len", wanted, f"the model's context is {own} tokens: at most that")
    if not own and not wanted:
        raise ConfigError("rollout.vllm.max_model_len", wanted, "required, since the model's config gives no context")
    return wanted or own


def check_devices(tensor_parallel: int, *, cpu: bool) -> None:
    """Check that each rank has a GPU, or a core: the ranks of the CPU build wait for each other in a loop."""
    available = usable_cores() if cpu else torch.cuda.device_count()
    if tensor_parallel > available:
        devices = f"{available} {'core' if cpu else 'GPU'}{'s' * (available > 1)}"
        raise ConfigError(
            "rollout.vllm.tensor_parallel", tensor_parallel, f"this machine has {devices}: at most {available}"
        )


def head_sizes() -> list[int]:
    """Return the attention head sizes with CPU kernels. The CPU build itself checks them only at the first token."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return list(CPUAttentionBackend.get_supported_head_sizes())


def check_heads(model: Any, directory: Path, sizes: Sequence[int]) -> None:
    """Raise ``ConfigError`` for a model whose attention heads have no kernel."""
    config = model.config.get_text_config()
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_size not in sizes:
        allowed = (
            f"its attention heads have {head_size} numbers; vLLM on a CPU needs one of {', '.join(map(str, sizes))}"
        )
        raise ConfigError("model directory", str(directory), allowed)


def start_engine(config: Config, directory: Path, context: int, *, cpu: bool) -> tuple[Any, Any]:
    """Start vLLM's asynchronous engine with the directory's weights; return it with its counters."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    from staleflow.clients.rollout.engines.vllm.counters import Counters

    check_names(config.rollout.vllm.options, inspect.signature(AsyncEngineArgs).parameters)
    counters, checked = Counters(), False
    try:
        args = AsyncEngineArgs(**arguments(config, directory, context, cpu=cpu))
        engine_config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
        checked = True
        llm = AsyncLLM.from_vllm_config(
            engine_config, stat_loggers=[counters.of], disable_log_stats=args.disable_log_stats
        )
    except Exception as error:  # vLLM raises arbitrary exceptions; the engine core logs the reason
        raise failure(error, checked=checked, options=config.rollout.vllm.options) from error
    return llm, counters


def failure(error: Exception, *, checked: bool, options: Mapping[str, Any] | None = None) -> ConfigError | EngineError:
    """Convert an exception from vLLM: ``ConfigError`` if vLLM's checks rejected the arguments.

    Errors after the arguments are ``checked`` may be transient, whatever their type: a port in use, or memory that
    another process has not released yet. The worker is restarted, and abandoned if the failure persists.
    """
    text = f"vLLM does not start with this model on this machine: {advice(error)}"
    if not checked and isinstance(error, (ValueError, TypeError, NotImplementedError)):
        if options:
            return ConfigError(OPTIONS, options, text)
        return ConfigError("rollout.engine", "vllm", text)
    return EngineError(text)


def arguments(config: Config, directory: Path, context: int, *, cpu: bool) -> dict[str, Any]:
    """Return vLLM's engine arguments for a run. Its options may replace only defaults that suit most machines."""
    rollout, vllm = config.rollout, config.rollout.vllm
    chosen: dict[str, Any] = {
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
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from
        "stream_interval": STREAM_TOKENS,
        "disable_log_stats": True,
        "weight_transfer_config": {"backend": BACKEND},
    }
    if cpu:
        chosen |= {
            "distributed_executor_backend": "uni" if vllm.tensor_parallel == 1 else "mp",
            "block_size": CPU_BLOCK,
            "kv_cache_memory_bytes": vllm.kv_cache_mb << 20,
        }
    else:
        chosen["gpu_memory_utilization"] = vllm.gpu_memory_utilization
    if rank := config.model.lora.rank:
        from staleflow.clients.rollout.engines.vllm.adapter import engine_arguments

        chosen |= engine_arguments(rank)
    return chosen | vllm.options
