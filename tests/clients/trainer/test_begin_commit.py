"""A version is published while its trainer continues; here its parameter server is held until the test lets it go."""

import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.clients.trainer.checkpoint import Checkpoints, TrainerState
from staleflow.clients.trainer.checkpoint_writer import CheckpointWriter
from staleflow.clients.trainer.client import TrainerClient
from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.clients.trainer.errors import BadVersion, Fenced
from staleflow.net.errors import Unavailable
from staleflow.process.readiness import SLOT_VARIABLE
from staleflow.protocols.consistency.ids import GroupId, Version
from staleflow.protocols.wire.messages import Batch
from tests.clients.trainer.service import Service, serving
from tests.clients.trainer.test_client import joined, same
from tests.clients.trainer.test_overlap import Saving

LIMIT_S = 60.0


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serving("coordination.admission=fill") as service:
        yield service


@pytest.fixture(autouse=True)
def free(service: Service) -> Iterator[None]:
    """The parameter server runs again after every test, and no timer of a test releases it in the next one."""
    yield
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()
    service.processes["parameters"].send_signal(signal.SIGCONT)


def hold(service: Service) -> None:
    """Stop the parameter server, so that whatever is published stays under way."""
    service.processes["parameters"].send_signal(signal.SIGSTOP)


def release(service: Service) -> None:
    service.processes["parameters"].send_signal(signal.SIGCONT)


class Model:
    """Weights that are changed in place, as an optimizer does."""

    def __init__(self, version: int) -> None:
        self.array = np.full((300, 200), version, np.float32)

    def weights(self) -> dict[str, Any]:
        return {"w": self.array}

    def step(self) -> None:
        self.array += 1


def sha(service: Service, version: int) -> str:
    return str([event for event in service.trace("publish") if event["version"] == version][-1]["sha"])


def expected_sha(version: int) -> str:
    """The digest of a version that every element names."""
    from staleflow.clients.weights.tensors import layout, tensor_of, with_digests
    from staleflow.protocols.wire.manifest import digest

    weights = Model(version).weights()
    return with_digests(layout(weights), [digest(tensor_of("w", weights["w"]).data)]).sha


def sealed_ahead(service: Service, batch: TrainBatch | Batch) -> bool:
    seals = service.trace("seal")
    return any(event["step"] == batch.step + 1 and event["batch"] > batch.batch for event in seals)


def wait_sealed_ahead(service: Service, batch: TrainBatch) -> None:
    """Wait until the batch after this one is sealed: without it, engines that lack a version cannot complete it."""
    deadline = time.monotonic() + LIMIT_S
    while not sealed_ahead(service, batch):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_ready_ahead(service: Service, batch: Batch) -> None:
    """Wait until the next batch is sealed or has a group: then its first micro-batch needs no new version."""
    deadline = time.monotonic() + LIMIT_S
    while not sealed_ahead(service, batch):
        used = {member["group"] for event in service.trace("seal") for member in event["members"]}
        used |= {event["group"] for event in service.trace("drop")}
        if {event["group"] for event in service.trace("occupy")} - used:
            return
        assert time.monotonic() < deadline
        time.sleep(0.02)


def begun(trainer: TrainerClient, service: Service) -> tuple[Iterator[TrainBatch], TrainBatch, Model]:
    """A trainer with a version under way, and the batch that was sealed ahead."""
    model = Model(trainer.version)
    batches = trainer.batches(trainer.version + 20)
    first = next(batches)
    wait_sealed_ahead(service, first)
    hold(service)
    trainer.before_update()
    model.step()
    assert trainer.begin_commit(model.weights()) == first.step + 1
    return batches, next(batches), model


def train_next(trainer: TrainerClient, batches: Iterator[TrainBatch]) -> None:
    """The next step up to its update: a batch that is sealed in exchange may come before the answer."""
    next(batches)
    trainer.before_update()


def test_the_next_batch_comes_while_the_version_is_being_published(service: Service) -> None:
    with joined(service) as trainer:
        batches, ahead, model = begun(trainer, service)
        first = ahead.step - 1
        assert trainer.version == first
        assert [event for event in service.trace("publish") if event["version"] == first + 1] == []
        released = threading.Event()

        def later() -> None:
            released.set()
            release(service)

        threading.Timer(0.3, later).start()
        trainer.before_update()
        assert released.is_set(), "the weights may change only once they are read"
        model.step()
        assert trainer.begin_commit(model.weights()) == first + 2
        assert trainer.finish_commit() == trainer.version == first + 2
        batches.close()  # type: ignore[attr-defined]
    assert [sha(service, first + 1), sha(service, first + 2)] == [expected_sha(first + 1), expected_sha(first + 2)]


def test_a_streaming_trainer_gets_the_next_micro_batches_while_its_version_is_being_published(service: Service) -> None:
    with joined(service) as trainer:
        first, ahead = trainer.version, set[int]()
        late = threading.Timer(LIMIT_S, release, (service,))  # else the test would hang where none comes
        for micro_batch in trainer.stream(first + 4):
            if micro_batch.header.step > trainer.version:
                ahead.add(micro_batch.header.step)
                release(service)
            if micro_batch.batch is not None:
                trainer.before_update()
                if micro_batch.batch.step == int(first):
                    wait_ready_ahead(service, micro_batch.batch)
                    hold(service)  # until a micro-batch of the next step is here
                    late.start()
                trainer.begin_commit(Model(micro_batch.batch.step + 1).weights())
        late.cancel()
        assert trainer.finish_commit() == first + 4
    assert first + 1 in ahead, "some micro-batches came before the version of the step before"
    assert [sha(service, first + n) for n in range(1, 5)] == [expected_sha(first + n) for n in range(1, 5)]


def test_a_version_whose_server_is_killed_is_published_with_its_own_bytes(service: Service) -> None:
    with joined(service) as trainer:
        _, ahead, model = begun(trainer, service)
        service.processes["parameters"].kill()
        service.processes["parameters"].wait()
        service.start("parameters", "serve", "parameters")
        trainer.before_update()
        model.step()
        assert trainer.finish_commit() == int(ahead.step)
    assert sha(service, ahead.step) == expected_sha(ahead.step)


def test_a_trainer_that_is_gone_before_its_version_is_published_gets_the_batch_again(service: Service) -> None:
    with joined(service) as trainer:
        batches = trainer.batches(trainer.version + 20)
        first = next(batches)
        hold(service)
        trainer.begin_commit(Model(first.step + 1).weights())
    threading.Timer(0.3, release, (service,)).start()
    with joined(service) as trainer:
        again = next(trainer.batches(trainer.version + 1))
    if again.step == first.step:  # the version of the trainer that is gone was not registered
        assert same(first, again)
    consumed = [event["step"] for event in service.trace("consume")]
    assert sorted(set(consumed)) == list(range(len(set(consumed))))


def test_the_error_of_a_batch_that_is_revoked_meanwhile_ends_the_wait_for_the_next_one(service: Service) -> None:
    with joined(service) as trainer:
        batches = trainer.batches(trainer.version + 20)
        first = next(batches)
        hold(service)
        trainer.begin_commit(Model(first.step + 1).weights())
        bad = GroupId(int(first.group_ids[0]))
        stream = trainer._stream(trainer._term)  # pyright: ignore[reportPrivateUsage]
        trainer.wait(stream.quarantine([bad], "its payload is damaged"))
        threading.Timer(0.3, release, (service,)).start()
        with pytest.raises(BadVersion, match=f"batch {first.batch} was revoked while it was trained"):
            train_next(trainer, batches)
        assert trainer.version == int(first.step)
        reply = trainer.join(first.lineage, Version(first.step))
        sealed = next(trainer.batches(reply.version + 1))
        assert (sealed.step, bad in sealed.group_ids) == (first.step, False)
        trainer.commit(Model(first.step + 1).weights())
    assert sha(service, first.step + 1) == expected_sha(first.step + 1)


def test_a_fenced_trainer_learns_of_it_before_it_changes_its_weights(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SLOT_VARIABLE, "of-the-trainer")  # the newer takes the name of the older, still alive
    with joined(service) as older:
        first = next(older.batches(older.version + 20))
        hold(service)
        older.begin_commit(Model(first.step + 1).weights())
        with joined(service):
            release(service)
            with pytest.raises(Fenced, match="another trainer has joined"):
                older.before_update()


def test_a_checkpoint_and_the_end_of_the_run_wait_for_the_version(service: Service) -> None:
    with joined(service) as trainer:
        _, ahead, _ = begun(trainer, service)
        threading.Timer(0.3, release, (service,)).start()
        assert trainer.checkpointed(ahead.lineage, Version(ahead.step)) == int(ahead.step)
        assert trainer.version == int(ahead.step)
    kept = [event["version"] for event in service.trace("checkpoint")]
    assert kept[-1] == ahead.step


def test_a_stop_request_leaves_the_version_time_to_be_published(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("staleflow.clients.trainer.commits.COMMIT_TIMEOUT_S", 60.0)
    with joined(service) as trainer:
        _, ahead, _ = begun(trainer, service)
        threading.Timer(0.2, release, (service,)).start()
        trainer.interrupt()
        assert trainer.finish_commit() == int(ahead.step)
    assert sha(service, ahead.step) == expected_sha(ahead.step)


def test_a_stop_ends_the_wait_for_a_checkpoint_whose_version_does_not_come(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("staleflow.clients.trainer.commits.COMMIT_TIMEOUT_S", 0.2)
    with joined(service) as trainer:
        _, ahead, _ = begun(trainer, service)
        state = TrainerState(lineage=ahead.lineage, version=Version(ahead.step))
        checkpoints = Checkpoints(tmp_path, run=trainer.run, keep=1)
        writer = CheckpointWriter(checkpoints, trainer, Saving(), asynchronous=True)
        writer.start(state, keep=1)
        trainer.interrupt()
        with pytest.raises(Unavailable, match="stop requested while a version was being published"):
            writer.save(state)
        writer.close()
    assert list(tmp_path.iterdir()) == []


def test_metrics_of_a_step_follow_its_version_with_the_numbers_of_the_scheduler(service: Service) -> None:
    with joined(service) as trainer:
        _, ahead, _ = begun(trainer, service)
        trainer.metrics(ahead.step - 1, {"loss": 0.5})  # type: ignore[arg-type]
        release(service)
        trainer.finish_commit()
    path, deadline = service.run_dir / "metrics.jsonl", time.monotonic() + LIMIT_S
    while True:
        # the last line may be incomplete
        lines = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []
        line = next((line for line in lines if line["step"] == ahead.step - 1 and line.get("loss") == 0.5), None)
        if line is not None:
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert line["time/publish_total"] > 0
    assert line["off_policy/max"] <= 1
    assert line["version"] == ahead.step
