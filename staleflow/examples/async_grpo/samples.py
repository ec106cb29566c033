# pyright: basic, reportMissingImports=false
"""A batch of the run as samples of TRL, and the queue that hands them over."""

import queue
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

EPSILON = 1e-8
"""As in TRL's own rollout worker."""


class SampleQueue(queue.Queue[RolloutSample]):
    """The ``rollout_buffer`` of TRL's protocol. ``get`` fetches the next batch when the queue is empty."""

    def __init__(self, refill: Callable[[], None]) -> None:
        """``refill`` blocks until it has put samples."""
        super().__init__()
        self._refill = refill
        self.num_taken = 0

    def get(self, block: bool = True, timeout: float | None = None) -> RolloutSample:
        """Return the next sample. Waits longer than ``timeout``: errors of the run end the wait instead."""
        if self.empty():
            self._refill()
        self.num_taken += 1
        return super().get(block=False)


def samples_of(batch: Any, offset: int) -> list[RolloutSample]:
    """Return the batch's trajectories in its order. ``offset``: TRL's number of a version minus the run's."""
    advantages, spreads = advantages_of(batch.rewards, batch.group_ids)
    versions = np.where(batch.loss_mask, batch.token_versions, batch.step).min(axis=1)
    return [
        RolloutSample(
            prompt=[],  # text, which TRL shows in traces only
            completion=[],
            input_ids=batch.input_ids[row, :length],
            completion_mask=batch.loss_mask[row, :length].astype(np.int64),
            old_log_probs=batch.behavior_logprobs[row, :length],
            advantage=float(advantages[row]),
            model_version=int(versions[row]) + offset,
            group_id=int(batch.group_ids[row]),
            metrics={"reward": float(batch.rewards[row]), "reward_std": float(spreads[row])},
        )
        for row, length in enumerate(batch.attention_mask.sum(axis=1))
    ]


def advantages_of(
    rewards: NDArray[np.float32], group_ids: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return each trajectory's advantage, normalised by its group as TRL does, and its group's standard deviation."""
    values = rewards.astype(np.float64)
    advantages, spreads = np.zeros_like(values), np.zeros_like(values)
    for group in np.unique(group_ids):
        rows = group_ids == group
        spreads[rows] = values[rows].std()
        advantages[rows] = (values[rows] - values[rows].mean()) / (values[rows].std() + EPSILON)
    return advantages, spreads
