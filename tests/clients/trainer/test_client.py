"""The trainer client works against a real service: batches, versions, fences, and restarts."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from staleflow.clients.trainer.backends.base import Stopped
from staleflow.clients.trainer.client import TrainerClient
from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.clients.trainer.errors import BadVersion, Fenced
from staleflow.configs.errors import ConfigError
from staleflow.process.readiness import SLOT_VARIABLE
from staleflow.protocols.consistency.ids import Lineage, Version
from tests.clients.trainer.service import Service, serving


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """One run for all tests except those that break it; each test continues from the run's state, on its surviving
    lineage. Its groups start early, as ``batches(ahead=True)`` needs."""
    with serving("coordination.admission=fill") as service:
        yield service


def joined(service: Service, *, back: int = 0) -> TrainerClient:
    """A trainer at the newest version, or ``back`` versions before it."""
    trainer = TrainerClient(service.address)
    attached = trainer.attach()
    if trainer.join(attached.lineage, Version(max(attached.version, 0) - back)).version < 0:
        trainer.publish_initial(weights(0))
    return trainer


def weights(version: int) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    return {"w": np.full((3, 2), version, np.float32)}


def train(trainer: TrainerClient, steps: int) -> list[TrainBatch]:
    seen: list[TrainBatch] = []
    for batch in trainer.batches(steps):
        seen.append(batch)
        assert trainer.commit(weights(batch.step + 1)) == batch.step + 1
    return seen


def one(trainer: TrainerClient) -> TrainBatch:
    """The next batch, left uncommitted."""
    return next(trainer.batches(trainer.version + 1))


def same(left: TrainBatch, right: TrainBatch) -> bool:
    columns = (
        "input_ids",
        "attention_mask",
        "loss_mask",
        "behavior_logprobs",
        "token_versions",
        "rewards",
        "group_ids",
    )
    arrays = all(np.array_equal(getattr(left, name), getattr(right, name)) for name in columns)
    return arrays and left.digest == right.digest


def test_each_step_is_served_its_batch_and_each_commit_makes_a_version(service: Service) -> None:
    with joined(service) as trainer:
        first = trainer.version
        seen = train(trainer, first + 5)
    assert [batch.step for batch in seen] == [first + step for step in range(5)]
    groups = [group for batch in seen for group in np.unique(batch.group_ids).tolist()]
    assert len(groups) == len(set(groups)) == 15
    assert {event["version"] for event in service.trace("publish")} >= {first + step for step in range(6)}
    assert {event["step"] for event in service.trace("consume")} >= {first + step for step in range(5)}


def test_whoever_waits_for_a_batch_may_look_around_meanwhile(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("staleflow.clients.trainer.client.POLL_INTERVAL_S", 0.001)
    looks: list[bool] = []
    with joined(service) as trainer:
        trainer.on_wait = lambda: looks.append(trainer.full())
        train(trainer, trainer.version + 3)
    assert set(looks) == {False}


def test_a_batch_is_what_engine_and_reward_made_of_its_rows(service: Service) -> None:
    with joined(service) as trainer:
        batch = one(trainer)
    assert batch.input_ids.shape[0] == 6
    assert batch.off_policy()[1] <= service.config.staleness.max_staleness
    assert batch.trained_tokens == int(batch.completion_lengths.sum()) > 0
    assert np.array_equal(batch.behavior_logprobs != 0, batch.token_versions >= 0)
    assert [row["prompt"] for row in batch.rows] == [f"p{group % 50}" for group in batch.group_ids.tolist()]
    for row in range(6):  # the reward is the length of the ids as text
        ids = batch.input_ids[row][batch.loss_mask[row]].tolist()
        assert batch.rewards[row] == len(" ".join(map(str, ids)))


def test_a_trainer_that_comes_back_is_served_the_same_batch_byte_for_byte(service: Service) -> None:
    with joined(service) as trainer:
        train(trainer, trainer.version + 2)
        first = one(trainer)
    with joined(service) as trainer:
        again = one(trainer)
    assert same(first, again)
    assert again.batch == first.batch
    assert again.attempt > first.attempt


def test_coming_back_from_an_older_version_rolls_the_run_back_and_replays_its_batches(service: Service) -> None:
    with joined(service) as trainer:
        seen = train(trainer, trainer.version + 4)
    before = len(service.trace("rollback"))
    with joined(service, back=2) as trainer:
        again = train(trainer, trainer.version + 3)
    assert same(seen[2], again[0])
    assert [batch.step for batch in again] == [seen[2].step + step for step in range(3)]
    assert {batch.lineage for batch in again} == {seen[2].lineage + 1}
    assert again[0].batch > seen[2].batch
    assert [event["to_version"] for event in service.trace("rollback")[before:]] == [seen[2].step]


def test_a_version_older_than_the_last_checkpoint_is_refused(service: Service) -> None:
    with joined(service) as trainer:
        seen = train(trainer, trainer.version + 3)
        trainer.checkpointed(seen[0].lineage, Version(seen[0].step + 2))
    with TrainerClient(service.address) as trainer, pytest.raises(BadVersion, match=f"version {seen[0].step + 1} of"):
        trainer.join(seen[0].lineage, Version(seen[0].step + 1))


def test_a_run_goes_back_to_an_older_kept_checkpoint_whose_weights_are_published_again(service: Service) -> None:
    with joined(service) as trainer:
        seen = train(trainer, trainer.version + 6)
        lineage, older, newest = seen[0].lineage, Version(seen[0].step + 1), Version(seen[0].step + 3)
        assert trainer.checkpointed(lineage, older) == older
        assert trainer.checkpointed(lineage, newest, keep=2) == older
        seen += train(trainer, trainer.version + 2)  # the parameter server then deletes unneeded versions
    file = service.run_dir / "parameters" / f"{lineage}-{older}.bin"
    deadline = time.monotonic() + 30.0
    while file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with TrainerClient(service.address) as trainer:
        assert trainer.join(lineage, older).lineage == lineage + 1
        trainer.holds(weights(older))
        assert file.exists()
        again = train(trainer, older + 3)
    assert same(seen[1], again[0])
    assert [batch.step for batch in again] == [older, older + 1, older + 2]


def test_a_trainer_that_joins_again_publishes_no_later_weights_as_the_joined_version(service: Service) -> None:
    with joined(service) as trainer:
        seen = train(trainer, trainer.version + 6)
        lineage, older = seen[0].lineage, Version(seen[0].step + 1)
        assert trainer.checkpointed(lineage, older) == older
        assert trainer.checkpointed(lineage, Version(older + 2), keep=2) == older
        train(trainer, trainer.version + 2)
        file = service.run_dir / "parameters" / f"{lineage}-{older}.bin"
        deadline = time.monotonic() + 30.0
        while file.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        trainer.join(lineage, older)
        trainer._commits.republish_damaged(trainer.current_term[0])  # pyright: ignore[reportPrivateUsage]
        assert not file.exists()
        trainer.holds(weights(older))
        assert file.exists()


def test_the_older_of_two_trainers_is_fenced_on_everything_it_does(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SLOT_VARIABLE, "of-the-trainer")  # the newer takes the name of the older, still alive
    with joined(service) as older:
        step = one(older).step
        with joined(service) as newer:
            with pytest.raises(Fenced, match="another trainer has joined"):
                older.commit(weights(step + 1))
            with pytest.raises(Fenced):
                older.checkpointed(Lineage(0), Version(0))
            with pytest.raises(Fenced):
                older.finished()
            with pytest.raises(Fenced):
                one(older)
            assert [batch.step for batch in train(newer, step + 1)] == [step]


def test_a_batch_must_be_committed_before_the_next(service: Service) -> None:
    with joined(service) as trainer:
        batches = trainer.batches(trainer.version + 10)
        next(batches)
        with pytest.raises(RuntimeError, match="was not committed"):
            next(batches)


def test_a_trainer_may_read_one_batch_ahead_and_commits_in_order(service: Service) -> None:
    with joined(service) as trainer:
        first = trainer.version
        batches = trainer.batches(first + 3, ahead=True)
        assert [next(batches).step, next(batches).step] == [first, first + 1]
        with pytest.raises(RuntimeError, match="cannot quarantine"):
            trainer.quarantine([], "too long")
        assert trainer.commit(weights(1)) == first + 1
        assert next(batches).step == first + 2
        assert [trainer.commit(weights(2)), trainer.commit(weights(3))] == [first + 2, first + 3]
        assert next(batches, None) is None
        with pytest.raises(RuntimeError, match="no batch"):
            trainer.commit(weights(4))
    consumed = [event["step"] for event in service.trace("consume")]
    assert consumed[-3:] == [first, first + 1, first + 2]


def test_a_trainer_reads_no_more_than_one_batch_ahead(service: Service) -> None:
    with joined(service) as trainer:
        batches = trainer.batches(trainer.version + 10, ahead=True)
        next(batches)
        next(batches)
        with pytest.raises(RuntimeError, match="was not committed"):
            next(batches)


def test_state_dicts_are_published_as_they_are_tied_tensors_once(service: Service) -> None:
    tensor = torch.ones(4, 4)
    with joined(service) as trainer:
        batch = one(trainer)
        trainer.commit({"a": tensor, "tied": tensor, "b": torch.ones(3, dtype=torch.bfloat16)})
    (published,) = [event for event in service.trace("publish") if event["version"] == batch.step + 1][-1:]
    assert 16 * 4 + 3 * 2 <= published["bytes"] < 2 * 16 * 4 + 3 * 2 + 64


def test_a_trainer_that_waits_for_a_batch_can_be_interrupted() -> None:
    with serving("staleness.max_staleness=0") as service, joined(service) as trainer:
        batches = trainer.batches(10)
        next(batches)
        trainer.commit(weights(1))
        service.processes["rollout"].kill()
        threading.Timer(0.2, trainer.interrupt).start()
        rest = 0
        for batch in batches:  # batches under way may still arrive
            rest += 1
            trainer.commit(weights(batch.step + 1))
        assert rest <= 1


@pytest.mark.parametrize("returning", [False, True])
def test_a_newest_version_that_was_damaged_on_disk_is_published_again(
    returning: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No instance has the version, so no batch can come first; a restarted trainer that published it earlier repeats
    it, too."""
    monkeypatch.setattr("staleflow.clients.trainer.client.POLL_INTERVAL_S", 0.2)
    with serving("staleness.max_staleness=0") as service:
        service.processes["rollout"].kill()
        service.processes["rollout"].wait()
        with joined(service) as trainer:
            if returning:
                trainer.close()
                trainer = joined(service)
                trainer.holds(weights(0))
            damage(service.run_dir / "parameters" / "0-0.bin")
            service.start("rollout", "attach", "rollout", "--name", "rollout-0")
            assert one(trainer).step == 0
            trainer.close()
        assert [event["ok"] for event in service.trace("pull")][0 :: len(service.trace("pull")) - 1] == [False, True]


@pytest.mark.parametrize("returning", [False, True])
def test_a_newest_version_that_the_server_has_lost_is_published_again(
    returning: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart the server cannot read the version. A trainer that restarted with it does not know its batch."""
    monkeypatch.setattr("staleflow.clients.trainer.client.POLL_INTERVAL_S", 0.2)
    with serving("staleness.max_staleness=0") as service:
        with joined(service) as trainer:
            batches = trainer.batches(2)
            next(batches)
            end(service, "rollout")
            trainer.commit(weights(1))
            batches.close()
            end(service, "parameters")
            lost = [path for path in (service.run_dir / "parameters").iterdir() if path.name.startswith("0-1.")]
            for path in lost:
                path.unlink()
            assert lost
            service.start("parameters", "serve", "parameters")
            if returning:
                trainer.close()
                trainer = joined(service)
                trainer.holds(weights(1))
            service.start("rollout", "attach", "rollout", "--name", "rollout-0")
            assert one(trainer).step == 1
            trainer.close()
        assert [event["version"] for event in service.trace("publish")] == [0, 1]


def end(service: Service, name: str) -> None:
    service.processes[name].kill()
    service.processes[name].wait()


def damage(path: Path) -> None:
    """Flip one bit, as a failing disk does."""
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def test_joining_can_be_interrupted_while_nobody_answers(tmp_path: Path) -> None:
    with TrainerClient(f"ipc://{tmp_path}/nobody") as trainer:
        threading.Timer(0.1, trainer.interrupt).start()
        with pytest.raises(Stopped):
            trainer.join(Lineage(0), Version(0))


def test_weights_that_the_parameter_server_never_takes_end_the_trainer_with_the_reason() -> None:
    with serving("parameters.budget_mb=1") as service, TrainerClient(service.address) as trainer:
        trainer.join(Lineage(0), Version(0))
        with pytest.raises(ConfigError, match=r"version is 0; .* parameters\.budget_mb allows 1 MiB"):
            trainer.publish_initial({"w": np.zeros(1 << 20, np.float32)})
