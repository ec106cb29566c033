# pyright: basic, reportMissingImports=false
"""Log-probabilities from the output layer (``lm_head``), only where the loss needs them and in chunks.

The logits of a pass may be its largest tensor: 32,768 tokens with a vocabulary of 152,000 have 9 GiB in bfloat16, and
their gradient as much. Here, the layer takes only the hidden states that predict a completion token. If there are more
than ``trainer.logit_chunk``, the backward pass computes each chunk's logits again, and only those of one chunk exist at
a time.

The layer's ``forward`` is replaced, so that FSDP, DDP and ZeRO run their hooks around one call per pass as usual, and
their gathered weights are there. It returns log-probabilities in place of logits, which the model must not change:
models that scale or cap their logits are detected once, and use whole logits.
"""

import logging
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from staleflow.clients.models.likelihood import target_logprobs, target_logprobs_and_entropy
from staleflow.clients.out_of_memory import out_of_memory

log = logging.getLogger(__name__)

Forward: TypeAlias = Callable[..., Tensor]
"""Map ``input_ids`` and related inputs to logits [N, L, V]."""
Score: TypeAlias = Callable[..., Tensor]
"""Map ``predicting`` and ``targets``, int64 [K] each, and the inputs of a model to log-probabilities, float32 [K].

``predicting``: places in the flat inputs whose outputs predict the ``targets``. With ``entropy``, the result is [K, 2]:
log-probabilities, and the entropy of each target's distribution.
"""
_PROBE = 8
_ROUNDING = 0.05
"""Maximum difference between two sizes of a product, as a share of the values: bfloat16 has steps of 0.008."""


def from_logits(forward: Forward, temperature: float, *, entropy: bool = False) -> Score:
    """Return a score that computes the logits of all places."""

    def score(*, predicting: Tensor, targets: Tensor, **inputs: Any) -> Tensor:
        if entropy:
            logits = forward(**inputs).flatten(0, 1)[predicting]
            return target_logprobs_and_entropy(logits, targets, temperature)
        return target_logprobs(forward(**inputs).flatten(0, 1), targets, temperature, predicting)

    return score


class OutputLayer:
    """The output layer of every model that the trainer loads. ``chunk``: maximum number of logits' rows, 0 for all."""

    def __init__(self, chunk: int, temperature: float) -> None:
        self._chunk = chunk
        self._temperature = temperature
        self._whole = False
        self._wanted: tuple[Tensor, Tensor, bool] | None = None
        """Predicting places and targets of the current pass, and whether it wants the entropy, until the layer has
        taken them."""

    def apply(self, model: Any) -> None:
        """Replace the ``forward`` of a loaded model's output layer, before a backend wraps the model."""
        layer: Any = model.get_output_embeddings()
        kind: type = type(layer)
        # Other kinds, such as LoRA's, consist of modules whose weights ZeRO would gather once for each chunk.
        self._whole = self._whole or kind is not nn.Linear
        if self._whole:
            return
        logits_of = layer.forward

        def logprobs_or_logits(hidden: Tensor) -> Tensor:
            wanted, self._wanted = self._wanted, None
            if wanted is None:
                logits: Tensor = logits_of(hidden)
                return logits
            predicting, targets, entropy = wanted
            scores = self._scores(logits_of, hidden.flatten(0, -2)[predicting], targets, entropy=entropy)
            return scores.view(1, len(targets), -1).clone()  # FSDP warns of outputs that are views

        layer.forward = logprobs_or_logits

    def score(self, forward: Forward, *, entropy: bool = False) -> Score:
        """Return the score of a model; ``forward`` returns what the model returns as its logits."""
        if self._whole:
            return from_logits(forward, self._temperature, entropy=entropy)

        def score(*, predicting: Tensor, targets: Tensor, **inputs: Any) -> Tensor:
            self._wanted = (predicting, targets, entropy)
            try:
                scores = forward(**inputs)[0]
                return scores if entropy else scores[:, 0]
            finally:
                self._wanted = None

        return score

    def check(self, model: Any, forward: Forward, device: torch.device, any_rank: Callable[[bool], bool]) -> None:
        """Use whole logits from now on for a model that changes its logits after the layer. Call it on every rank."""
        self._whole = any_rank(self._whole or not self._agrees(model, forward, device))
        if self._whole:
            log.info("trainer.logit_chunk has no effect: this model's logits are not those of a linear output layer")

    def keep_whole(self) -> None:
        """Use whole logits from now on."""
        self._whole = True

    @torch.no_grad()
    def _agrees(self, model: Any, forward: Forward, device: torch.device) -> bool:
        """Compare the log-probabilities of a small pass with those of the model's own logits."""
        returned: list[Tensor] = []
        hook = model.get_output_embeddings().register_forward_hook(lambda _, __, output: returned.append(output))
        ids = (torch.arange(2 * _PROBE, device=device) % model.get_input_embeddings().num_embeddings).view(2, -1)
        inputs = {"predicting": torch.arange(1, 2 * _PROBE - 1, device=device), "targets": ids.flatten()[2:]}
        chunk, self._chunk = self._chunk, _PROBE // 2
        try:
            whole = from_logits(forward, self._temperature)(input_ids=ids, **inputs)
            found = self.score(forward)(input_ids=ids, **inputs)
        except (IndexError, RuntimeError) as error:
            if out_of_memory(error):
                raise
            return False  # the model expects logits to have a vocabulary
        finally:
            self._chunk = chunk
            hook.remove()
        unchanged = bool(returned) and torch.equal(found, returned[-1].flatten())
        limit = _ROUNDING * max(1.0, float(whole.abs().max()))
        return unchanged and float((found - whole).abs().max()) <= limit

    def _scores(
        self, logits_of: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, *, entropy: bool
    ) -> Tensor:
        scored = target_logprobs_and_entropy if entropy else target_logprobs

        def piece(hidden: Tensor, targets: Tensor) -> Tensor:
            return scored(logits_of(hidden), targets, self._temperature)

        if not 0 < self._chunk < len(targets):
            return piece(hidden, targets)
        return torch.cat(
            [
                checkpoint(piece, *states, use_reentrant=False, preserve_rng_state=False)
                for states in zip(torch.split(hidden, self._chunk), torch.split(targets, self._chunk), strict=True)
            ]
        )
