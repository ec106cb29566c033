# pyright: basic, reportMissingImports=false
# mypy: disable-error-code="misc"
"""Statistics that vLLM's engine core reports after each step."""

import time
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from staleflow.clients.rollout.engines.throughput import Throughput


class Counters(StatLoggerBase):
    """The stat logger of the engine."""

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self.running = 0
        self.kv_used = 0.0
        self.slots = 0
        self.kv_capacity = 0
        """In tokens; set once the engine core has sized its cache."""
        self.generated_tokens = 0
        self.steps = 0
        """Number of steps that generated tokens."""
        self.preemptions = 0
        self.prefix_hits = 0
        """Number of prompt tokens served from the prefix cache."""
        self.stepped_at = time.monotonic()
        """Time of the last progress, in a step or a load."""
        self.throughput = Throughput()
        self._config = vllm_config

    def of(self, vllm_config: Any, _: int = 0) -> "Counters":
        """Bind the counters to the engine of this configuration; vLLM calls it as a factory."""
        self._config = vllm_config
        return self

    def progressed(self) -> None:
        """Note that the engine works."""
        self.stepped_at = time.monotonic()

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        self.progressed()
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
        """Record the capacities, which are known once the engine is initialized."""
        if self._config is not None:
            cache = self._config.cache_config
            self.slots = self._config.scheduler_config.max_num_seqs
            self.kv_capacity = (cache.num_gpu_blocks or 0) * cache.block_size
