"""What the model writes, for a person to read: ``samples.jsonl`` in the run directory, two lines a step.

They are the best and the worst trajectory of the step's first group, as text, special tokens included: a missing end or
a doubled beginning is to be seen. Nothing of the run depends on them.
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
    """Appends to one file; a disk that takes nothing costs lines, never the run."""

    def __init__(self, path: Path, decode: Decode) -> None:
        self._path = path
        self._decode = decode

    def write(self, batch: TrainBatch) -> None:
        """Two lines of a batch of trained groups, one where its first group has a single trajectory."""
        lines = [json_line(line) + "\n" for line in self._lines(batch)]
        try:
            with self._path.open("a") as file:
                file.write("".join(lines))
        except OSError as error:
            log.warning("samples of step %d are not kept: %s", batch.step, error)

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
    """Rows of the first group with the highest and the lowest reward; of equal ones the first and the last."""
    (rows,) = np.nonzero(batch.group_ids == batch.group_ids[0])
    rewards = batch.rewards[rows]
    best, worst = int(rows[rewards.argmax()]), int(rows[::-1][rewards[::-1].argmin()])
    return [best] if best == worst else [best, worst]


def oldest(batch: TrainBatch, row: int) -> int:
    """Oldest version that wrote a token of the trajectory; -1 when nobody sampled any."""
    versions = batch.token_versions[row]
    written = versions[versions != NO_VERSION]
    return int(written.min()) if written.size else NO_VERSION


def _parts(batch: TrainBatch, row: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Token ids of the prompt, and of all that is behind it."""
    end = int(batch.sequence_lengths[row])
    start = end - int(batch.completion_lengths[row])
    ids = batch.input_ids[row].astype(np.int32)
    return ids[:start], ids[start:end]
