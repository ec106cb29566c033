"""The training loop publishes a version while the next step trains, and no version has bytes of another one."""

import re
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from staleflow.clients.trainer.backends.base import StepResult, Stopping, Weights
from staleflow.clients.trainer.backends.tensors import to_arrays
from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.clients.trainer.errors import BadVersion
from staleflow.clients.trainer.loop import NotPublished
from staleflow.clients.trainer.torch_trainer import TorchTrainer
from staleflow.protocols.consistency.ids import Step, Version
from tests.clients.trainer.making import batch, config
from tests.clients.trainer.test_loop import Counting, Told, kept, loop

LIMIT_S = 100.0


class Reading(Told):
    """A service that reads the weights of a version only when it has to: before they change, or before it is asked to
    finish. It calls ``read`` for that, and refuses version ``revoked`` with ``error``."""

    def __init__(
        self,
        *,
        read: Callable[[], None] = lambda: None,
        revoked: int = -1,
        batches: int = 99,
        error: Exception | None = None,
    ) -> None:
        super().__init__(batches=batches)
        self._error = error or BadVersion(f"version {revoked} is void")
        self.begun: Weights | None = None
        self.under_way = -1
        self._read, self._revoked = read, revoked
        self._published = threading.Event()

    def begin_commit(self, weights: Weights) -> Version:
        self.finish_commit()
        self.begun, self.under_way = weights, self._current + 1
        return Version(self.under_way)

    def before_update(self) -> None:
        self.finish_commit()

    def finish_commit(self) -> None:
        if self.begun is None:
            return
        weights, self.begun = self.begun, None
        if self.under_way == self._revoked:
            raise self._error
        self._read()
        self.published.append((self.under_way, weights["w"].tolist()))
        self._published.set()

    def wait_published(self, version: int) -> None:
        if self.under_way <= version:
            self.finish_commit()

    def commit_result(self) -> Callable[[], None]:
        version = self.under_way
        self._published.clear()

        def wait() -> None:
            if version == self._revoked:
                raise self._error
            assert self._published.wait(LIMIT_S)

        return wait

    def cancel_commit(self) -> None:
        self.begun = None

    def checkpointed(self, lineage: int, version: int, *, keep: int) -> Version | None:
        assert self.published[-1][0] >= version, "a checkpoint is registered after its version"
        return super().checkpointed(lineage, version, keep=keep)


class Live(Counting):
    """A backend with one array of weights, which each step changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self._array = np.zeros(1, np.float32)
        self._wait: Callable[[], None] = lambda: None

    def set_before_update(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def weights(self) -> Weights:
        return {"w": self._array}

    def train(self, batch: TrainBatch, step: Step, stopping: Stopping) -> StepResult:
        result = super().train(batch, step, stopping)
        self._wait()
        self._array[0] = self.count
        return result


class Saving(Live):
    """``Live``, which copies a checkpoint and writes it in the loop's thread."""

    def begin_save(self, directory: Path) -> Callable[[], None]:
        count = self.count

        def write() -> None:
            (directory / "count").write_text(str(count))

        return write


def test_every_version_has_its_own_bytes_although_the_next_step_changes_them_in_place(tmp_path: Path) -> None:
    client = Reading()
    loop(tmp_path, client, Live()).run()
    assert client.published == [(version, [float(version)]) for version in range(7)]
    assert client.told[1:] == [*(("checkpointed", 0, version) for version in (2, 4, 6)), ("finished", "")]


def test_without_the_key_each_version_is_published_before_the_next_step(tmp_path: Path) -> None:
    client = Reading()
    loop(tmp_path, client, Live(), config(steps=3, checkpoint_every=9, overlap_publish=False)).run()
    assert client.under_way == -1
    assert [version for version, _ in client.published] == [0, 1, 2, 3]


def test_a_backend_that_cannot_wait_before_its_update_publishes_before_the_next_step(tmp_path: Path) -> None:
    client = Reading()
    loop(tmp_path, client, Counting()).run()
    assert client.under_way == -1


@pytest.mark.parametrize("backend", [Live, Saving])
@pytest.mark.parametrize("error", [BadVersion("version 4 is void"), RuntimeError("rank 1: KeyError('lm_head')")])
def test_the_checkpoint_of_a_version_that_is_never_published_does_not_exist(
    tmp_path: Path, backend: Callable[[], Live], error: Exception
) -> None:
    client = Reading(revoked=4, error=error)
    with pytest.raises(type(error), match=re.escape(str(error))):
        loop(tmp_path, client, backend()).run()
    assert kept(tmp_path) == [2]
    assert [path.name for path in tmp_path.iterdir()] == ["2"]
    assert client.published[-1] == (3, [3.0])
    assert client.told[-1] == ("checkpointed", 0, 2)


def test_a_stop_while_a_version_is_being_published_saves_and_registers_it(tmp_path: Path) -> None:
    client = Reading(batches=3)
    loop(tmp_path, client, Live()).run()
    assert client.published[-1] == (3, [3.0])
    assert client.told[-1] == ("checkpointed", 0, 3)
    assert kept(tmp_path) == [3, 2]


class Clock:
    """A clock that moves only where the test moves it, so that a stall of the machine adds no time."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def test_the_wait_for_a_publication_counts_as_idle_and_not_as_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    for module in ("loop", "steps"):
        monkeypatch.setattr(f"staleflow.clients.trainer.{module}.time", clock)

    class Timed(Live):
        def train(self, batch: TrainBatch, step: Step, stopping: Stopping) -> StepResult:
            clock.advance(0.25)
            return super().train(batch, step, stopping)

    client = Reading(read=lambda: clock.advance(0.5))
    loop(tmp_path, client, Timed(), config(steps=4, checkpoint_every=9)).run()
    line = client.lines[2]
    assert (line["time/publish"], line["time/train"]) == (0.5, 0.25)
    stalled = line["time/wait_for_batch"] + line["time/publish"]
    assert line["trainer/idle_ratio"] == pytest.approx(stalled / line["time/step"])


def test_an_error_while_a_version_is_being_published_ends_a_checkpoint_that_waits_for_it(tmp_path: Path) -> None:
    ended = threading.Event()

    class Waiting(Reading):
        def commit_result(self) -> Callable[[], None]:
            def wait() -> None:
                assert ended.wait(LIMIT_S)
                raise RuntimeError("cancelled")

            return wait

        def cancel_commit(self) -> None:
            super().cancel_commit()
            ended.set()

    class Broken(Saving):
        def train(self, batch: TrainBatch, step: Step, stopping: Stopping) -> StepResult:
            if step == 2:
                raise KeyError("a bug")
            return super().train(batch, step, stopping)

    with pytest.raises(KeyError, match="a bug"):
        loop(tmp_path, Waiting(), Broken()).run()
    assert kept(tmp_path) == []


@pytest.mark.parametrize("updates", [{}, {"minibatches": 2, "epochs": 2}])
def test_a_torch_step_waits_before_it_changes_the_published_tensors(
    model_directory: Path, updates: dict[str, int]
) -> None:
    trainer = TorchTrainer(config(lr=1e-2, **updates), model_directory)
    given = dict(trainer.weights().items())
    before = {name: array.copy() for name, array in given.items()}
    waits: list[bool] = []

    def wait() -> None:
        waits.append(all(np.array_equal(given[name], before[name]) for name in before))

    trainer.set_before_update(wait)
    trainer.train(batch(0), Step(0), lambda: False)
    assert waits[0], "the first wait comes before any change"
    assert len(waits) == updates.get("minibatches", 1) * updates.get("epochs", 1)
    assert not all(np.array_equal(given[name], before[name]) for name in before), "the tensors are the live ones"


def test_a_torch_step_whose_publication_has_failed_changes_nothing(model_directory: Path) -> None:
    trainer = TorchTrainer(config(lr=1e-2), model_directory)
    before = {name: array.copy() for name, array in trainer.weights().items()}

    def wait() -> None:
        raise BadVersion("version 4 is void")

    trainer.set_before_update(wait)
    with pytest.raises(BadVersion, match="version 4 is void"):
        trainer.train(batch(0), Step(0), lambda: False)
    assert all(np.array_equal(array, before[name]) for name, array in trainer.weights().items())


class Whole(TorchTrainer):
    """Publishes all weights as one array, as the scripted service expects."""

    def weights(self) -> Weights:
        return {"w": np.concatenate([np.ravel(array) for _, array in super().weights().items()])}


def test_memory_that_a_publication_lacks_is_not_taken_for_that_of_the_step(
    model_directory: Path, tmp_path: Path
) -> None:
    """Half of ``micro_tokens`` would not help, and the version would never exist."""
    client, chosen = Reading(revoked=1, error=MemoryError("no room")), config(steps=3, minibatches=2)
    with pytest.raises(NotPublished, match=r"MemoryError\('no room'\)"):
        loop(tmp_path, client, Whole(chosen, model_directory), chosen).run()
    assert [version for version, _ in client.published] == [0]
    assert client.told == [("join", 0, 0)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_weights_of_a_gpu_are_copied_before_the_update_that_changes_them(model_directory: Path) -> None:
    """The copies keep the bytes of their version until the next one, and are those of the tensors."""
    trainer = TorchTrainer(config(lr=1e-2), model_directory)
    trainer.set_before_update(lambda: pytest.fail("a copy needs no wait"))
    live = to_arrays(trainer.model.state_dict())
    given = trainer.weights()
    trainer.train(batch(0), Step(0), lambda: False)
    assert all(np.array_equal(array, live[name]) for name, array in given.items())
    moved = dict(trainer.weights().items())
    assert not all(np.array_equal(array, live[name]) for name, array in moved.items())
