# pyright: basic, reportMissingImports=false
"""The critic goes back with its run, to the newest snapshot that learned nothing from an abandoned version.

``gae_config`` has a checkpoint every 3 versions, and the critic learns from 2 groups at once.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from staleflow.clients.stage.critic import Critic
from staleflow.clients.stage.critic_files import CriticState, needed
from staleflow.clients.stage.history import RunHistory, newest
from staleflow.protocols.consistency.ids import Lineage, Version
from tests.clients.stage.judged import going_on, group

Make = Callable[..., Critic]


def parameters(critic: Critic) -> dict[str, list[float]]:
    """Copy weights and moments, by name."""
    copied: dict[str, list[float]] = {}
    for name, parameter in critic._model.named_parameters():
        copied[name] = parameter.detach().flatten().tolist()
        for key, value in critic._adam.state[parameter].items():
            copied[f"{name} {key}"] = torch.as_tensor(value).flatten().tolist()
    return copied


def learn(critic: Critic, *versions: int, lineage: int = 0) -> list[dict[str, list[float]]]:
    """Let the critic learn from two groups of each version; return its state after each version."""
    states: list[dict[str, list[float]]] = []
    for version in versions:
        pair = [group(10 * version + n, lineage=lineage, version=version) for n in range(2)]
        critic.accepted(pair, going_on)
        states.append(parameters(critic))
    return states


def rolled_back(*to: int, checkpoints: tuple[int, ...] = (0,)) -> RunHistory:
    """History of a run after rollbacks to these versions, ascending."""
    forks = ((0, 0), *((lineage + 1, version + 1) for lineage, version in enumerate(to)))
    return RunHistory(forks=forks, checkpoints=checkpoints)


def test_a_rollback_restores_the_newest_snapshot_that_is_not_newer(
    critic: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    judge = critic()
    states = learn(judge, *range(8))
    assert judge._files.versions() == [0, 3, 6], "what it had learned when it got beyond a checkpoint's version"
    judge.follow(rolled_back(6))
    assert (judge.steps, parameters(judge)) == (7, states[6])
    assert judge._files.versions() == [0, 3, 6]
    line = "critic rolled back with the run to lineage 1: from step 8 to step 7, of versions up to 6"
    assert line in caplog.text
    judge.follow(rolled_back(5))
    assert (judge.steps, parameters(judge)) == (4, states[3])
    assert judge._files.versions() == [0, 3], "the snapshot of an abandoned version is deleted"


def test_it_goes_on_after_a_rollback_as_if_the_abandoned_versions_had_never_been(critic: Make, tmp_path: Path) -> None:
    judge, straight = critic(tmp_path / "a"), critic(tmp_path / "b")
    learn(judge, *range(6))
    judge.follow(rolled_back(3))
    learn(straight, *range(4))
    straight.follow(rolled_back(3))
    assert learn(judge, 4, 5, lineage=1) == learn(straight, 4, 5, lineage=1)


def test_a_rollback_of_which_it_has_learned_nothing_changes_nothing(critic: Make) -> None:
    judge = critic()
    states = learn(judge, *range(6))
    judge.follow(rolled_back(5))
    assert (judge.steps, parameters(judge)) == (6, states[-1])


def test_a_rollback_behind_every_snapshot_restores_the_initial_model(critic: Make) -> None:
    judge = critic(seed=None)
    fresh = parameters(judge)
    learn(judge, 2)
    judge.follow(rolled_back(1))
    assert (judge.steps, parameters(judge)) == (0, fresh)


def test_a_group_of_an_abandoned_version_is_not_learned(critic: Make) -> None:
    judge = critic(history=rolled_back(3))
    before = parameters(judge)
    mixed = group(1, version=3)
    mixed.payload.segments[1, 2] = 4
    judge.accepted([mixed, group(2, version=5)], going_on)
    assert (judge.steps, judge._buffered, parameters(judge)) == (0, [], before)
    judge.accepted([group(3, version=3), group(4, lineage=1, version=4)], going_on)
    assert judge.steps == 1


def test_a_group_that_waits_for_its_step_belongs_to_the_snapshot(critic: Make) -> None:
    judge = critic()
    judge.accepted([group(n, version=3) for n in range(3)], going_on)
    learn(judge, 4)
    judge.follow(rolled_back(3))
    assert (judge.steps, [newest(payload) for payload in judge._buffered]) == (1, [(0, 3)])
    assert judge._buffered[0].token_ids.tolist() == group(2, version=3).payload.token_ids.tolist()


def test_a_killed_critic_that_missed_a_rollback_starts_from_the_snapshot_before_it(critic: Make) -> None:
    killed = critic()
    states = learn(killed, *range(8))
    killed._files.close()  # as the kernel does at a kill
    again = critic(seed=None, history=rolled_back(4))
    assert (again.steps, parameters(again)) == (4, states[3])


@pytest.mark.parametrize("damage", ["torn", "flipped", "another model"])
def test_a_damaged_snapshot_is_set_aside_and_the_one_before_is_used(
    critic: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    judge = critic()
    states = learn(judge, *range(8))
    path = tmp_path / "6.safetensors"
    raw = bytearray(path.read_bytes())
    match damage:
        case "torn":
            path.write_bytes(raw[:-100])
        case "flipped":
            raw[-100] ^= 1
            path.write_bytes(raw)
        case _:
            state = CriticState(steps=7, newest=(Lineage(0), Version(6)))
            judge._files.save(state, torch.nn.Linear(2, 2), judge._adam, [])
    judge.follow(rolled_back(6))
    assert (judge.steps, parameters(judge)) == (4, states[3])
    assert "6.safetensors is damaged (" in caplog.text
    assert sorted(file.name for file in tmp_path.glob("*.*")) == [
        ".lock",
        "0.safetensors",
        "3.safetensors",
        "6.damaged",
    ]


def test_without_an_intact_snapshot_the_critic_starts_again_and_reports_it(
    critic: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "3.safetensors").write_bytes(b"\x08")
    caplog.set_level(logging.INFO)
    judge = critic(seed=None)
    assert judge.steps == 0
    assert f"critic snapshot {tmp_path / '3.safetensors'} is damaged" in caplog.text
    assert "resumed" not in caplog.text


def test_every_checkpoint_of_the_trainer_keeps_a_snapshot(critic: Make) -> None:
    judge = critic()
    learn(judge, *range(8))
    judge.follow(RunHistory(checkpoints=(3, 6)))
    assert judge._files.versions() == [3, 6]
    learn(judge, 8, 9, 10)
    assert judge._files.versions() == [3, 6, 9]
    judge.follow(RunHistory(checkpoints=(9,)))
    assert judge._files.versions() == [9]


def test_a_checkpoint_that_is_not_registered_yet_keeps_a_snapshot() -> None:
    assert needed([0, 19, 22, 38, 41, 47], checkpoints=(0, 20), every=20) == {0, 19, 38, 47}
    assert needed([37], checkpoints=(20,), every=20) == {37}
    assert needed([], checkpoints=(0,), every=20) == set()
