# pyright: basic, reportMissingImports=false
"""An environment plays held-out prompts: real processes, a real socket, the trainer's own model."""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from staleflow.clients.rollout.engines.thread import CLOSE_TIMEOUT_S
from staleflow.clients.trainer.backends.base import OutOfMemory, Stopped
from staleflow.clients.trainer.evaluation.factory import open_evaluation
from staleflow.clients.trainer.torch_trainer import TorchTrainer
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import Step, Version
from tests.clients.trainer.making import batch, config

HERE = Path(__file__).parent
REWARDS = HERE.parent.parent / "user_code" / "rewards.py"

Make = Callable[..., TorchTrainer]


def going_on() -> bool:
    return False


@pytest.fixture
def trainer(model_directory: Path, tmp_path: Path) -> Make:
    """Build a trainer whose held-out rows end in the given ways, in order."""

    def make(*then: str, reward: str = "", seed: int = 0, slots: int = 64, timeout_s: float = 60.0) -> TorchTrainer:
        held_out = tmp_path / "held_out.jsonl"
        rows = [{"prompt": f"{number}+1=", "then": what} for number, what in enumerate(then)]
        held_out.write_text("".join(json.dumps(row) + "\n" for row in rows))
        table: dict[str, Any] = msgspec.to_builtins(config()) | {"seed": seed}
        table["prompts"] |= {"eval_path": str(held_out)}
        table["environment"] |= {"run": f"{HERE}/held_out_environment.py:Asked", "timeout_s": timeout_s}
        table["reward"] |= {"run": f"{REWARDS}:{reward}" if reward else "", "retries": 0}
        table["rollout"] |= {"max_inflight": slots}
        settings = msgspec.convert(table, Config)
        return TorchTrainer(settings, model_directory, open_evaluation(settings, model_directory))

    return make


def evaluated(trainer: TorchTrainer) -> dict[str, float]:
    return trainer.evaluate(Version(0), going_on)


def children() -> list[str]:
    """Child processes of user code that still run."""
    found = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    names = [Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in found]
    return [name for name in names if "environment_child" in name or "stage.child" in name]


def nothing_is_left() -> bool:
    return not children() and all(thread.name != "engine" for thread in threading.enumerate())


def test_each_held_out_prompt_is_played_with_the_same_draws_every_time_and_nothing_is_disturbed(
    trainer: Make, model_directory: Path
) -> None:
    one, clean = trainer(*["sum"] * 6), TorchTrainer(config(), model_directory)
    random = torch.get_rng_state()
    first = evaluated(one)
    assert first == evaluated(one)
    assert first.keys() == {"reward/eval", "length/eval"}
    assert torch.equal(torch.get_rng_state(), random)
    assert one.model.training is clean.model.training
    for step in range(2):
        values = [made.train(batch(step), Step(step), going_on).values for made in (one, clean)]
        assert values[0]["loss"] == values[1]["loss"]
    assert evaluated(one) != first, "it is the trainer's model that is asked"
    assert evaluated(trainer(*["sum"] * 6, seed=1)) != first
    assert evaluated(trainer(*["sum"] * 6, slots=2)) == first, "whoever else is in the batch"
    assert nothing_is_left()


def test_the_length_counts_what_the_model_wrote_and_not_what_the_environment_did(trainer: Make) -> None:
    values = evaluated(trainer(*["tokens"] * 4))
    assert values["length/eval"] == values["reward/eval"]
    assert 2 <= values["length/eval"] <= 9


def test_an_episode_without_a_reward_of_its_own_is_scored_by_the_function(trainer: Make) -> None:
    own, scored = evaluated(trainer("tokens")), evaluated(trainer("nothing", reward="length"))
    assert scored["length/eval"] == own["length/eval"]
    assert scored["reward/eval"] >= own["reward/eval"] + 1, "the text of all turns, what the environment wrote included"
    assert evaluated(trainer("tokens", reward="raises")) == own, "the environment's own reward comes first"


def test_episodes_that_fail_are_left_out_and_counted_and_the_others_say_what_they_said(trainer: Make) -> None:
    kinds = ("sum", "raise", "nan", "sum", "text", "other", "long", "sum")
    some = evaluated(trainer(*kinds))
    assert some["reward/eval_failed"] == 5.0
    every = [evaluated(trainer(*["none"] * place, "sum"))["reward/eval"] for place in (0, 3, 7)]
    assert some["reward/eval"] == pytest.approx(sum(every) / 3)
    assert nothing_is_left()


def test_an_episode_that_does_not_end_in_time_is_counted_as_failed(trainer: Make) -> None:
    assert evaluated(trainer("hang", timeout_s=1.0)) == {"reward/eval_failed": 1.0}
    assert nothing_is_left()


def test_an_episode_that_the_function_cannot_judge_is_counted_too(trainer: Make) -> None:
    values = evaluated(trainer("sum", "none", "none", reward="raises"))
    assert values["reward/eval_failed"] == 2.0
    assert values["reward/eval"] == evaluated(trainer("sum"))["reward/eval"]


def test_without_any_reward_there_is_no_mean(trainer: Make) -> None:
    assert evaluated(trainer("raise", "raise")) == {"reward/eval_failed": 2.0}


def test_asked_to_end_it_ends_once_the_engine_has_let_go_of_the_model(
    trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trainer(*["hang"] * 3)
    begun, forward = threading.Event(), one.model.forward

    def slow(**inputs: Any) -> Any:
        if not begun.is_set():
            begun.set()
            time.sleep(CLOSE_TIMEOUT_S + 0.5)
        return forward(**inputs)

    monkeypatch.setattr(one.model, "forward", slow)
    with pytest.raises(Stopped):
        one.evaluate(Version(0), begun.is_set)
    assert nothing_is_left()
    assert one.train(batch(0), Step(0), going_on).bad == ""


@pytest.mark.parametrize("reason", ["CUDA out of memory. Tried to allocate 2.00 GiB", "the weights are a ruin"])
def test_an_engine_that_fails_ends_it_with_the_reason(
    trainer: Make, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    one = trainer(*["sum"] * 3)
    memory = "memory" in reason

    def fails(**_: Any) -> Any:
        raise (torch.OutOfMemoryError if memory else RuntimeError)(reason)

    monkeypatch.setattr(one.model, "forward", fails)
    with pytest.raises(OutOfMemory if memory else RuntimeError) as error:
        evaluated(one)
    told = (
        "version 0: out of memory during the evaluation on the held-out prompts. A run's configuration is fixed: start "
        "a new one with rollout.max_inflight below 64, and model.path at the newest checkpoint if there is one; its "
        "optimizer starts afresh "
    )
    assert str(error.value) == (f"{told}({reason})" if memory else reason)
    assert not memory or (isinstance(error.value, OutOfMemory) and error.value.can_save)
    assert nothing_is_left()
