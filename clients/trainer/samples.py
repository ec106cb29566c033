"""Samples of the model's output for people to read: ``samples.jsonl`` in the run directory, two lines per step.

They are the best and the worst trajectory of the step's first group, as text with special tokens, so that a missing
end or a doubled beginning is visible. The run does not depend on them.
"""

import logging
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.texts import Decode
from staleflow.clients.trainer.data.batch import NO_VERSION, TrainBatch
from staleflow.process.sanitize import json_line

log = logging.getLogger(__name__)

FILE = "samples.jsonl"


class Samples:
    """Appends to one file; a disk error loses lines but never ends the run."""

    def __init__(self, path: Path, decode: Decode) -> None:
        self._path = path
        self._decode = decode

    def write(self, batch: TrainBatch) -> None:
        """Write two lines for a trained batch, or one if its first group has a single trajectory."""
        lines = [json_line(line) + "\n" for line in self._lines(batch)]
        try:
            with self._path.open("a") as file:
                file.write("".join(lines))
        except OSError as error:
            log.warning("samples of step %d not written: %s", batch.step, error)

    def _lines(self, batch: TrainBatch) -> list[dict[str, Any]]:
        rows = extremes(batch)
        ids = [part for row in rows for part in _parts(batch, row)]
        texts = self._decode(ids)
        return [
            {
                "step": int(batch.step),
                "lineage": int(batch.lineage),
                "group": int(batch.group_ids[row]),
                "version": oldest(batch, row),
                "reward": float(batch.rewards[row]),
                "tokens": int(batch.sampled_lengths[row]),
                "prompt": texts[2 * place],
                "completion": texts[2 * place + 1],
            }
            for place, row in enumerate(rows)
        ]


def extremes(batch: TrainBatch) -> list[int]:
    """Return the first group's rows of highest and lowest reward; of equal ones the first and the last."""
    (rows,) = np.nonzero(batch.group_ids == batch.group_ids[0])
    rewards = batch.rewards[rows]
    best, worst = int(rows[rewards.argmax()]), int(rows[::-1][rewards[::-1].argmin()])
    return [best] if best == worst else [best, worst]


def oldest(batch: TrainBatch, row: int) -> int:
    """Return the oldest version that generated a token of the trajectory; -1 if none was sampled."""
    versions = batch.token_versions[row]
    written = versions[versions != NO_VERSION]
    return int(written.min()) if written.size else NO_VERSION


def _parts(batch: TrainBatch, row: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the token ids of the prompt and of everything after it."""
    end = int(batch.sequence_lengths[row])
    start = end - int(batch.completion_lengths[row])
    ids = batch.input_ids[row].astype(np.int32)
    return ids[:start], ids[start:end]
