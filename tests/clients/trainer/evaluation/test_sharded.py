# pyright: basic, reportMissingImports=false
# mypy: disable-error-code="no-untyped-call"
"""Ranks that share a model run equally many evaluation passes and end together. Ranks are threads here."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from staleflow.clients.rollout.engines.base import Sampling
from staleflow.clients.rollout.engines.transformers.engine import TransformersEngine, generate
from staleflow.clients.rollout.engines.transformers.kv_cache import GROWTH
from staleflow.clients.trainer.backends.base import Stopped, Stopping
from staleflow.clients.trainer.backends.collectives import OneRank
from staleflow.clients.trainer.evaluation.sharded import accompany, lead
from staleflow.protocols.consistency.ids import Version

LIMIT_S = 100.0
RANKS = 3
DONE = {"reward/eval": 1.0}


class Ranks:
    """``max`` over threads; each call waits for the other threads' calls, and so does each pass of the model."""

    def __init__(self) -> None:
        self.meeting = threading.Barrier(RANKS, timeout=LIMIT_S)
        self._said: dict[int, Any] = {}

    def max(self, values: Any) -> Any:
        self._said[threading.get_ident()] = values
        self.meeting.wait()
        most = torch.stack(list(self._said.values())).amax(0)
        self.meeting.wait()
        return most


class Sharded(torch.nn.Module):
    """A model whose every pass needs every rank."""

    device = torch.device("cpu")

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(_attn_implementation="eager"))
        self.passes: list[tuple[list[list[int]], bool, bool]] = []

    def forward(self, input_ids: Any, use_cache: bool = True) -> None:
        self.passes.append((input_ids.tolist(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        self._ranks.meeting.wait()


class Passes:
    """An evaluation of ``count`` passes, which checks before each pass whether it should stop."""

    def __init__(self, count: int) -> None:
        self.count = count

    def run(self, model: Any, version: Version, stopping: Stopping) -> dict[str, float]:
        for number in range(self.count):
            if stopping():
                raise Stopped
            with torch.inference_mode():
                model(input_ids=torch.tensor([[number, int(version)]]))
        return DONE


def end(work: Callable[[], Any]) -> Any:
    """Return the result of one rank, or its failure."""
    try:
        return work()
    except Stopped:
        return "stopped"


def evaluated(passes: int, *stopping: Stopping) -> tuple[list[Any], list[Sharded]]:
    """Return the outcome and the model of each rank; rank 0 leads."""
    ranks: Any = Ranks()
    models = [Sharded(ranks) for _ in range(RANKS)]
    works: list[Callable[[], Any]] = [partial(lead, Passes(passes), models[0], Version(7), ranks, stopping[0])]
    works += [partial(accompany, models[rank], ranks, stopping[rank]) for rank in (1, 2)]
    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(end, works)), models


def going_on() -> bool:
    return False


def after(looks: int) -> Stopping:
    """Request a stop after ``looks`` checks."""
    left = iter([False] * looks)
    return lambda: next(left, True)


def test_every_rank_runs_as_many_passes_as_the_first_whatever_that_is_about() -> None:
    results, (first, *others) = evaluated(4, going_on, going_on, going_on)
    assert results == [DONE, None, None]
    assert [ids for ids, _, _ in first.passes] == [[[number, 7]] for number in range(4)]
    for other in others:
        assert [ids for ids, _, _ in other.passes] == [[[0]]] * 4
    assert not any(grad or inference for model in (first, *others) for _, grad, inference in model.passes)
    assert all(model.training for model in (first, *others))


def test_an_evaluation_without_a_pass_holds_nobody() -> None:
    assert evaluated(0, going_on, going_on, going_on)[0] == [DONE, None, None]


class Written:
    """An evaluation by the real engine: its completions outgrow the initial columns of its cache twice."""

    token_ids: list[int]

    def run(self, model: Any, version: Version, stopping: Stopping) -> dict[str, float]:
        engine = TransformersEngine(model, [], slots=1)
        self.token_ids = generate(engine, [[5, 6]], 1, Sampling(max_new_tokens=2 * GROWTH))[0][0].token_ids.tolist()
        return DONE


def test_passes_outside_of_inference_mode_go_on_over_a_cache_that_grew() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=31, max_position_embeddings=256, **sizes))
    led, alone = Written(), Written()
    assert lead(led, model, Version(7), OneRank(torch.device("cpu")), going_on) == DONE
    alone.run(model, Version(7), going_on)
    assert led.token_ids == alone.token_ids


@pytest.mark.parametrize("rank", range(RANKS))
def test_when_one_rank_is_asked_to_end_all_of_them_end(rank: int) -> None:
    stopping: list[Stopping] = [going_on] * RANKS
    stopping[rank] = after(2)
    results, models = evaluated(9, *stopping)
    assert results == ["stopped"] * RANKS
    assert len({len(model.passes) for model in models}) == 1
    assert 2 <= len(models[0].passes) <= 4


def test_a_rank_that_is_asked_to_end_behind_the_last_pass_ends_them_all_too() -> None:
    results, _ = evaluated(2, going_on, after(2), going_on)
    assert results == ["stopped"] * RANKS
