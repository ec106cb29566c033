# pyright: basic, reportMissingImports=false
"""The critic stage: a value model that evaluates groups and learns from their returns. Adapter to torch.

The value of a token estimates the state in which it was *chosen*: it depends on the tokens before it, not on the token
itself. Subtracting it as a baseline therefore leaves the policy gradient unbiased. Learning starts after the values are
durable; the run waits for it only if more groups are queued.

A run has one critic, since two would learn separately. It rolls back with the run: if a rollback abandons a version
that wrote tokens of its groups, it returns to its newest snapshot without such groups. A snapshot is due before the
critic learns from tokens beyond the next multiple of ``trainer.checkpoint_every``, where the trainer has a checkpoint,
and after as many steps of its own, which limits the loss if the critic alone is killed.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from staleflow.clients.models.files import load_model
from staleflow.clients.models.gae import gae, token_rewards, trained_lengths
from staleflow.clients.stage.critic_files import CriticFiles, CriticState
from staleflow.clients.stage.history import START, Position, RunHistory, newest
from staleflow.clients.stage.model_stage import Ended, Stopping
from staleflow.clients.stage.reference import Limits, finite, on_device, within
from staleflow.clients.stage.sequences import rows_of
from staleflow.clients.stage.worker import StageGroup, StageOutcome
from staleflow.configs.algorithm import Algorithm
from staleflow.configs.schema import Config
from staleflow.protocols.wire.stages import REWARD_COLUMN, STAGE
from staleflow.protocols.wire.trajectory import GroupPayload

log = logging.getLogger(__name__)

COLUMN = "values"
GRAD_CLIP = 1.0
"""Maximum L2 norm of the gradient."""


class ValueModel(nn.Module):
    """A language model's backbone with a linear head of one value per token, initialized to 0."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(backbone.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Map [N, L] to [N, L] float32: the value before token t at position t; 0 at position 0."""
        hidden = self.backbone(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        return nn.functional.pad(self.head(hidden[:, :-1]).squeeze(-1), (1, 0))


class Critic:
    """Compute ``values``, float32 [T]; take one AdamW step per ``critic.batch`` evaluated groups.

    Weights are float32 whatever ``critic.dtype``: in bfloat16, updates with a small learning rate are rounded away.
    """

    def __init__(self, config: Config, directory: Path, folder: Path) -> None:
        torch.set_float32_matmul_precision(config.model.matmul_precision)
        torch.manual_seed(config.seed)
        if config.critic.threads:
            torch.set_num_threads(config.critic.threads)
        self._algorithm, self._settings, self._trainer = config.trainer.algorithm, config.critic, config.trainer
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._dtype = getattr(torch, config.critic.dtype)
        self._directory = directory
        self._files = CriticFiles(folder)
        self._history, self._followed = RunHistory(), False
        self._begin()

    def _begin(self) -> None:
        """Start from the initial model: it has learned from no group."""
        model = load_model(self._directory, "float32", self._device)
        self._limits = Limits.of(model)
        self._model = ValueModel(model.base_model).to(self._device)
        self._adam = torch.optim.AdamW(self._model.parameters(), lr=self._settings.lr, weight_decay=0.0)
        self._buffered: list[GroupPayload] = []
        self._newest: Position = START
        self.steps = self._saved = 0
        self._changed = False

    def follow(self, history: RunHistory) -> None:
        self._history = history
        if not self._followed:
            self._followed = True
            if self._load():
                log.info("critic resumed after step %d, of versions up to %d", self.steps, self._newest[1])
        elif not history.survives(self._newest):
            before = self.steps
            if not self._load():
                self._changed = False
                del self._model, self._adam  # their memory is needed for the initial model
                self._begin()
            now = self.steps, self._newest[1]
            line = "critic rolled back with the run to lineage %d: from step %d to step %d, of versions up to %d"
            log.warning(line, history.lineage, before, *now)
        self._files.tidy(history, self._trainer.checkpoint_every)

    def _load(self) -> bool:
        """Load the newest surviving snapshot; return False if there is none."""
        loaded = self._files.load(self._history, self._model, self._adam)
        if loaded is None:
            return False
        state, self._buffered = loaded
        self._newest, self._changed = state.newest, False
        self.steps = self._saved = state.steps
        return True

    def judge(self, groups: Sequence[StageGroup], stopping: Stopping) -> list[StageOutcome]:
        readable, results = within(groups, self._limits)
        if readable:
            rows = rows_of([group.payload for group in readable])
            values = np.zeros(rows.input_ids.shape, np.float32)
            for which, width in rows.passes(self._trainer.micro_tokens):
                if stopping():
                    raise Ended
                with torch.no_grad():
                    passed = self._values(*on_device(rows, which, width, self._device))
                values[which, :width] = passed.cpu().numpy()
            columns = rows.columns(values)
            results |= {g.group: finite(COLUMN, column) for g, column in zip(readable, columns, strict=True)}
        return [results[group.group] for group in groups]

    def accepted(self, groups: Sequence[StageGroup], stopping: Stopping) -> None:
        """Learn from groups of the surviving history."""
        assert self._followed, "call follow first"
        ended = False
        for payload in [group.payload for group in groups if self._history.keeps(group.payload)]:
            position = max(self._newest, newest(payload))
            if self._changed and self._period(position) > self._period(self._newest):
                self._save()
            self._newest, self._changed = position, True
            self._buffered.append(payload)
            ended = ended or not self._learn_buffered(stopping)
        if ended:
            raise Ended

    def _learn_buffered(self, stopping: Stopping) -> bool:
        """Take the steps that are due. Return False if the worker is stopping; the groups wait in the snapshot then."""
        size = self._settings.batch
        while len(self._buffered) >= size:
            try:
                self._learn(self._buffered[:size], stopping)
            except Ended:
                return False
            del self._buffered[:size]
            if self.steps - self._saved >= self._trainer.checkpoint_every:
                self._save()
        return True

    def close(self) -> None:
        if self._changed:
            self._save()
        self._files.close()

    def _period(self, position: Position) -> int:
        """Number the periods between the trainer's checkpoints: a checkpoint ends a period."""
        return -(-position[1] // self._trainer.checkpoint_every)

    def _values(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the values [N, L], float32, computed in ``critic.dtype``."""
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            values: Tensor = self._model(input_ids, attention_mask)
        return values.float()

    def _save(self) -> None:
        state = CriticState(steps=self.steps, newest=self._newest)
        self._files.save(state, self._model, self._adam, self._buffered)
        self._saved, self._changed = self.steps, False
        self._files.tidy(self._history, self._trainer.checkpoint_every)

    def _learn(self, payloads: Sequence[GroupPayload], stopping: Stopping) -> None:
        """Take one step on the mean squared error over all trained tokens; skip a step whose loss or gradient is not
        finite.

        Advantages use no value of an environment's token, so none is learned.
        """
        rows = rows_of(payloads)
        trained, targets = np.zeros_like(rows.completions), np.zeros(rows.input_ids.shape, np.float32)
        trained[rows.completions] = np.concatenate([payload.loss_mask != 0 for payload in payloads])
        targets[trained] = np.concatenate([returns(payload, self._algorithm) for payload in payloads])
        tokens, loss, errors = max(1, int(trained.sum())), 0.0, np.zeros_like(targets)
        for which, width in rows.passes(self._trainer.micro_tokens):
            if stopping():
                self._adam.zero_grad()
                raise Ended
            mask = torch.from_numpy(trained[which, :width]).to(self._device)
            target = torch.from_numpy(targets[which, :width]).to(self._device)
            error = torch.where(mask, target - self._values(*on_device(rows, which, width, self._device)), 0.0)
            part = 0.5 * (error**2).sum() / tokens
            part.backward()  # type: ignore[no-untyped-call]
            loss += float(part.detach())
            errors[which, :width] = error.detach().cpu().numpy()
        norm = float(nn.utils.clip_grad_norm_(self._model.parameters(), GRAD_CLIP))
        self.steps += 1
        if np.isfinite(loss) and np.isfinite(norm):
            self._adam.step()
            share = explained(errors[trained], targets[trained])
            line = "critic step %d: loss %.5f, explained variance %.4f, gradient norm %.4f, %d tokens"
            log.info(line, self.steps, loss, share, norm, tokens)
        else:
            log.error("critic step %d skipped: loss %g, gradient norm %g", self.steps, loss, norm)
        self._adam.zero_grad()


def returns(payload: GroupPayload, algorithm: Algorithm) -> np.ndarray:
    """Return of each trained token's state, [T]: the discounted sum of the rewards from that token on.

    This is the Monte Carlo return (lambda = 1) whatever lambda the policy's advantages use, so that the targets do not
    contain the critic's own bias. Steps and rewards are the trainer's: trained tokens, with the reward at the last one,
    less the divergence if that is part of the reward.

    Source: Yuan et al., VC-PPO (arXiv 2503.01491), decoupled GAE.
    """
    mask = payload.loss_mask != 0
    costs, reference = None, payload.stages.get(f"{STAGE}reference/logprobs")
    if algorithm.kl_in_reward and reference is not None:
        distance = algorithm.kl_coef * (payload.logprobs - reference)
        costs = torch.from_numpy(distance[mask].astype(np.float32))
    steps = trained_lengths(torch.from_numpy(mask), torch.from_numpy(payload.lengths.astype(np.int64)))
    earned = token_rewards(torch.from_numpy(payload.stages[REWARD_COLUMN].copy()), steps, costs)
    return gae(earned, torch.zeros_like(earned), steps, gamma=algorithm.gamma, gae_lambda=1.0).numpy()


def explained(errors: np.ndarray, targets: np.ndarray) -> float:
    """Share of the returns' variance that the values explain: 1 - Var(error) / Var(return); 0 if nothing varies."""
    variance = float(np.var(targets)) if targets.size else 0.0
    return 1.0 - float(np.var(errors)) / variance if variance > 0 else 0.0
