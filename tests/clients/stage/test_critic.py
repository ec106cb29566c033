# pyright: basic, reportMissingImports=false
"""The critic values the state before each token, learns from its targets, and resumes after a restart."""

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from staleflow.clients.stage.critic import Critic, explained, returns
from staleflow.clients.stage.history import RunHistory
from staleflow.clients.stage.model_stage import Ended
from staleflow.clients.stage.worker import StageGroup
from staleflow.configs import schema
from staleflow.configs.errors import ConfigError
from tests.clients.stage.judged import asked_to_end, column, gae_config, going_on, group, ragged, sequences

Make = Callable[..., Critic]


def values(judge: Critic, groups: list[StageGroup]) -> list[list[float]]:
    return [column(made, "values").tolist() for made in judge.judge(groups, going_on)]


def test_a_fresh_critic_expects_nothing(critic: Make, tmp_path: Path) -> None:
    assert values(critic(seed=None), [group(1)]) == [[0.0] * 10]


def test_a_value_is_what_a_direct_pass_over_the_tokens_before_gives(critic: Make, tmp_path: Path) -> None:
    judge, groups = critic(micro_tokens=24), ragged()
    for one, found in zip(groups, values(judge, groups), strict=True):
        expected: list[float] = []
        for sequence in sequences(one.payload):
            for place in range(len(one.payload.prompt_ids), len(sequence)):
                with torch.no_grad():
                    seen = judge._model.backbone(input_ids=torch.tensor([sequence[:place]])).last_hidden_state
                    expected.append(float(judge._model.head(seen[0, -1])))
        assert found == pytest.approx(expected, abs=1e-5)


def test_a_critic_that_computes_in_bfloat16_keeps_float32_weights(
    model_directory: Path, critic: Make, tmp_path: Path
) -> None:
    settings = gae_config(64)
    low = msgspec.structs.replace(settings, critic=msgspec.convert({"dtype": "bfloat16", "lr": 1e-6}, schema.Critic))
    coarse, exact = Critic(low, model_directory, tmp_path / "coarse"), critic()
    coarse.follow(RunHistory())
    coarse._model.load_state_dict(exact._model.state_dict())
    (found,), (expected,) = values(coarse, [group(1)]), values(exact, [group(1)])
    assert found == pytest.approx(expected, abs=0.1)
    assert found != pytest.approx(expected, abs=1e-4)
    before = coarse._model.backbone.norm.weight.detach().clone()
    coarse.accepted([group(number) for number in range(low.critic.batch)], going_on)
    coarse.close()
    moved = (coarse._model.backbone.norm.weight.detach() - before).abs()
    assert coarse.steps == 1
    assert 0 < float(moved.max()) < 1e-5  # less than bfloat16 resolves near 1


def test_a_token_changes_the_values_behind_it_only(critic: Make, tmp_path: Path) -> None:
    judge, before, after = critic(), group(5, lengths=(8,)), group(5, lengths=(8,))
    after.payload.token_ids = after.payload.token_ids.copy()
    after.payload.token_ids[3] = (after.payload.token_ids[3] + 1) % 18
    (left,), (right,) = values(judge, [before]), values(judge, [after])
    assert left[:4] == pytest.approx(right[:4], abs=1e-6)
    assert left[4] != pytest.approx(right[4], abs=1e-6)


def test_the_target_is_the_discounted_reward_at_the_last_token() -> None:
    one = group(1, lengths=(3, 0, 2))
    one.payload.stages["stage/reward/reward"] = np.array([1.0, 7.0, 2.0], np.float32)
    algorithm = gae_config(gamma=0.5).trainer.algorithm
    assert returns(one.payload, algorithm).tolist() == [0.25, 0.5, 1.0, 1.0, 2.0]


def test_divergence_is_a_part_of_the_target_where_it_is_a_part_of_the_reward() -> None:
    one = group(1, lengths=(2,))
    one.payload.logprobs = np.array([-1.0, -2.0], np.float32)
    one.payload.stages = {
        "stage/reward/reward": np.array([1.0], np.float32),
        "stage/reference/logprobs": np.array([-3.0, -2.5], np.float32),
    }
    algorithm = gae_config(kl_coef=0.1, kl_in_reward=True).trainer.algorithm
    assert returns(one.payload, algorithm).tolist() == pytest.approx([1 - 0.2 - 0.05, 1 - 0.05])
    assert returns(one.payload, gae_config(kl_coef=0.1).trainer.algorithm).tolist() == [1.0, 1.0]


def test_tokens_of_the_environment_have_no_target_and_hide_no_reward() -> None:
    one = group(1, lengths=(5, 2, 3))
    one.payload.loss_mask = np.array([1, 0, 0, 1, 0, 0, 0, 1, 1, 1], np.uint8)
    one.payload.stages["stage/reward/reward"] = np.array([1.0, 7.0, 2.0], np.float32)
    algorithm = gae_config(gamma=0.5).trainer.algorithm
    assert returns(one.payload, algorithm).tolist() == [0.5, 1.0, 0.5, 1.0, 2.0]


def test_it_learns_from_trained_tokens_only(critic: Make, tmp_path: Path) -> None:
    """The turn of the environment, between two tokens of the model, changes neither loss nor weights."""
    with_turn, without = group(1, lengths=(6,)), group(1, lengths=(6,))
    with_turn.payload.loss_mask[:] = [1, 1, 0, 0, 0, 1]
    without.payload.loss_mask[:] = 0
    judge = critic(seed=None)
    bias = judge._model.head.bias
    judge.accepted([without, without], going_on)
    assert (judge.steps, float(bias.detach())) == (1, 0.0)
    sums: list[torch.Tensor] = []
    bias.register_hook(sums.append)  # type: ignore[no-untyped-call]
    judge.accepted([with_turn, with_turn], going_on)
    reward = float(with_turn.payload.stages["stage/reward/reward"][0])
    assert float(sum(sums)) == pytest.approx(-reward)  # the mean of 3 equal errors in each trajectory


def told_apart(number: int) -> StageGroup:
    """Half of the groups are correct: those whose prompt begins with 1."""
    one = group(number, lengths=(3, 5))
    one.payload.prompt_ids = one.payload.prompt_ids.copy()
    one.payload.prompt_ids[:] = number % 2
    one.payload.stages["stage/reward/reward"] = np.full(2, float(number % 2), np.float32)
    return one


def test_it_learns_what_to_expect_of_a_prompt(critic: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    judge = critic(seed=None)
    caplog.set_level(logging.INFO)
    for number in range(0, 80, 2):
        judge.accepted([told_apart(number), told_apart(number + 1)], going_on)
    assert judge.steps == 40
    wrong, right = values(judge, [told_apart(200), told_apart(201)])
    assert np.mean(wrong) < 0.15
    assert np.mean(right) > 0.85
    last = next(record.getMessage() for record in caplog.records if "critic step 40" in record.getMessage())
    assert float(last.split("explained variance ")[1].split(",")[0]) > 0.8


def test_a_step_waits_for_its_groups(critic: Make, tmp_path: Path) -> None:
    judge = critic()
    judge.accepted([group(1)], going_on)
    assert judge.steps == 0
    judge.accepted([group(2), group(3)], going_on)
    assert judge.steps == 1


def test_a_target_that_is_not_finite_changes_nothing(critic: Make, tmp_path: Path) -> None:
    judge, bad = critic(), group(1)
    before = values(judge, [group(9)])
    bad.payload.stages["stage/reward/reward"] = np.array([np.inf, 0.0], np.float32)
    judge.accepted([bad, group(2)], going_on)
    assert (judge.steps, values(judge, [group(9)])) == (1, before)


def test_a_restart_goes_on_as_if_there_had_been_none(critic: Make, tmp_path: Path) -> None:
    straight = critic(tmp_path / "a")
    broken = critic(tmp_path / "b")
    for judge in (straight, broken):
        judge.accepted([group(n) for n in range(5)], going_on)
    broken.close()
    again = critic(tmp_path / "b", seed=None)
    assert again.steps == 2
    for judge in (straight, again):
        judge.accepted([group(n) for n in range(5, 8)], going_on)
    assert again.steps == 4, "the group that waited for its step was saved"
    assert values(again, ragged()) == values(straight, ragged())


def test_a_stop_during_a_step_loses_none_of_its_groups(critic: Make, tmp_path: Path) -> None:
    straight, stopped = critic(tmp_path / "a"), critic(tmp_path / "b")
    straight.accepted([group(n) for n in range(4)], going_on)
    with pytest.raises(Ended):
        stopped.accepted([group(n) for n in range(3)], asked_to_end)
    stopped.close()
    again = critic(tmp_path / "b", seed=None)
    assert again.steps == 0
    again.accepted([group(3)], going_on)
    assert (again.steps, values(again, ragged())) == (2, values(straight, ragged()))


def test_a_killed_critic_goes_on_from_its_last_checkpoint(critic: Make, tmp_path: Path) -> None:
    killed = critic()
    killed.accepted([group(n) for n in range(6)], going_on)  # three steps trigger a checkpoint
    expected = values(killed, ragged())
    killed.accepted([group(n) for n in range(2)], going_on)
    killed._files.close()  # as the kernel does at a kill
    (tmp_path / "0.part").write_bytes(b"half of a snapshot")
    again = critic(seed=None)
    assert (again.steps, values(again, ragged())) == (3, expected)
    assert not (tmp_path / "0.part").exists()


def test_a_second_critic_is_refused(critic: Make, tmp_path: Path) -> None:
    first = critic()
    with pytest.raises(ConfigError, match="another critic of this run uses the folder; a run has only one critic"):
        critic()
    first.close()
    critic().close()


def test_explained_variance_is_1_for_the_truth_and_0_for_a_constant() -> None:
    targets = np.array([0.0, 1.0, 1.0, 0.0], np.float32)
    assert explained(np.zeros(4), targets) == 1.0
    assert explained(targets - 0.5, targets) == 0.0
    assert explained(np.ones(3), np.ones(3)) == 0.0
    assert explained(np.zeros(0), np.zeros(0)) == 0.0
