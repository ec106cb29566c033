"""A streaming trainer gets pieces before the seal and the same pieces after a crash, with a clean trace."""

import json
import signal
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from staleflow.clients.trainer.client import TrainerClient
from staleflow.clients.trainer.data.micro_batches import MicroBatch
from staleflow.protocols.consistency.ids import Version
from staleflow.trace.audit.report import audit
from tests.clients.trainer.service import Service, serving
from tests.clients.trainer.test_process import check_resumed, ended, surviving_steps

SLOW_ENGINE = ("rollout.simulated.k2=0.03", "trainer.streaming=true", "rollout.simulated.sigma=1.5")
"""Groups arrive one by one: the trainer has the first ones long before the last."""


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serving(*SLOW_ENGINE, "staleness.max_staleness=0") as service:
        yield service
        service.stop()  # a running server may be in the middle of a line
        assert audit(service.run_dir / "trace.jsonl").violations == []


def joined(service: Service) -> TrainerClient:
    """A trainer at the newest version."""
    trainer = TrainerClient(service.address)
    attached = trainer.attach()
    if trainer.join(attached.lineage, Version(max(attached.version, 0))).version < 0:
        trainer.publish_initial(weights(0))
    return trainer


def weights(version: int) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    return {"w": np.full((3, 2), version, np.float32)}


def groups(piece: MicroBatch) -> list[int]:
    return [int(group) for group in np.unique(piece.data.group_ids)]


def test_pieces_come_before_their_batch_is_sealed_and_together_they_are_the_batch(service: Service) -> None:
    with joined(service) as trainer:
        first = trainer.version
        seen: list[list[MicroBatch]] = []
        for piece in trainer.stream(first + 3):
            if piece.first:
                seen.append([])
            seen[-1].append(piece)
            if piece.batch is not None:
                trainer.commit(weights(piece.batch.step + 1))
    assert [len(pieces) for pieces in seen] == [3, 3, 3]
    for step, pieces in enumerate(seen, first):
        assert [piece.data.step for piece in pieces] == [step] * 3
        last = pieces[-1].batch
        assert last is not None
        assert [group for piece in pieces for group in groups(piece)] == [member.group for member in last.members]
        assert [piece.batch for piece in pieces[:-1]] == [None, None]
    claims = service.trace("claim")
    sealed = {event["step"]: [m["group"] for m in event["members"]] for event in service.trace("seal")}
    assert claims
    for claim in claims:
        assert claim["group"] in sealed[claim["step"]][:2], "the last of a batch is sealed with it, not claimed"


def test_a_trainer_that_dies_in_the_middle_of_a_step_is_given_the_same_pieces_again(service: Service) -> None:
    with joined(service) as trainer:
        step = trainer.version
        dead = list(islice(trainer.stream(step + 1), 2))
    with joined(service) as trainer:
        again: list[MicroBatch] = []
        for piece in trainer.stream(step + 1):
            again.append(piece)
            if piece.batch is not None:
                trainer.commit(weights(step + 1))
    assert [groups(piece) for piece in dead] == [groups(piece) for piece in again[:2]]
    for one, other in zip(dead, again, strict=False):
        for column in ("input_ids", "behavior_logprobs", "token_versions", "rewards"):
            assert np.array_equal(getattr(one.data, column), getattr(other.data, column))
    assert [piece.first for piece in again] == [True, False, False]


def test_only_the_whole_batch_may_be_committed_and_it_must_be(service: Service) -> None:
    with joined(service) as trainer:
        stream = trainer.stream(trainer.version + 2)
        next(stream)
        with pytest.raises(RuntimeError, match="no batch to commit"):
            trainer.commit(weights(0))
        while next(stream).batch is None:
            pass
        with pytest.raises(RuntimeError, match="was not committed"):
            next(stream)


def test_other_ranks_must_be_told_of_every_piece(tmp_path: Path) -> None:
    nobody = f"ipc://{tmp_path}/scheduler"
    with TrainerClient(nobody, rank=0, world=2) as trainer, pytest.raises(RuntimeError, match="share is not set"):
        next(trainer.stream(1))


def test_a_piece_that_another_rank_lacks_begins_the_step_again(service: Service) -> None:
    with joined(service) as trainer:
        answers = iter([True, False])
        trainer.share = lambda _: next(answers, True)
        seen = list(islice(trainer.stream(trainer.version + 1), 4))
    assert [piece.first for piece in seen] == [True, True, False, False]
    assert groups(seen[0]) == groups(seen[1])
    assert seen[-1].batch is not None


def test_a_killed_streaming_trainer_goes_on_with_the_same_batches() -> None:
    settings = (*SLOW_ENGINE, "trainer.simulated_step_s=0.8", "trainer.steps=1000", "trainer.checkpoint_every=1000")
    with serving(*settings) as service:
        killed = service.start_trainer()
        service.wait_for("consume", 3)
        claims = len(service.trace("claim"))
        service.wait_for("claim", claims + 1)
        killed.send_signal(signal.SIGKILL)
        ended(killed)
        before = {event["step"]: event["digest"] for event in service.trace("seal")}
        check_resumed(service)
        rollbacks = service.trace("rollback")
        assert rollbacks
        again = {event["step"]: event["digest"] for event in service.trace("seal") if event["lineage"]}
        for rollback in rollbacks:
            assert again[rollback["to_version"]] == before[rollback["to_version"]]
        lines = (service.run_dir / "metrics.jsonl").read_bytes().split(b"\n")[:-1]  # the last line may be incomplete
        trained = [line for line in map(json.loads, lines) if "time/train" in line]
        steps = surviving_steps(service)
    assert all(line["time/train"] >= 0.7 for line in trained)
    assert trained[-1]["step"] in steps[-2:], "a stopped trainer may lose the metrics of its last step"
