"""Training continues while a checkpoint is written, which exists and is registered only once it is complete."""

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from staleflow.clients.trainer import torch_trainer
from staleflow.clients.trainer.backends.base import StepResult, Stopping, Weights
from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.clients.trainer.errors import BadVersion
from staleflow.clients.trainer.torch_trainer import TorchTrainer
from staleflow.protocols.consistency.ids import Step
from tests.clients.trainer.making import batch, config
from tests.clients.trainer.test_loop import Counting, Refusing, Told, damage, kept, loop

LIMIT_S = 100.0


class Copying(Counting):
    """Writes the copy of version 2 once step ``until`` has been trained, and any other at once."""

    def __init__(self, folder: Path, until: int = 3, error: Exception | None = None) -> None:
        super().__init__()
        self._folder, self._until, self._error = folder, until, error
        self.trained = threading.Event()
        self.complete: list[int] = []
        """Checkpoints that existed when step ``until`` had been trained."""

    def begin_save(self, directory: Path) -> Callable[[], None]:
        count = self.count

        def write() -> None:
            if count == 2:
                assert self.trained.wait(LIMIT_S)
            if self._error is not None:
                raise self._error
            (directory / "count").write_text(str(count))

        return write

    def train(self, batch: TrainBatch, step: Step, stopping: Stopping) -> StepResult:
        result = super().train(batch, step, stopping)
        if step == self._until:
            self.complete = kept(self._folder)
            self.trained.set()
        return result


def test_steps_train_while_a_checkpoint_is_written_and_the_next_one_waits_for_it(tmp_path: Path) -> None:
    client, backend = Told(), Copying(tmp_path)
    loop(tmp_path, client, backend).run()
    assert backend.complete == [], "two steps after its copy was taken, the checkpoint did not exist yet"
    assert [version for version, _ in client.published] == list(range(7))
    registered = [("checkpointed", 0, version) for version in (2, 4, 6)]
    assert client.told == [("join", 0, 0), *registered, ("finished", "")]
    assert {name: (tmp_path / name / "count").read_text() for name in "246"} == {name: name for name in "246"}


def test_without_the_key_training_waits_for_every_checkpoint(tmp_path: Path) -> None:
    backend = Copying(tmp_path)
    loop(tmp_path, Told(), backend, config(steps=6, checkpoint_every=2, async_checkpoints=False)).run()
    assert backend.complete == [2]


def test_an_error_of_the_writing_thread_ends_the_trainer_and_the_older_checkpoint_stays(tmp_path: Path) -> None:
    loop(tmp_path, Told(batches=1), Counting()).run()
    client = Told(version=1)
    with pytest.raises(OSError, match="the disk is full"):
        loop(tmp_path, client, Copying(tmp_path, error=OSError("the disk is full"))).run()
    assert client.told == [("join", 0, 1)]
    assert kept(tmp_path) == [1]


@pytest.mark.parametrize("drained", ["", "night"])
def test_a_stop_and_a_drain_wait_for_the_checkpoint(tmp_path: Path, drained: str) -> None:
    client = Told(batches=3)
    client.drained = drained
    loop(tmp_path, client, Copying(tmp_path, until=2)).run()
    registered = [("checkpointed", 0, 2), ("checkpointed", 0, 3)]
    assert client.told == [("join", 0, 0), *registered, *([("finished", "")] if drained else [])]
    assert kept(tmp_path) == [3, 2]


def test_a_trainer_whose_step_is_void_completes_the_checkpoint_of_the_version_before(tmp_path: Path) -> None:
    client = Refusing()
    with pytest.raises(BadVersion, match="batch 4 was taken back"):
        loop(tmp_path, client, Copying(tmp_path)).run()
    assert kept(tmp_path) == [2]
    assert ("checkpointed", 0, 3) not in client.told
    resumed = Told(version=3)
    loop(tmp_path, resumed, Counting()).run()
    assert resumed.told[0] == ("join", 1, 2)


def test_a_server_that_fills_up_waits_for_the_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    client = Told()
    client.crowded_at = (3, 4)
    loop(tmp_path, client, Copying(tmp_path), config(steps=6, checkpoint_every=2)).run()
    assert [version for _, _, version in client.told[1:-1]] == [2, 4, 6]


def test_a_full_server_gets_room_from_the_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    client, backend = Told(), Copying(tmp_path)
    backend.trained.set()
    client.full_at = (2,)
    loop(tmp_path, client, backend, config(steps=3, checkpoint_every=2)).run()
    assert client.told[1:3] == [("checkpointed", 0, 2)] * 2
    assert client.kept == [2, 3], "nothing is kept for version 0"


class Trainer(TorchTrainer):
    """Publishes all weights as one array, as the scripted client expects."""

    def weights(self) -> Weights:
        found = super().weights()
        return {"w": np.concatenate([np.ravel(array) for _, array in found.items()])}


def published(client: Told) -> dict[int, list[float]]:
    return dict(client.published)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_weights_optimizer_and_position_in_the_data_return_to_one_version_after_a_fallback(
    model_directory: Path, tmp_path: Path, *, asynchronous: bool
) -> None:
    settings = config(steps=6, checkpoint_every=2, warmup_steps=4, async_checkpoints=asynchronous)
    straight = Told()
    loop(tmp_path / "straight", straight, Trainer(settings, model_directory), settings).run()
    loop(tmp_path / "run", Told(batches=5), Trainer(settings, model_directory), settings).run()
    assert kept(tmp_path / "run") == [5, 4, 2]
    damage(tmp_path / "run/5", "optimizer/rank-0-file-0.safetensors")
    resumed = Told(version=5)
    loop(tmp_path / "run", resumed, Trainer(settings, model_directory), settings).run()
    assert resumed.told[0] == ("join", 1, 4), "the batch of step 4 comes again"
    assert published(resumed) == {version: published(straight)[version] for version in (5, 6)}


def test_a_checkpoint_written_in_the_background_is_the_one_that_is_awaited(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = TorchTrainer(config(), model_directory)
    trainer.train(batch(0), Step(0), lambda: False)
    for name in ("awaited", "background", "little"):
        (tmp_path / name).mkdir()
    trainer.save(tmp_path / "awaited")
    saved = files(tmp_path / "awaited")
    with monkeypatch.context() as scarce:
        scarce.setattr(torch_trainer, "available", lambda: 1000)
        unwritten = trainer.begin_save(tmp_path / "little")
    assert "checkpoint written before training continues: its copy needs" in caplog.text
    assert files(tmp_path / "little") == saved
    unwritten()
    write = trainer.begin_save(tmp_path / "background")
    assert list((tmp_path / "background").iterdir()) == []
    trainer.train(batch(1), Step(1), lambda: False)
    write()
    assert files(tmp_path / "background") == saved


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
