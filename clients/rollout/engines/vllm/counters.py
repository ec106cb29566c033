# pyright: basic, reportMissingImports=false
# mypy: disable-error-code="misc"
"""What vLLM's engine core says of itself after each step."""

import time
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from staleflow.clients.rollout.engines.throughput import Throughput


class Counters(StatLoggerBase):
    """Its only stat logger."""

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self.running = 0
        self.kv_used = 0.0
        self.slots = 0
        self.kv_capacity = 0
        """Tokens; known once the engine core has sized its cache."""
        self.generated_tokens = 0
        self.steps = 0
        """Those that wrote tokens."""
        self.preemptions = 0
        self.prefix_hits = 0
        """Prompt tokens that came out of the prefix cache."""
        self.stepped_at = time.monotonic()
        """When it last got on, in a step or in a load."""
        self.throughput = Throughput()
        self._config = vllm_config

    def of(self, vllm_config: Any, _: int = 0) -> "Counters":
        """Count for the engine of this configuration."""
        self._config = vllm_config
        return self

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        self.stepped_at = time.monotonic()
        if scheduler_stats is not None:
            self.running = scheduler_stats.num_running_reqs
            self.kv_used = scheduler_stats.kv_cache_usage
            self.prefix_hits += scheduler_stats.prefix_cache_stats.hits
        if iteration_stats is not None:
            self.generated_tokens += iteration_stats.num_generation_tokens
            self.steps += iteration_stats.num_generation_tokens > 0
            self.preemptions += iteration_stats.num_preempted_reqs
            self.throughput.record(self.generated_tokens)

    def log_engine_initialized(self) -> None:
        """How much it holds, known by now."""
        if self._config is not None:
            cache = self._config.cache_config
            self.slots = self._config.scheduler_config.max_num_seqs
            self.kv_capacity = (cache.num_gpu_blocks or 0) * cache.block_size
