# pyright: basic, reportMissingImports=false
"""Every algorithm through the objective matches ``literal`` in loss, gradient and metrics, however the batch is cut."""

import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from staleflow.clients.trainer.algorithms.objective import LOCAL, REFERENCE, VALUES, Objective, Reduce, tokens_of
from staleflow.clients.trainer.data.batch import NO_VERSION, TrainBatch
from staleflow.configs.algorithm import Algorithm
from staleflow.configs.errors import ConfigError
from staleflow.configs.rules.algorithm import LOSSES
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import BatchId, Lineage
from staleflow.protocols.consistency.ids import Step as StepNumber
from tests.clients.trainer.algorithms import literal
from tests.clients.trainer.algorithms.literal import Token, Written, algorithm
from tests.clients.trainer.making import config

CPU = torch.device("cpu")
LONGEST = 12
STEP = 7

BEHAVIOR = {"ratio_to": "behavior"}
WIDE = {**BEHAVIOR, "gspo_low": 0.1, "gspo_high": 0.15}
SETTINGS: dict[str, dict[str, Any]] = {
    "grpo, none": {"correction": "none"},
    "grpo, tis": {"tis_cap": 1.2},
    "grpo, tis by age": {"tis_cap_by_age": [1.3, 1.2, 1.05]},
    "grpo, decoupled": {"correction": "decoupled"},
    "grpo, masked tokens": {"correction": "masked_is", "mask_low": 0.8, "mask_high": 1.3},
    "grpo, masked sequences": {"correction": "masked_is_sequence", "sequence_cap": 1.1},
    "ppo to the engine": BEHAVIOR,
    "clip-higher": {**BEHAVIOR, "clip_low": 0.1, "clip_high": 0.4},
    "dual clip": {**BEHAVIOR, "dual_clip": 1.3},
    "dr_grpo": {"advantage": "dr_grpo"},
    "rloo": {"advantage": "rloo"},
    "reinforce_pp": {"advantage": "reinforce_pp"},
    "reinforce_pp, kl in reward": {"advantage": "reinforce_pp", "kl_coef": 0.3, "kl_in_reward": True},
    "gae": {"advantage": "gae", "gamma": 0.9, "gae_lambda": 0.7},
    "gae, not whitened": {"advantage": "gae", "gamma": 0.9, "gae_lambda": 0.7, "whiten_advantages": False},
    "gae, kl in reward": {"advantage": "gae", "kl_coef": 0.3, "kl_in_reward": True, "gae_lambda": 0.95},
    "gspo to old": {"loss": "gspo", "correction": "masked_is", "mask_low": 0.8, "mask_high": 1.3},
    "gspo to the engine": {"loss": "gspo", **WIDE},
    "gspo, gae": {"loss": "gspo", "advantage": "gae", **WIDE},
    "gspo, dr_grpo": {"loss": "gspo", "advantage": "dr_grpo", **WIDE},
    "cispo": {"loss": "cispo", "cispo_low": 0.2, "cispo_high": 0.3},
    "cispo without a lower bound": {"loss": "cispo", "cispo_high": 0.3},
    "aipo": {"loss": "aipo", "aipo_cap": 1.2},
    "m2po": {"loss": "m2po", "m2_threshold": 0.02},
    "opsm": {"loss": "opsm", "opsm_delta": 0.02, "dual_clip": 1.4},
    "k1": {"kl_coef": 0.5, "kl": "k1"},
    "k2": {"kl_coef": 0.5, "kl": "k2"},
    "k3": {"kl_coef": 0.5, "kl": "k3"},
    "gspo with k3": {"loss": "gspo", "kl_coef": 0.2, **WIDE},
    "sequence mean": {"loss_agg": "sequence_mean"},
    "sequence sum": {"loss_agg": "sequence_sum", "advantage": "rloo"},
    "dr_grpo, token mean": {"loss_agg": "token_mean", "advantage": "dr_grpo"},
    "gspo, sequence sum": {"loss_agg": "sequence_sum", "loss": "gspo", **WIDE},
    "reinforce_pp_baseline": {"advantage": "reinforce_pp_baseline"},
    "masked geometric": {
        "correction": "masked_is_geometric",
        "geometric_low": 0.9,
        "geometric_high": 1.1,
        "tis_cap": 1.2,
    },
    "gmpo": {"loss": "gmpo", "gmpo_low": 0.2, "gmpo_high": 0.15},
    "gmpo, token mean": {"loss": "gmpo", "gmpo_low": 0.2, "gmpo_high": 0.15, "loss_agg": "token_mean"},
    "dppo": {"loss": "dppo", "dppo_low": 0.04, "dppo_high": 0.06},
    "dppo, kl": {"loss": "dppo", "dppo_divergence": "kl", "dppo_low": 0.01, "dppo_high": 0.02},
    "veto": {"veto_below": 0.7},
    "veto, gspo": {"veto_below": 0.7, "loss": "gspo", **WIDE},
    "veto, gae": {"veto_below": 0.95, "advantage": "gae"},
    "entropy": {"entropy_coef": 0.3},
    "entropy, sequence mean": {"entropy_coef": 0.3, "loss_agg": "sequence_mean"},
    "distillation": {"advantage": "none", "distill_coef": 1.5},
    "distillation and rewards": {"advantage": "rloo", "distill_coef": 0.5, "loss": "cispo"},
    "distillation, m2po": {"distill_coef": 0.5, "loss": "m2po", "m2_threshold": 0.02},
}


def drawn(seed: int, *, trained: float = 0.8, spread: float = 0.3) -> list[Written]:
    """Groups of 4, 3 and 1, one of equal rewards; trajectories of 0 to 9 tokens, some of them without a trained one."""
    draw, ages = random.Random(seed), random.Random(seed)
    batch: list[Written] = []
    for group, size in ((7, 4), (3, 3), (9, 1), (5, 2)):
        for member in range(size):
            tokens = []
            for _ in range(0 if (group, member) == (7, 1) else draw.randint(1, 9)):
                logprob = -draw.uniform(0.2, 3.0)
                one = Token(f32(logprob), f32(min(logprob + draw.gauss(0, spread), -0.02)), draw.random() < trained)
                one.age = ages.randint(0, 4)
                one.reference, one.value = f32(logprob + draw.gauss(0, 0.4)), f32(draw.gauss(0, 1))
                one.entropy = -logprob / 2
                tokens.append(one)
            if (group, member) == (3, 0):
                for one in tokens:
                    one.trained = False
            batch.append(Written(1.0 if group == 5 else f32(draw.random()), group, tokens))
    return batch


def f32(number: float) -> float:
    return float(np.float32(number))


def columns(batch: Sequence[Written]) -> TrainBatch:
    """Put prompts of 1 to 3 tokens before each trajectory; positions that must not be read hold NaN."""
    size, longest = len(batch), max(len(one.tokens) for one in batch) + 3
    arrays = {
        name: np.full((size, longest), np.nan, np.float32) for name in ("behavior", "reference", "value", "logprob")
    }
    mask, attention = np.zeros((size, longest), np.bool_), np.zeros((size, longest), np.int64)
    versions = np.full((size, longest), NO_VERSION, np.int64)
    for row, one in enumerate(batch):
        prompt = 1 + row % 3
        attention[row, : prompt + len(one.tokens)] = 1
        for place, token in enumerate(one.tokens, prompt):
            mask[row, place] = token.trained
            versions[row, place] = STEP - token.age
            for name, array in arrays.items():
                array[row, place] = getattr(token, name)
            if not token.trained:
                arrays["behavior"][row, place] = 0.0
    return TrainBatch(
        step=StepNumber(STEP),
        batch=BatchId(1),
        lineage=Lineage(0),
        digest="",
        attempt=1,
        input_ids=np.zeros((size, longest), np.int64),
        attention_mask=attention,
        loss_mask=mask,
        behavior_logprobs=arrays["behavior"],
        token_versions=versions,
        rewards=np.array([one.reward for one in batch], np.float32),
        group_ids=np.array([one.group for one in batch], np.int64),
        completion_lengths=np.array([len(one.tokens) for one in batch], np.int64),
        cut=np.zeros(size, np.bool_),
        masked_tokens=0,
        rows=({},) * size,
        token_stages={REFERENCE: arrays["reference"], VALUES: arrays["value"]},
    )


def settings(how: Algorithm) -> Config:
    made = config(algorithm=msgspec.to_builtins(how))
    return msgspec.structs.replace(
        made,
        rollout=msgspec.structs.replace(made.rollout, max_new_tokens=LONGEST),
        staleness=msgspec.structs.replace(made.staleness, max_staleness=literal.MAX_AGE),
    )


def stepped(
    how: Algorithm, batch: Sequence[Written], cuts: list[list[int]], reduce: Reduce = LOCAL
) -> tuple[float, dict[int, float], dict[str, float]]:
    """Loss, derivative by each trained token's log-probability (by ``id``), metrics, of one rank's trajectories."""
    data, objective = columns(batch), Objective(settings(how), CPU, reduce)
    objective.begin()
    objective.take(data)
    leaves = []
    for cut in cuts:
        numbers = [token.logprob for row in cut for token in batch[row].tokens]
        leaves.append(torch.tensor(numbers, dtype=torch.float64, requires_grad=True))
    which = [np.array(cut, np.int64) for cut in cuts]
    if objective.surveys:
        for rows, leaf in zip(which, leaves, strict=True):
            objective.survey(leaf.detach(), tokens_of(data, rows, CPU))
        objective.surveyed()
    total, gradients = 0.0, dict[int, float]()
    for rows, leaf in zip(which, leaves, strict=True):
        entropy = torch.tensor([token.entropy for row in rows for token in batch[row].tokens], dtype=torch.float64)
        loss = objective.loss(leaf, tokens_of(data, rows, CPU), entropy)
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
        assert leaf.grad is not None
        tokens = [token for row in rows for token in batch[row].tokens]
        for token, derivative in zip(tokens, leaf.grad.tolist(), strict=True):
            if token.trained:
                gradients[id(token)] = derivative
            else:
                assert derivative == 0.0
    scale = objective.scale()
    return scale * total, {token: scale * each for token, each in gradients.items()}, objective.values()


def whole(batch: Sequence[Written]) -> list[list[int]]:
    return [list(range(len(batch)))]


@pytest.mark.parametrize("keys", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("seed", range(3))
def test_loss_gradient_and_metrics_are_those_of_the_literal_loop(keys: dict[str, Any], seed: int) -> None:
    batch, how = drawn(seed), algorithm(**keys)
    expected = literal.step(how, batch, LONGEST)
    loss, gradients, metrics = stepped(how, batch, whole(batch))
    assert loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-6)
    assert gradients == pytest.approx(expected.gradients, rel=1e-4, abs=1e-7)
    assert metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-6)


def test_the_drawn_data_reaches_every_branch() -> None:
    """A clip, a mask or a cap that never acts would pass with any sign."""
    seen: dict[str, float] = {}
    for keys in SETTINGS.values():
        for seed in range(3):
            found = literal.step(algorithm(**keys), drawn(seed), LONGEST).metrics
            for name, value in found.items():
                seen[name] = max(seen.get(name, 0.0), value)
    names = ("clip/low", "clip/high", "masked/token", "masked/sequence", "is_weight/truncated", "kl/reference")
    assert all(seen[name] > 0 for name in names), seen


@pytest.mark.parametrize("keys", SETTINGS.values(), ids=SETTINGS.keys())
def test_the_cut_into_micro_batches_changes_nothing(keys: dict[str, Any]) -> None:
    batch, how = drawn(4), algorithm(**keys)
    once, cut = stepped(how, batch, whole(batch)), stepped(how, batch, [[9, 2], [5], [1], [0, 8, 3], [7, 4, 6]])
    assert cut[0] == pytest.approx(once[0], rel=1e-6, abs=1e-9)
    assert cut[1] == pytest.approx(once[1], rel=1e-6, abs=1e-9)
    assert cut[2] == pytest.approx(once[2], rel=1e-6, abs=1e-9)


class Shared:
    """Two ranks in threads: each waits for the other at every reduction."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=100)
        self._held: list[torch.Tensor] = [torch.zeros(0)] * 2

    def rank(self, number: int) -> Reduce:
        return _Rank(self, number)

    def gather(self, number: int, values: torch.Tensor) -> torch.Tensor:
        self._held[number] = values.clone()
        self._barrier.wait()
        both = torch.stack(self._held)
        self._barrier.wait()
        return both


class _Rank:
    def __init__(self, shared: Shared, number: int) -> None:
        self._shared, self._number = shared, number

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return self._shared.gather(self._number, values).sum(0)

    def max(self, values: torch.Tensor) -> torch.Tensor:
        return self._shared.gather(self._number, values).amax(0)


@pytest.mark.parametrize("keys", SETTINGS.values(), ids=SETTINGS.keys())
def test_two_ranks_add_up_to_one(keys: dict[str, Any]) -> None:
    batch, how, shared = drawn(5), algorithm(**keys), Shared()
    once = stepped(how, batch, whole(batch))
    parts = (batch[:4], batch[4:])
    found: list[Any] = [None, None]

    def run(rank: int) -> None:
        found[rank] = stepped(how, parts[rank], [[row] for row in range(len(parts[rank]))], shared.rank(rank))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (one, first, left), (two, second, right) = found
    assert one + two == pytest.approx(once[0], rel=1e-6, abs=1e-9)
    assert first | second == pytest.approx(once[1], rel=1e-6, abs=1e-9)
    assert left == right == pytest.approx(once[2], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("keys", SETTINGS.values(), ids=SETTINGS.keys())
def test_a_batch_without_a_trained_token_has_no_loss(keys: dict[str, Any]) -> None:
    batch = drawn(6, trained=0.0)
    loss, gradients, metrics = stepped(algorithm(**keys), batch, whole(batch))
    assert (loss, gradients) == (0.0, {})
    assert metrics | {"is_weight/mean": 0, "is_weight/max": 0, "is_weight/ess": 0} == dict.fromkeys(metrics, 0.0)
    assert metrics["is_weight/ess"] == 1.0


@pytest.mark.parametrize("loss", LOSSES)
def test_on_policy_every_loss_is_the_policy_gradient(loss: str) -> None:
    batch = drawn(7, spread=0.0)
    how = algorithm(loss=loss, advantage="rloo")
    gained = literal.advantages(how, batch)
    _, gradients, metrics = stepped(how, batch, whole(batch))
    for one in batch:
        each = literal.share(how, batch, one, LONGEST) if one.trained else 0.0
        for token in one.trained:
            assert gradients[id(token)] == pytest.approx(-each * gained[id(token)], rel=1e-5, abs=1e-7)
    assert metrics["mismatch_kl"] == pytest.approx(0.0, abs=1e-9)
    assert all(metrics[f"{name}"] == 0 for name in ("clip/low", "clip/high", "masked/token", "is_weight/truncated"))


def test_the_objective_forgets_the_step_before() -> None:
    batch, how = drawn(1), algorithm(loss="m2po")
    objective, data = Objective(settings(how), CPU), columns(batch)
    leaf = torch.tensor([token.logprob for one in batch for token in one.tokens])
    which, found = np.arange(len(batch)), []
    for _ in range(2):
        objective.begin()
        objective.take(data)
        objective.survey(leaf, tokens_of(data, which, CPU))
        objective.surveyed()
        objective.loss(leaf, tokens_of(data, which, CPU))
        objective.scale()
        found.append(objective.values())
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("keys", "column", "key"),
    [
        ({"advantage": "gae"}, VALUES, "trainer.algorithm.advantage"),
        ({"kl_coef": 0.1}, REFERENCE, "trainer.algorithm.kl_coef"),
    ],
)
def test_a_stage_column_that_is_missing_is_named(keys: dict[str, Any], column: str, key: str) -> None:
    batch = drawn(0)
    data = columns(batch)
    del data.token_stages[column]
    objective = Objective(settings(algorithm(**keys)), CPU)
    logprobs = torch.zeros(sum(len(one.tokens) for one in batch))

    def train() -> None:
        objective.begin()
        objective.take(data)
        objective.loss(logprobs, tokens_of(data, np.arange(len(batch)), CPU))

    with pytest.raises(ConfigError, match=column) as error:
        train()
    assert error.value.what == key


USER = """
import torch

def centred(rewards, group_ids):
    return rewards - rewards.mean()

def reinforce(logprobs, old, behavior, advantages, row):
    assert len(logprobs) == len(old) == len(behavior) == len(advantages) == len(row)
    return -advantages * logprobs

def staged(rewards, group_ids, *, stages):
    return stages["judge/score"]

def graded(rewards, group_ids, *, columns):
    assert set(columns) == {"rank"}
    return columns["rank"].to(torch.float32)


def distilled(logprobs, old, behavior, advantages, row, *, columns):
    assert set(columns) == {"teacher"}
    return advantages * (logprobs - columns["teacher"][:, 0]).exp()


def weighted(logprobs, old, behavior, advantages, row, *, stages):
    return -advantages * stages["critic/values"] * logprobs

def farthest(logprobs, old, behavior, advantages, row):
    return -advantages * logprobs + 0.0 * (logprobs - behavior).max()

def number(*given): return 1.0
def short(*given): return given[0][:-1]
def nan(*given): return given[0] * float("nan")
def constant(*given): return given[0].detach()
"""


@pytest.fixture
def users(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(USER)
    return f"{tmp_path}/mine.py"


def test_a_users_advantage_and_loss_are_trained_as_a_token_mean(users: str) -> None:
    batch = drawn(2)
    how = algorithm(advantage=f"{users}:centred", loss=f"{users}:reinforce")
    mean = sum(one.reward for one in batch) / len(batch)
    tokens = sum(len(one.trained) for one in batch)
    loss, gradients, metrics = stepped(how, batch, [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]])
    expected = sum(-(one.reward - mean) * token.logprob for one in batch for token in one.trained) / tokens
    assert loss == metrics["loss"] == pytest.approx(expected, rel=1e-5)
    for one in batch:
        for token in one.trained:
            assert gradients[id(token)] == pytest.approx(-(one.reward - mean) / tokens, rel=1e-4, abs=1e-7)


def test_a_users_loss_is_not_asked_about_a_pass_without_a_trained_token(users: str) -> None:
    """The loss's ``max`` would raise on such a pass; skipping it changes neither loss nor gradient nor metrics."""
    batch, cuts = drawn(2), [[1, 4], [0, 2, 3], [5, 6, 7, 8, 9]]
    assert batch[4].tokens
    assert not batch[1].trained + batch[4].trained
    expected = stepped(algorithm(loss=f"{users}:reinforce"), batch, cuts)
    assert stepped(algorithm(loss=f"{users}:farthest"), batch, cuts) == expected


def test_a_users_advantage_and_loss_that_ask_for_stages_get_their_columns(users: str) -> None:
    batch, tokens = drawn(2), 0
    data = columns(batch)
    data.sample_stages["judge/score"] = np.arange(len(batch), dtype=np.float32)
    objective = Objective(settings(algorithm(advantage=f"{users}:staged", loss=f"{users}:weighted")), CPU)
    objective.begin()
    objective.take(data)
    logprobs = torch.tensor([token.logprob for one in batch for token in one.tokens], requires_grad=True)
    loss = objective.loss(logprobs, tokens_of(data, np.arange(len(batch)), CPU)) * objective.scale()
    expected = 0.0
    for row, one in enumerate(batch):
        tokens += len(one.trained)
        expected -= sum(row * token.value * token.logprob for token in one.trained)
    assert float(loss.detach()) == pytest.approx(expected / tokens, rel=1e-4)


def test_a_users_advantage_and_loss_that_ask_for_columns_get_the_typed_ones(users: str) -> None:
    batch = drawn(2)
    data = columns(batch)
    data.sample_columns.update(rank=np.arange(len(batch)), image=np.full(len(batch), b"x", object))
    data.token_columns["teacher"] = np.repeat(data.behavior_logprobs[..., None], 2, axis=2)
    objective = Objective(settings(algorithm(advantage=f"{users}:graded", loss=f"{users}:distilled")), CPU)
    objective.begin()
    objective.take(data)
    logprobs = torch.tensor([token.logprob for one in batch for token in one.tokens], requires_grad=True)
    loss = objective.loss(logprobs, tokens_of(data, np.arange(len(batch)), CPU)) * objective.scale()
    trained = [(row, token) for row, one in enumerate(batch) for token in one.trained]
    expected = sum(row * np.exp(token.logprob - token.behavior) for row, token in trained) / len(trained)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("key", "function", "said"),
    [
        ("advantage", "number", r"it must return a tensor of shape \[10\], it returned float"),
        ("advantage", "short", r"it must return shape \[10\], it returned \[9\]"),
        ("advantage", "nan", "it returned a value that is not finite"),
        ("loss", "number", r"it must return a tensor of shape \[\d+\], it returned float"),
        ("loss", "short", r"it must return shape \[\d+\], it returned \[\d+\]"),
        ("loss", "nan", "it returned a value that is not finite"),
        ("loss", "constant", "what it returns has no gradient"),
    ],
)
def test_what_a_users_function_gives_back_wrongly_is_named(users: str, key: str, function: str, said: str) -> None:
    batch = drawn(2)
    with pytest.raises(ConfigError, match=said) as error:
        stepped(algorithm(**{key: f"{users}:{function}"}), batch, whole(batch))
    assert (error.value.what, error.value.value) == (f"trainer.algorithm.{key}", f"{users}:{function}")


def test_a_broken_log_probability_of_the_engine_is_not_blamed_on_the_users_loss(users: str) -> None:
    batch = drawn(2)
    next(one for one in batch if one.trained).trained[0].behavior = float("nan")
    loss, _, _ = stepped(algorithm(loss=f"{users}:nan"), batch, whole(batch))
    assert loss != loss


def test_tokens_are_the_completions_row_after_row() -> None:
    batch = drawn(3)
    data = columns(batch)
    tokens = tokens_of(data, np.array([6, 0]), CPU)
    chosen = [(row, token) for row in (6, 0) for token in batch[row].tokens]
    assert tokens.row.tolist() == [row for row, _ in chosen]
    assert tokens.mask.tolist() == [token.trained for _, token in chosen]
    assert tokens.behavior.tolist() == [token.behavior if token.trained else 0.0 for _, token in chosen]
    assert tokens.stages[REFERENCE].tolist() == [token.reference for _, token in chosen]
    assert set(tokens.stages) == {REFERENCE, VALUES}
