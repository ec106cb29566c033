# pyright: basic, reportMissingImports=false
"""Router replay (``trainer.router_replay``): passes whose routers select the experts that the engine recorded.

The record of a completion token is that of the pass which sampled it, so it applies at the position of the token before
it (``wire.routed_experts``). Prompts but their last token, padding, the last token, and positions before tokens of an
environment have no record: there the routers choose.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from staleflow.clients.models.routers import Routers
from staleflow.clients.trainer.algorithms.objective import Reduce
from staleflow.clients.trainer.backends.output_layer import Forward
from staleflow.clients.trainer.data.batch import NO_VERSION, TrainBatch
from staleflow.protocols.wire.routed_experts import NAME

Records = tuple[NDArray[Any], NDArray[np.bool_]]
"""The experts of some positions, [..., layers, experts per token], and whether a position has a record, bool [...]."""
UNSHARED_TOKENS = 1
"""Number of tokens at the end of a prompt that the samples of a group do not share: each has a record there."""


class RouterReplay:
    """Replay in the passes of each model that the trainer loads; unless ``wanted``, every method has no effect."""

    def __init__(self, wanted: bool, device: torch.device) -> None:
        self.wanted = wanted
        self._device = device
        self._routers: Routers | None = None
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)

    def apply(self, model: Any) -> None:
        """Take over the routers of a loaded model. ``ConfigError`` if it has none."""
        self._routers = Routers(model) if self.wanted else None

    def check(self, model: Any, forward: Forward) -> None:
        """Raise ``ConfigError`` for a model whose routers do not replay. Call it on every rank."""
        if self._routers is not None:
            self._routers.check(model, forward, self._device)

    def release(self) -> None:
        """Hold no model until the next ``apply``."""
        self._routers = None

    def limits(self) -> dict[str, int]:
        """Return the limits of the model's records, as keys of ``ModelLimits``."""
        routers = self._routers
        if routers is None:
            return {}
        return {"moe_layers": routers.layers, "experts_per_token": routers.per_token, "experts": routers.experts}

    def start(self, records: Records) -> None:
        """Replay in the passes from now on, until ``stop``: ``records`` for each of a pass's tokens in order."""
        if self._routers is None:
            return
        experts, known = (torch.from_numpy(np.ascontiguousarray(part)).to(self._device) for part in records)
        self._routers.replay(experts, known)

    def stop(self) -> None:
        """Let the routers choose, after the backward passes, which gradient checkpointing computes again."""
        if self._routers is None:
            return
        self._routers.stop()
        if (counts := self._routers.take_counts()) is not None:
            self._sums += counts

    def begin(self) -> None:
        """Reset the metric for a new step."""
        self._sums.zero_()

    def values(self, reduce: Reduce) -> dict[str, float]:
        """Return the share of replayed choices that differ from the router's own, over all ranks; empty if off."""
        if self._routers is None:
            return {}
        replayed, differ = reduce.sum(self._sums.clone()).tolist()
        return {"router/replay_changed": differ / replayed if replayed else 0.0}


def padded_records(batch: TrainBatch, which: NDArray[np.int64]) -> Records:
    """Return the records of some rows, [n, longest row]: at each position, those of the token after it."""
    width = int(batch.sequence_lengths[which].max())
    column, versions = batch.token_columns[NAME][which, :width], batch.token_versions[which, :width]
    experts = np.zeros_like(column)
    experts[:, :-1] = column[:, 1:]
    known = np.zeros(versions.shape, np.bool_)
    known[:, :-1] = versions[:, 1:] != NO_VERSION
    return experts, known


def packed_records(batch: TrainBatch, which: NDArray[np.int64]) -> Records:
    """Return the records of some rows, one after another without padding."""
    experts, known = padded_records(batch, which)
    inside = np.arange(known.shape[1]) < batch.sequence_lengths[which, None]
    return experts[inside], known[inside]


def placed_records(records: Records, places: NDArray[np.int64], tokens: int) -> Records:
    """Return packed records at their ``places`` in a sequence of ``tokens`` tokens.

    A place that several rows share must have no record.
    """
    experts, known = records
    placed, found = np.zeros((tokens, *experts.shape[1:]), experts.dtype), np.zeros(tokens, np.bool_)
    placed[places[known]] = experts[known]
    found[places[known]] = True
    return placed, found


def flat(records: Records) -> Records:
    """Return padded records in the order of a pass's tokens."""
    experts, known = records
    return experts.reshape(-1, *experts.shape[2:]), known.reshape(-1)
