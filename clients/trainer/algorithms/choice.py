# pyright: basic, reportMissingImports=false
"""Select the configured advantage, loss and correction by name, and check the results of user functions.

A user's advantage is called as ``f(rewards [N], group_ids [N]) -> [N]``. A user's loss is called as ``f(logprobs, old,
behavior, advantages, row) -> loss``, all [T] with T above 0, over the trained tokens of some whole trajectories, with
gradient through ``logprobs``. Either may take an argument ``stages``: the columns of the stages by ``stage/column``,
per-sample columns [N] for the advantage and per-token columns [T] for the loss. Likewise ``columns``: the typed columns
of ``[[column]]`` by name, [N, *shape] and [T, *shape], without byte strings.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from staleflow.clients.trainer.algorithms import advantages, corrections, dppo, geometric, losses, sequence_losses, veto
from staleflow.clients.trainer.algorithms.corrections import Correction
from staleflow.clients.trainer.algorithms.losses import TokenLoss
from staleflow.configs.algorithm import Algorithm
from staleflow.configs.errors import ConfigError
from staleflow.configs.imports import load_object

GROUP_ADVANTAGES: Final[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "grpo": advantages.grpo,
    "dr_grpo": advantages.dr_grpo,
    "rloo": advantages.rloo,
    "none": advantages.none,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedTokens:
    """The trained tokens of one forward pass; all [T], only ``logprobs`` with gradient."""

    logprobs: Tensor
    behavior: Tensor
    advantages: Tensor
    row: Tensor
    age: Tensor
    """int64: the step minus the version that generated the token."""
    stages: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Per-token columns, by ``stage/column``."""
    columns: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """[T, *shape]: typed columns with one value a token, by name."""

    start: Tensor | None = None
    """Log-probabilities at the start of the step; None: the current ones, as the step has a single update."""

    @property
    def old(self) -> Tensor:
        """Log-probabilities at the start of the step."""
        return self.logprobs.detach() if self.start is None else self.start


def group_advantage(name: str) -> Callable[[Tensor, Tensor, Mapping[str, Tensor], Mapping[str, Tensor]], Tensor]:
    """Return the advantage function of ``(rewards [N], group_ids [N], columns of stages, typed columns)``.

    User functions are checked.
    """
    if name in GROUP_ADVANTAGES:
        return lambda rewards, group_ids, *_: GROUP_ADVANTAGES[name](rewards, group_ids)
    key = "trainer.algorithm.advantage"
    function = load_object(name, key)
    wants = _parameters(function)

    def checked(
        rewards: Tensor, group_ids: Tensor, stages: Mapping[str, Tensor], columns: Mapping[str, Tensor]
    ) -> Tensor:
        more = {name: value for name, value in (("stages", stages), ("columns", columns)) if name in wants}
        result = function(rewards, group_ids, **more)
        return _checked(key, name, result, rewards.shape, bool(rewards.isfinite().all())).to(torch.float32)

    return checked


def token_loss(algorithm: Algorithm) -> Callable[[TrainedTokens, float], TokenLoss]:
    """Return the loss of ``(tokens, limit)``; ``limit`` is the largest squared log-ratio that M2PO keeps."""
    loss, below = _unvetoed(algorithm), algorithm.veto_below
    if not below:
        return loss
    return lambda at, limit: veto.vetoed(loss(at, limit), at.old, at.behavior, at.advantages, at.row, below)


def _unvetoed(algorithm: Algorithm) -> Callable[[TrainedTokens, float], TokenLoss]:
    match algorithm.loss:
        case "ppo_clip":
            return lambda at, _: _ppo(algorithm, at)
        case "gspo":
            low, high = algorithm.gspo_low, algorithm.gspo_high
            return lambda at, _: _corrected(
                algorithm,
                at,
                sequence_losses.gspo(
                    at.logprobs, _denominator(algorithm, at), at.advantages, at.row, gspo_low=low, gspo_high=high
                ),
            )
        case "gmpo":
            low, high = algorithm.gmpo_low, algorithm.gmpo_high
            return lambda at, _: geometric.gmpo(
                at.logprobs, at.behavior, at.advantages, at.row, gmpo_low=low, gmpo_high=high
            )
        case "dppo":
            kind, low, high = algorithm.dppo_divergence, algorithm.dppo_low, algorithm.dppo_high
            return lambda at, _: dppo.dppo(
                at.logprobs, at.behavior, at.advantages, divergence=kind, dppo_low=low, dppo_high=high
            )
        case "cispo":
            low, high = algorithm.cispo_low, algorithm.cispo_high
            return lambda at, _: losses.cispo(at.logprobs, at.behavior, at.advantages, cispo_low=low, cispo_high=high)
        case "aipo":
            return lambda at, _: losses.aipo(at.logprobs, at.behavior, at.advantages, aipo_cap=algorithm.aipo_cap)
        case "m2po":
            return lambda at, limit: losses.m2po(at.logprobs, at.behavior, at.advantages, limit=limit)
        case "opsm":
            return lambda at, _: sequence_losses.opsm(
                at.logprobs,
                at.behavior,
                at.advantages,
                at.row,
                clip_low=algorithm.clip_low,
                clip_high=algorithm.clip_high,
                dual_clip=algorithm.dual_clip,
                opsm_delta=algorithm.opsm_delta,
            )
        case spec:
            return _users_loss(spec)


def _ppo(algorithm: Algorithm, at: TrainedTokens) -> TokenLoss:
    clipped = losses.ppo_clip(
        at.logprobs,
        _denominator(algorithm, at),
        at.advantages,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
    )
    return _corrected(algorithm, at, clipped)


def _denominator(algorithm: Algorithm, at: TrainedTokens) -> Tensor:
    return at.old if algorithm.ratio_to == "old" else at.behavior


def _corrected(algorithm: Algorithm, at: TrainedTokens, clipped: TokenLoss) -> TokenLoss:
    """Weight a loss relative to the old policy by the correction; one relative to the engine's needs none."""
    if algorithm.ratio_to != "old":
        return clipped
    correction = correct(algorithm, at.old, at.behavior, at.row, at.age)
    return TokenLoss(
        loss=clipped.loss * correction.weight,
        low=clipped.low & ~correction.masked,
        high=clipped.high & ~correction.masked,
        masked=correction.masked,
        truncated=correction.truncated,
    )


def correct(algorithm: Algorithm, old: Tensor, behavior: Tensor, row: Tensor, age: Tensor) -> Correction:
    """Compute the configured correction of trained tokens, all [T]."""
    match algorithm.correction:
        case "none":
            return corrections.uncorrected(old, behavior)
        case "tis":
            by_age = algorithm.tis_cap_by_age
            cap = caps(by_age, age).to(old.dtype) if by_age else algorithm.tis_cap
            return corrections.truncated(old, behavior, cap=cap)
        case "decoupled":
            return corrections.decoupled(old, behavior)
        case "masked_is":
            return corrections.masked_tokens(old, behavior, low=algorithm.mask_low, high=algorithm.mask_high)
        case "masked_is_sequence":
            return corrections.masked_sequences(old, behavior, row, cap=algorithm.sequence_cap)
        case "masked_is_geometric":
            low, high, cap = algorithm.geometric_low, algorithm.geometric_high, algorithm.tis_cap
            return geometric.masked_geometric(old, behavior, row, low=low, high=high, cap=cap)


def caps(by_age: Sequence[float], age: Tensor) -> Tensor:
    """Return the cap of each token [T] by its age; the last cap is also that of all older tokens."""
    of_age = torch.tensor(by_age, dtype=torch.float32, device=age.device)
    return of_age[age.clamp(0, len(by_age) - 1)]


def _users_loss(spec: str) -> Callable[[TrainedTokens, float], TokenLoss]:
    key = "trainer.algorithm.loss"
    function = load_object(spec, key)
    wants = _parameters(function)

    def checked(at: TrainedTokens, _: float) -> TokenLoss:
        more = {name: value for name, value in (("stages", at.stages), ("columns", at.columns)) if name in wants}
        result = function(at.logprobs, at.old, at.behavior, at.advantages, at.row, **more)
        given = torch.stack([at.old.to(torch.float64).sum(), at.behavior.to(torch.float64).sum()])
        loss = _checked(key, spec, result, at.logprobs.shape, bool(given.isfinite().all()))
        if not loss.requires_grad and at.logprobs.requires_grad:
            raise ConfigError(key, spec, "what it returns has no gradient; it must be computed from logprobs")
        return losses.plain(loss)

    return checked


def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin without a Python signature
        return frozenset()


def _checked(key: str, spec: str, result: Any, shape: torch.Size, finite: bool) -> Tensor:
    """Validate a user function's tensor. ``finite``: its inputs were finite, so the result must be, too."""
    if not isinstance(result, Tensor):
        raise ConfigError(
            key, spec, f"it must return a tensor of shape {list(shape)}, it returned {type(result).__name__}"
        )
    if result.shape != shape:
        raise ConfigError(key, spec, f"it must return shape {list(shape)}, it returned {list(result.shape)}")
    if finite and not bool(result.detach().isfinite().all()):
        raise ConfigError(key, spec, "it returned a value that is not finite")
    return result
