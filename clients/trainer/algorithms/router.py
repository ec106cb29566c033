# pyright: basic, reportMissingImports=false
"""The auxiliary loss of a mixture of experts, which keeps its router from sending most tokens to a few experts.

``transformers`` computes the load-balancing loss of the Switch Transformer over the tokens of one pass. The loss of a
step is the mean over its passes, weighted by the unit of the policy loss: trained tokens, or trajectories.
"""

from typing import Any

import torch
from torch import Tensor

from staleflow.clients.trainer.algorithms.objective import Reduce
from staleflow.configs.errors import ConfigError


class RouterLoss:
    """The auxiliary loss of one model: ``inputs`` of a pass, ``add`` for each, ``values`` at the end of a step."""

    def __init__(self, coef: float, model_config: Any, device: torch.device) -> None:
        """Raise ``ConfigError`` for a coefficient above 0 and a model without a router."""
        text = model_config.get_text_config()
        routed = hasattr(text, "output_router_logits")
        if coef < 0:
            coef = float(getattr(text, "router_aux_loss_coef", 0.0)) if routed and text.output_router_logits else 0.0
        elif coef > 0 and not routed:
            raise ConfigError("trainer.router_aux_coef", coef, "this model has no router to balance; set it to -1 or 0")
        self._coef = coef
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)
        self._last: Tensor | None = None

    @property
    def inputs(self) -> dict[str, bool]:
        """Return the arguments with which the model computes the auxiliary loss."""
        return {"output_router_logits": True} if self._coef else {}

    def keep(self, output: Any) -> None:
        """Keep the auxiliary loss of a pass until ``add``."""
        self._last = output.aux_loss if self._coef else None

    def begin(self) -> None:
        """Reset the metric for a new step."""
        self._sums.zero_()

    def add(self, loss: Tensor, weight: float) -> Tensor:
        """Return the loss of the last pass plus its auxiliary loss; ``weight``: its tokens or trajectories."""
        auxiliary, self._last = self._last, None
        if auxiliary is None or not weight:
            return loss
        self._sums[0] += weight * auxiliary.detach()
        self._sums[1] += weight
        return loss + self._coef * weight * auxiliary.to(loss.device)

    def values(self, reduce: Reduce) -> dict[str, float]:
        """Return the mean auxiliary loss of the step over all ranks, without its coefficient; empty if it is off."""
        if not self._coef:
            return {}
        total, weight = reduce.sum(self._sums.clone()).tolist()
        return {"router/aux_loss": total / weight if weight else 0.0}
