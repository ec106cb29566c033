"""A trainer that prints the typed columns of its batch. ``python column_trainer.py SCHEDULER wait|commit``.

With ``wait`` it never commits, and must be killed.
"""

import json
import signal
import sys
from typing import Any

import numpy as np

from staleflow.clients.trainer.client import TrainerClient
from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.protocols.consistency.ids import Lineage, Version

WEIGHTS = {"weight": np.zeros(4, np.float32)}


def columns_of(batch: TrainBatch) -> dict[str, list[Any]]:
    """Return [token ids, experts, image] of each sample, by group."""
    groups: dict[str, list[Any]] = {}
    for row, group in enumerate(batch.group_ids.tolist()):
        at = batch.completions[row]
        experts, image = batch.token_columns["experts"][row], batch.sample_columns["image"][row]
        assert not experts[~at].any()
        sample = [batch.input_ids[row][at].tolist(), experts[at].tolist(), image.hex()]
        groups.setdefault(str(group), []).append(sample)
    return groups


def main(scheduler: str, end: str) -> None:
    with TrainerClient(scheduler) as trainer:
        if trainer.join(Lineage(0), Version(0)).version < 0:
            trainer.publish_initial(WEIGHTS)
        for batch in trainer.batches(1):
            print(json.dumps(columns_of(batch)), flush=True)
            if end == "wait":
                signal.pause()
            trainer.commit(WEIGHTS)
        trainer.finished()


if __name__ == "__main__":
    main(*sys.argv[1:])
