"""The algorithms again, as loops over trajectories and tokens: plain numbers, nothing shared with the product.

``step`` returns a batch's loss, its derivative by every log-probability, and the metrics.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import msgspec

from staleflow.configs.algorithm import Algorithm

MAX_AGE = 3


@dataclass(slots=True)
class Token:
    logprob: float
    behavior: float
    trained: bool
    reference: float = 0.0
    entropy: float = 0.0
    """The entropy at the token; a constant, so it has no derivative by the log-probability."""
    value: float = 0.0
    age: int = 0


@dataclass(slots=True)
class Written:
    """A trajectory."""

    reward: float
    group: int
    tokens: list[Token]

    @property
    def trained(self) -> list[Token]:
        return [token for token in self.tokens if token.trained]


@dataclass(slots=True)
class Step:
    loss: float = 0.0
    gradients: dict[int, float] = field(default_factory=dict[int, float])
    """Key: ``id`` of the token."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])


def algorithm(**keys: Any) -> Algorithm:
    return msgspec.convert(keys, Algorithm)


def clip(value: float, low: float, high: float) -> float:
    return max(low, min(value, high))


def advantages(how: Algorithm, batch: list[Written]) -> dict[int, float]:
    """Advantage of every trained token, by ``id``."""
    found: dict[int, float] = {}
    for one in batch:
        peers = [other.reward for other in batch if other.group == one.group]
        mean = sum(peers) / len(peers)
        match how.advantage:
            case "grpo":
                spread = math.sqrt(sum((r - mean) ** 2 for r in peers) / max(1, len(peers) - 1))
                each = (one.reward - mean) / (spread + 1e-6)
            case "dr_grpo" | "reinforce_pp_baseline":
                each = one.reward - mean
            case "none":
                each = 0.0
            case "rloo":
                others = (sum(peers) - one.reward) / (len(peers) - 1) if len(peers) > 1 else one.reward
                each = one.reward - others
            case _:
                each = math.nan
        for place, token in enumerate(one.trained):
            found[id(token)] = each
            if how.advantage == "reinforce_pp":
                found[id(token)] = sum(earned(how, one, later) for later in range(place, len(one.trained)))
            if how.advantage == "gae":
                found[id(token)] = gae(how, one, place)
    if how.advantage in ("reinforce_pp", "reinforce_pp_baseline") or (how.advantage == "gae" and how.whiten_advantages):
        counted = [found[id(token)] for one in batch for token in one.trained]
        mean = sum(counted) / max(1, len(counted))
        spread = math.sqrt(sum((a - mean) ** 2 for a in counted) / max(1, len(counted)))
        found = {key: (a - mean) / (spread + 1e-6) for key, a in found.items()}
    for token in (token for one in batch for token in one.trained):
        found[id(token)] += how.distill_coef * (token.reference - token.logprob)
    return found


def earned(how: Algorithm, one: Written, place: int) -> float:
    """Reward of the trajectory's trained token number ``place``."""
    token = one.trained[place]
    cost = how.kl_coef * (token.behavior - token.reference) if how.kl_in_reward else 0.0
    return (one.reward if place == len(one.trained) - 1 else 0.0) - cost


def gae(how: Algorithm, one: Written, place: int) -> float:
    """The definition as a sum over the later trained tokens instead of a recursion."""
    total = 0.0
    for later in range(place, len(one.trained)):
        after = one.trained[later + 1].value if later + 1 < len(one.trained) else 0.0
        delta = earned(how, one, later) + how.gamma * after - one.trained[later].value
        total += (how.gamma * how.gae_lambda) ** (later - place) * delta
    return total


def ppo(ratio: float, advantage: float, low: float, high: float, dual: float = 0.0) -> tuple[float, float, str]:
    """Loss, its derivative by the logarithm of the ratio, and the clip that acted."""
    if advantage < 0 and dual > 0 and ratio > dual:
        return -dual * advantage, 0.0, "high"
    if advantage < 0 and ratio < 1 - low:
        return -(1 - low) * advantage, 0.0, "low"
    if advantage > 0 and ratio > 1 + high:
        return -(1 + high) * advantage, 0.0, "high"
    return -ratio * advantage, -ratio * advantage, ""


def clippable(at: Token, advantage: float) -> bool:
    """A good token that became likelier, or a bad token that became less likely."""
    return (advantage > 0 and at.logprob > at.behavior) or (advantage < 0 and at.logprob < at.behavior)


def m2_limit(batch: list[Written], gained: dict[int, float], threshold: float) -> float:
    """The largest square that remains after dropping the largest ones until the mean is small enough."""
    tokens = [token for one in batch for token in one.trained if clippable(token, gained[id(token)])]
    squares = sorted((token.logprob - token.behavior) ** 2 for token in tokens)
    while squares and sum(squares) / len(squares) > threshold:
        squares.pop()
    return squares[-1] if squares else -1.0


def vetoed(how: Algorithm, one: Written, gained: dict[int, float]) -> bool:
    if sum(gained[id(token)] for token in one.trained) >= 0:
        return False
    return any(math.exp(token.logprob - token.behavior) < how.veto_below for token in one.trained)


def dppo(how: Algorithm, at: Token, advantage: float) -> tuple[float, float, str]:
    p, q = math.exp(at.logprob), math.exp(at.behavior)
    apart = abs(p - q)
    if how.dppo_divergence == "kl":
        apart = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    if advantage > 0 and p > q and apart > how.dppo_high:
        return 0.0, 0.0, "high"
    if advantage < 0 and p < q and apart > how.dppo_low:
        return 0.0, 0.0, "low"
    return -p / q * advantage, -p / q * advantage, ""


def gmpo(how: Algorithm, one: Written, at: Token, advantage: float) -> tuple[float, float, str]:
    """The derivative includes the token's part in the losses of all tokens of the trajectory."""
    total = 0.0
    for token in one.trained:
        distance = token.logprob - token.behavior
        total += max(distance, -how.gmpo_low) if advantage < 0 else min(distance, how.gmpo_high)
    loss, distance = -math.exp(total / len(one.trained)) * advantage, at.logprob - at.behavior
    if advantage < 0 and distance < -how.gmpo_low:
        return loss, 0.0, "low"
    if advantage > 0 and distance > how.gmpo_high:
        return loss, 0.0, "high"
    return loss, loss, ""


def token(how: Algorithm, one: Written, at: Token, advantage: float, limit: float) -> tuple[float, float, str]:
    """Loss, derivative and outcome ("", low, high, masked, cut) of one trained token; the derivative is its own part
    only."""
    mine = [math.exp(t.logprob - t.behavior) for t in one.trained]
    ratio = math.exp(at.logprob - at.behavior)
    mean = sum(t.logprob - t.behavior for t in one.trained) / len(one.trained)
    match how.loss:
        case "ppo_clip" if how.ratio_to == "behavior":
            return ppo(ratio, advantage, how.clip_low, how.clip_high, how.dual_clip)
        case "gspo" if how.ratio_to == "behavior":
            return ppo(math.exp(mean), advantage, how.gspo_low, how.gspo_high)
        case "ppo_clip" | "gspo":  # old and current are equal, so that the ratio between them is 1
            weight, fate = correction(how, ratio, math.prod(mine), math.exp(mean), at.age)
            return -weight * advantage, -weight * advantage, fate
        case "gmpo":
            return gmpo(how, one, at, advantage)
        case "dppo":
            return dppo(how, at, advantage)
        case "cispo":
            weight = clip(ratio, 1 - how.cispo_low, 1 + how.cispo_high)
            return -weight * advantage * at.logprob, -weight * advantage, "cut" if weight != ratio else ""
        case "aipo":
            weight = min(ratio, how.aipo_cap)
            return -weight * advantage * at.logprob, -weight * advantage, "cut" if weight != ratio else ""
        case "m2po":
            if clippable(at, advantage) and (at.logprob - at.behavior) ** 2 > limit:
                return 0.0, 0.0, "masked"
            return -ratio * advantage, -ratio * advantage, ""
        case "opsm":
            if advantage < 0 and -mean > how.opsm_delta:
                return 0.0, 0.0, "masked"
            return ppo(ratio, advantage, how.clip_low, how.clip_high, how.dual_clip)
        case _:
            raise AssertionError


def correction(how: Algorithm, ratio: float, product: float, geometric: float, age: int) -> tuple[float, str]:
    match how.correction:
        case "none":
            return 1.0, ""
        case "tis":
            caps = how.tis_cap_by_age or [how.tis_cap]
            cap = caps[min(age, len(caps) - 1)]
            return (cap, "cut") if ratio > cap else (ratio, "")
        case "decoupled":
            return ratio, ""
        case "masked_is":
            return (ratio, "") if how.mask_low <= ratio <= how.mask_high else (0.0, "masked")
        case "masked_is_sequence":
            return (product, "") if product <= how.sequence_cap else (0.0, "masked")
        case "masked_is_geometric":
            if not how.geometric_low <= geometric <= how.geometric_high:
                return 0.0, "masked"
            return (how.tis_cap, "cut") if ratio > how.tis_cap else (ratio, "")


def divergence(kind: str, distance: float) -> tuple[float, float]:
    """Value and derivative by the log-probability."""
    match kind:
        case "k1":
            return distance, distance
        case "k2":
            return distance * distance / 2, distance
        case _:
            return math.exp(-distance) - 1 + distance, 1 - math.exp(-distance)


def share(how: Algorithm, batch: list[Written], one: Written, longest: int) -> float:
    """Weight of one token of the trajectory."""
    kind = how.loss_agg
    if kind == "auto" and how.loss in ("gspo", "gmpo", "opsm"):
        kind = "sequence_mean"
    elif kind == "auto" and how.advantage == "dr_grpo":
        kind = "sequence_sum"
    if kind == "sequence_mean":
        return 1 / (sum(bool(other.trained) for other in batch) * len(one.trained))
    if kind == "sequence_sum":
        return 1 / (len(batch) * longest)
    return 1 / sum(len(other.trained) for other in batch)


def step(how: Algorithm, batch: list[Written], longest: int) -> Step:
    found, fates, silent = Step(), list[str](), 0
    gained = advantages(how, batch)
    limit = m2_limit(batch, gained, how.m2_threshold)
    ratios: list[float] = []
    apart = entropy = taught = 0.0
    for one in batch:
        mine: list[str] = []
        left_out = vetoed(how, one, gained)
        for at in one.trained:
            each = share(how, batch, one, longest)
            loss, derivative, fate = token(how, one, at, gained[id(at)], limit)
            if left_out:
                loss, derivative, fate = 0.0, 0.0, "masked"
            found.loss += each * (loss - how.entropy_coef * at.entropy)
            entropy += at.entropy
            taught += at.logprob - at.reference
            found.gradients[id(at)] = each * derivative
            if how.kl_coef:
                value, slope = divergence(how.kl, at.logprob - at.reference)
                apart += value
                if not how.kl_in_reward:
                    found.loss += how.kl_coef * each * value
                    found.gradients[id(at)] += how.kl_coef * each * slope
            ratios.append(math.exp(at.logprob - at.behavior))
            mine.append(fate)
        silent += bool(mine) and all(fate == "masked" for fate in mine)
        fates += mine
    total, some = max(1, len(ratios)), ratios or [1.0]
    found.metrics = {
        "loss": found.loss,
        "clip/low": fates.count("low") / total,
        "clip/high": fates.count("high") / total,
        "masked/token": fates.count("masked") / total,
        "masked/sequence": silent / max(1, sum(bool(one.trained) for one in batch)),
        "mismatch_kl": sum(r - 1 - math.log(r) for r in some) / len(some),
        "is_weight/mean": sum(some) / len(some),
        "is_weight/max": max(some),
        "is_weight/ess": sum(some) ** 2 / (len(some) * sum(r * r for r in some)),
        "is_weight/truncated": fates.count("cut") / total,
    }
    if how.kl_coef:
        found.metrics["kl/reference"] = apart / total
    if how.entropy_coef:
        found.metrics["entropy"] = entropy / total
    if how.distill_coef:
        found.metrics["kl/teacher"] = taught / total
    ages = [min(at.age, MAX_AGE) for one in batch for at in one.trained]
    for age in set(ages):
        some = [ratio for ratio, its in zip(ratios, ages, strict=True) if its == age]
        apart_from = [fate for fate, its in zip(fates, ages, strict=True) if its == age]
        found.metrics |= {
            f"off_policy/share/age_{age}": len(some) / len(ages),
            f"mismatch_kl/age_{age}": sum(r - 1 - math.log(r) for r in some) / len(some),
            f"mismatch_k1/age_{age}": -sum(math.log(r) for r in some) / len(some),
            f"is_weight/ess/age_{age}": sum(some) ** 2 / (len(some) * sum(r * r for r in some)),
            f"is_weight/truncated/age_{age}": apart_from.count("cut") / len(some),
            f"clip/age_{age}": (apart_from.count("low") + apart_from.count("high")) / len(some),
        }
    return found
