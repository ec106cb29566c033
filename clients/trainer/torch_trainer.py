# pyright: basic, reportMissingImports=false
"""The plain torch backend: one process, one device, any causal language model of ``transformers``.

One optimizer step a batch. The policy that the ratio refers to (old) is the one the step begins with, so its
log-probabilities are those of the forward pass that is trained, detached: one pass, no second copy of the weights. What
lies between that policy and the engine's is corrected by truncated importance weights (``algorithms.losses``).
"""

import logging
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from staleflow.clients.trainer.algorithms.advantages import grpo
from staleflow.clients.trainer.algorithms.likelihood import token_logprobs
from staleflow.clients.trainer.algorithms.losses import ppo_clip, tis_weights, token_mean
from staleflow.clients.trainer.algorithms.mismatch import importance_weights, mismatch_kl
from staleflow.clients.trainer.backend import StepResult, Stopped, Stopping, Weights
from staleflow.clients.trainer.batches import TrainBatch, micro_batches
from staleflow.clients.trainer.evaluation import Evaluation
from staleflow.clients.trainer.tensors import rows, to_arrays
from staleflow.clients.trainer.torch_files import load_model, load_state, save_model, save_state
from staleflow.clients.trainer.torch_optimizer import MasterAdamW
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import Step, Version

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sums:
    """What the micro-batches of a step add up to."""

    loss: float = 0.0
    clipped_low: int = 0
    clipped_high: int = 0
    old: list[Tensor] = field(default_factory=list[Tensor])
    behavior: list[Tensor] = field(default_factory=list[Tensor])


class TorchTrainer:
    """The model of ``directory``, its optimizer, and steps on batches. Deterministic on a CPU."""

    def __init__(self, config: Config, directory: Path, evaluation: Evaluation | None = None) -> None:
        torch.set_num_threads(config.trainer.threads)
        torch.manual_seed(config.seed)
        self._config = config
        self._directory = directory
        self._evaluation = evaluation
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.load(None)

    def load(self, directory: Path | None) -> None:
        """The state of a checkpoint, or of the initial model (None)."""
        self.model = load_model(directory or self._directory, self._config.model.dtype, self._device)
        self._optimizer = MasterAdamW(self.model, self._config.trainer)
        if directory is not None:
            self._optimizer.load(load_state(directory, self._device))

    def save(self, directory: Path) -> None:
        """Model and tokenizer as ``from_pretrained`` opens them; optimizer and random state beside them."""
        save_model(self.model, directory, tokenizer_of=self._directory)
        save_state(self._optimizer.tensors(), directory)

    def weights(self) -> Weights:
        """Views on the model's tensors (on a CPU); tied ones once."""
        return to_arrays(self.model.state_dict())

    def train(self, batch: TrainBatch, step: Step, stopping: Stopping) -> StepResult:
        """One optimizer step over all micro-batches; a loss or gradient that is not finite leaves all as it was."""
        algorithm = self._config.trainer.algorithm
        rewards = torch.from_numpy(batch.rewards)
        advantages = grpo(rewards, torch.from_numpy(batch.group_ids)).to(self._device)
        sums = _Sums()
        for which in micro_batches(batch.sequence_lengths, self._config.trainer.micro_tokens):
            if stopping():
                self._optimizer.clear()
                raise Stopped
            self._forward_backward(batch, which, advantages, sums)
        norm = self._optimizer.clip()
        old, behavior = torch.cat(sums.old), torch.cat(sums.behavior)
        weights = importance_weights(old, behavior, algorithm.tis_cap)
        tokens = max(1, batch.trained_tokens)
        values = {
            "loss": sums.loss,
            "grad_norm": norm,
            "mismatch_kl": mismatch_kl(old, behavior),
            "is_weight/mean": weights.mean,
            "is_weight/max": weights.max,
            "is_weight/ess": weights.ess,
            "is_weight/truncated": weights.truncated,
            "clip/low": sums.clipped_low / tokens,
            "clip/high": sums.clipped_high / tokens,
        }
        if bad := not_finite(loss=sums.loss, gradient_norm=norm):
            self._optimizer.clear()
            return StepResult(values=values, bad=bad)
        values["lr"] = self._optimizer.step(step)
        return StepResult(values=values)

    def evaluate(self, version: Version, stopping: Stopping) -> dict[str, float]:
        """Mean reward on the held-out prompts, with this model."""
        return {} if self._evaluation is None else self._evaluation.run(self.model, version, stopping)

    def close(self) -> None:
        """Nothing is held."""

    def _forward_backward(self, batch: TrainBatch, which: np.ndarray, advantages: Tensor, sums: _Sums) -> None:
        """Add the gradient of some rows to the step's, and their numbers to its sums."""
        algorithm, width = self._config.trainer.algorithm, int(batch.sequence_lengths[which].max())
        input_ids = rows(batch.input_ids, which, width, self._device)
        mask = rows(batch.loss_mask, which, width, self._device)
        behavior = rows(batch.behavior_logprobs, which, width, self._device)
        attention = rows(batch.attention_mask, which, width, self._device)
        logits = self.model(input_ids=input_ids, attention_mask=attention, use_cache=False).logits
        logprobs = token_logprobs(logits, input_ids, self._config.rollout.temperature)
        old = logprobs.detach()
        behavior = torch.where(mask, behavior, old)  # elsewhere it may be anything; 0 * NaN would reach the gradient
        chosen = advantages[torch.from_numpy(which).to(self._device)]
        clipped = ppo_clip(logprobs, old, chosen, clip_low=algorithm.clip_low, clip_high=algorithm.clip_high)
        weights = tis_weights(old, behavior, algorithm.tis_cap)
        loss = token_mean(clipped.loss * weights, mask, batch.trained_tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.collect()
        sums.loss += float(loss.detach())
        sums.clipped_low += int((clipped.low & mask).sum())
        sums.clipped_high += int((clipped.high & mask).sum())
        sums.old.append(old[mask])
        sums.behavior.append(behavior[mask])


def not_finite(**numbers: float) -> str:
    """Names the first number that is not finite, with its value; empty when all are."""
    for name, value in numbers.items():
        if not math.isfinite(value):
            return f"{name.replace('_', ' ')} is {value}"
    return ""
