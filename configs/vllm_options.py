"""Arguments of vLLM's engine in ``[rollout.vllm.options]``.

vLLM itself defines their names, which differ between its versions; the caller supplies those of the installed one.
"""

import difflib
from collections.abc import Collection, Mapping
from typing import Any, Final

from staleflow.configs.errors import ConfigError

KEY: Final = "rollout.vllm.options"
ARGUMENTS: Final = "vllm.engine.arg_utils:AsyncEngineArgs"
"""Import path of the class whose parameters are the names."""

OWN: Final = {
    "model": "model.path or model.build",
    "dtype": "model.dtype",
    "seed": "seed",
    "max_model_len": "rollout.vllm.max_model_len",
    "max_num_seqs": "rollout.max_inflight",
    "tensor_parallel_size": "rollout.vllm.tensor_parallel",
    "enable_prefix_caching": "rollout.vllm.prefix_caching",
    "enforce_eager": "rollout.vllm.enforce_eager",
    "gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
    "kv_cache_memory_bytes": "rollout.vllm.kv_cache_mb on a CPU, rollout.vllm.gpu_memory_utilization on GPUs",
    "enable_lora": "model.lora.rank",
    "max_lora_rank": "model.lora.rank",
    "max_loras": "model.lora.rank; an engine serves one adapter",
    "data_parallel_size": "rollout.workers: each worker is one engine",
}
"""Arguments that other keys set, with those keys."""

FIXED: Final = {
    "skip_tokenizer_init": "trajectories are token ids",
    "generation_config": "sampling has no other defaults than the keys of [rollout]",
    "logprobs_mode": "log-probabilities must be those of the distribution sampled from",
    "disable_log_stats": "the scheduler needs the engine's load",
    "weight_transfer_config": "new versions arrive through it",
}
"""Arguments that have one right value, with the reason."""


def check_own(options: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for the first argument that staleflow sets itself."""
    for name, value in options.items():
        if name in OWN:
            raise ConfigError(f"{KEY}.{name}", value, f"another key sets this argument of vLLM: use {OWN[name]}")
        if name in FIXED:
            raise ConfigError(f"{KEY}.{name}", value, f"staleflow sets this argument of vLLM: {FIXED[name]}")


def check_names(options: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ``ConfigError`` for the first argument that the installed vLLM does not have."""
    for name, value in options.items():
        if name not in known:
            usable = [other for other in known if other not in OWN and other not in FIXED]
            close = difflib.get_close_matches(name.replace("-", "_"), usable, n=3)
            near = (
                f"did you mean {' or '.join(close)}?" if close else "AsyncEngineArgs in vLLM's documentation lists them"
            )
            raise ConfigError(f"{KEY}.{name}", value, f"the engine of the installed vLLM has no such argument; {near}")
