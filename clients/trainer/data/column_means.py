"""Means of the stage columns of a batch, as metrics: components of the reward, numbers of environments, stages."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.protocols.wire.stages import ENVIRONMENT, REWARD, REWARD_COLUMN, short_name

Gather = Callable[[NDArray[Any]], NDArray[Any]]


def column_means(batch: TrainBatch, gather: Gather) -> dict[str, float]:
    """Return the mean of each column by its metric's name; of a column for each token, over the completions' tokens.

    Every rank takes part, also in columns that only the groups of another rank have: environments may return different
    numbers for different prompts.
    """
    samples = {name: column for name, column in batch.sample_stages.items() if name != short_name(REWARD_COLUMN)}
    means: dict[str, float] = {}
    for name in _on_all_ranks(samples, gather):
        known = _known(samples.get(name, np.zeros(0, np.float32)), gather)
        if known.size:
            means[metric_name(name)] = float(known.mean(dtype=np.float64))
    for name in _on_all_ranks(batch.token_stages, gather):
        column = batch.token_stages.get(name)
        own = [0.0, 0.0] if column is None else [column.sum(dtype=np.float64), batch.completion_lengths.sum()]
        total, tokens = gather(np.array([own], np.float64)).sum(axis=0).tolist()
        if tokens:
            means[metric_name(name)] = total / tokens
    return means


def metric_name(column: str) -> str:
    """Return the metric of the column ``stage/column``."""
    return column if column.startswith((f"{REWARD}/", short_name(ENVIRONMENT))) else f"stage/{column}"


def _known(column: NDArray[np.float32], gather: Gather) -> NDArray[np.float32]:
    values: NDArray[np.float32] = gather(column)
    known: NDArray[np.float32] = values[np.isfinite(values)]
    return known


def _on_all_ranks(columns: dict[str, NDArray[np.float32]], gather: Gather) -> list[str]:
    """Return the names of the columns of any rank, in an order that all ranks share."""
    text = "".join(f"{name}\n" for name in columns) or "\n"
    gathered = gather(np.frombuffer(text.encode(), np.uint8).copy())
    return sorted({name for name in gathered.tobytes().decode().split("\n") if name})
