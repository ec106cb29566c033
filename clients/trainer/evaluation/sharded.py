# pyright: basic, reportMissingImports=false
"""Evaluation of a sharded model: rank 0 evaluates, and the others take part in each of its passes.

A pass of a sharded model gathers weights from every rank, layer by layer, so all ranks must run equally many passes.
Only rank 0 knows their number, in particular with an environment, which decides when to call the policy. Rank 0
announces each pass; the others then run a pass over a single token and discard its result. Each announcement also
combines the stop requests: all ranks stop, or none. If rank 0 fails, it makes no announcement and its process ends,
which the others detect by their broken connections.
"""

from typing import Any

import torch

from staleflow.clients.rollout.engines.transformers.grouped_attention import serving
from staleflow.clients.trainer.backends.base import Stopped, Stopping
from staleflow.clients.trainer.backends.collectives import Ranks
from staleflow.clients.trainer.evaluation.held_out import Evaluation
from staleflow.protocols.consistency.ids import Version


def lead(evaluation: Evaluation, model: Any, version: Version, ranks: Ranks, stopping: Stopping) -> dict[str, float]:
    """Run ``evaluation`` on rank 0 while the others ``accompany`` it. ``Stopped`` on a stop request at any rank."""
    led = _LeadModel(model, ranks)
    try:
        values = evaluation.run(led, version, lambda: stopping() or led.asked_to_end)
    except Stopped:
        _announce(ranks, over=True, stop=True)
        raise
    if _announce(ranks, over=True, stop=False)[1]:
        raise Stopped
    return values


def accompany(model: Any, ranks: Ranks, stopping: Stopping) -> None:
    """Take part in ``lead`` on another rank."""
    with serving(model):
        token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
        while True:
            over, stop = _announce(ranks, over=False, stop=stopping())
            if over and stop:
                raise Stopped
            if over:
                return
            with torch.no_grad():
                model(input_ids=token, use_cache=False)


class _LeadModel:
    """The model as rank 0 sees it. Its passes leave inference mode, since they gather weights into tensors that
    training uses again."""

    def __init__(self, model: Any, ranks: Ranks) -> None:
        self.asked_to_end = False
        self._model = model
        self._ranks = ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            _, stop = _announce(self._ranks, over=False, stop=False)
            self.asked_to_end = self.asked_to_end or stop
            return self._model(*arguments, **more)


def _announce(ranks: Ranks, *, over: bool, stop: bool) -> tuple[bool, bool]:
    """Combine over all ranks whether no further pass follows, and whether a stop was requested."""
    any_over, any_stop = ranks.max(torch.tensor([int(over), int(stop)])).tolist()
    return bool(any_over), bool(any_stop)
