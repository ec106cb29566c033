"""Rank 0 leads and the others follow; here ranks are threads that exchange the values that real ranks would."""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.clients.trainer.backends.base import Array, OutOfMemory, Published, StepResult, Stopped, Stopping
from staleflow.clients.trainer.data.batch import TrainBatch, assemble
from staleflow.clients.trainer.data.micro_batches import MicroBatch, concatenated
from staleflow.clients.trainer.ranks.leader import Leader, Order, follow
from staleflow.clients.weights.sharded import RankUpload, Spans
from staleflow.protocols.consistency.ids import BatchId, Step, TrainerTerm, Version
from staleflow.protocols.wire.messages import Batch, BeginPublishReply
from tests.clients.trainer.making import batch, header, members
from tests.clients.trainer.ranks.rows import Rows

LIMIT_S = 100.0


class Room:
    """The meeting point of two ranks; each call waits for the other rank's call."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._barrier = threading.Barrier(2, timeout=limit_s)
        self._said: dict[int, Any] = {}

    def exchange(self, rank: int, word: Any) -> dict[int, Any]:
        self._said[rank] = word
        self._barrier.wait()
        said = dict(self._said)
        self._barrier.wait()
        return said


class Bytes:
    """The channel of uploads."""

    def __init__(self, room: Room, rank: int) -> None:
        self._room, self._rank = room, rank

    def broadcast(self, data: bytes) -> bytes:
        sent: bytes = self._room.exchange(self._rank, data)[0]
        return sent

    def gather(self, data: bytes) -> list[bytes]:
        sent = self._room.exchange(self._rank, data)
        return [sent[0], sent[1]]


class Ranks:
    def __init__(self, room: Room, rank: int, writers: Room | None = None, uploads: Room | None = None) -> None:
        self._room, self._rank, self._writers = room, rank, writers or Room()
        self.uploads = Bytes(uploads or Room(), rank)
        self.closed = False

    def broadcast(self, order: list[int], text: str = "") -> None:
        self._room.exchange(self._rank, ([*order, 0, 0, 0][:4], text))

    def receive(self) -> tuple[list[int], str]:
        order, text = self._room.exchange(self._rank, None)[0]
        return order, text

    def gather(self, values: Array) -> Array:
        said = self._room.exchange(self._rank, values)
        return np.concatenate([said[0], said[1]])

    def written(self, ok: bool) -> list[int]:
        said = self._writers.exchange(self._rank, ok)
        return [rank for rank in (0, 1) if not said[rank]]

    def barrier(self) -> None:
        self._room.exchange(self._rank, None)

    def close(self) -> None:
        self.closed = True


class Recorded:
    """A backend that records its calls."""

    def __init__(self, *, together: bool) -> None:
        self.together = together
        self.calls: list[Any] = []
        self.stops = self.full = False
        self.released = threading.Event()
        """Set once ``begin_save`` may write."""
        self.trained = threading.Event()
        """Set by the first ``train``."""

    def check(self, directory: Path) -> None:
        self.calls.append(("check", directory.name))

    def load(self, directory: Path | None) -> None:
        self.calls.append(("load", None if directory is None else directory.name))

    def save(self, directory: Path) -> None:
        self.calls.append(("save", directory.name))

    def begin_save(self, directory: Path) -> Callable[[], None]:
        self.calls.append(("begin_save", directory.name))

        def write() -> None:
            self.released.wait(LIMIT_S)
            if self.full:
                raise OSError("the disk is full")
            self.calls.append(("written", directory.name))

        return write

    def set_before_update(self, wait: Callable[[], None]) -> None:
        self.calls.append("set_before_update")

    def weights(self) -> Published:
        return {"a": np.zeros(2), "b": np.ones(1)}

    def sharded_weights(self) -> Rows:
        return Rows(self.weights())

    def gather(self) -> None:
        self.calls.append("gather")

    def train(self, batch: TrainBatch, step: Step, stopping: Stopping) -> StepResult:
        self.calls.append(("train", int(step), int(batch.batch)))
        self.trained.set()
        if self.stops:
            raise Stopped
        return StepResult(values={"loss": 1.0})

    def begin(self) -> None:
        self.calls.append("begin")

    def add(self, part: TrainBatch, stopping: Stopping, *, last: bool) -> None:
        self.calls.append(("add", list(dict.fromkeys(part.group_ids.tolist())), last))
        if self.stops:
            raise Stopped

    def finish(self, batch: TrainBatch, step: Step) -> StepResult:
        self.calls.append(("finish", int(step), int(batch.batch), len(batch.rewards)))
        return StepResult(values={"loss": 2.0})

    def evaluate(self, version: Version, stopping: Stopping) -> dict[str, float]:
        self.calls.append(("evaluate", int(version)))
        return {"reward/eval": 1.0}

    def close(self) -> None:
        self.calls.append("close")


class Fed:
    """The batches that a follower will find, one per call."""

    def __init__(self, *found: TrainBatch | None) -> None:
        self._found = iter(found)
        self.followed: list[tuple[int, int]] = []
        self.gave_up: list[str] = []

    def follow(self, term: TrainerTerm, version: Version) -> None:
        self.followed.append((int(term), int(version)))

    def batch(self, step: Step) -> TrainBatch | None:
        return next(self._found)

    def give_up(self, why: str) -> None:
        self.gave_up.append(why)

    def micro_batch(self, header: Batch) -> TrainBatch | None:
        """As ``batch``; the process ends after the last one."""
        try:
            return next(self._found)
        except StopIteration:
            raise Stopped from None


def nothing_written(to: BeginPublishReply, spans: Spans) -> RankUpload:
    """Upload nothing: these ranks have no server."""
    return RankUpload()


Scene = tuple[Leader, Recorded, Recorded, Fed, Callable[[], None]]


@pytest.fixture
def scene() -> Iterator[Callable[..., Scene]]:
    threads: list[threading.Thread] = []

    def make(*found: TrainBatch | None, together: bool = True) -> Scene:
        room, first, second, fed = Room(), Recorded(together=together), Recorded(together=together), Fed(*found)
        writers = Room()
        arguments = (second, Ranks(room, 1, writers), fed, lambda: False, nothing_written)
        thread = threading.Thread(target=follow, args=arguments, daemon=True)
        threads.append(thread)
        thread.start()
        leader = Leader(first, Ranks(room, 0, writers), lambda: (TrainerTerm(3), Version(5)))
        return leader, first, second, fed, lambda: thread.join(LIMIT_S)

    yield make
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_every_rank_does_what_the_loop_asks_of_the_first(scene: Callable[..., Scene], tmp_path: Path) -> None:
    data = batch(5)
    leader, first, second, fed, wait = scene(data)
    leader.check(tmp_path / "5")
    leader.load(tmp_path / "5")
    assert leader.same(data)
    assert leader.train(data, Step(5), lambda: False).values == {"loss": 1.0}
    assert [name for name, _ in leader.weights().items()] == ["a", "b"]
    leader.save(tmp_path / "6")
    assert leader.evaluate(Version(6), lambda: False) == {"reward/eval": 1.0}
    leader.close()
    wait()
    did = [("load", "5"), ("train", 5, 6), ("save", "6"), ("evaluate", 6), "close"]
    assert first.calls == [("check", "5"), *did]
    assert second.calls == [*did[:2], "gather", *did[2:]]
    assert fed.followed == [(3, 5)]


def test_every_rank_writes_its_copy_of_a_checkpoint_while_the_next_step_trains(scene: Callable[..., Scene]) -> None:
    data = batch(5)
    leader, first, second, _, wait = scene(data)
    write = leader.begin_save(Path("6"))
    assert leader.same(data)
    leader.train(data, Step(5), lambda: False)
    assert second.trained.wait(LIMIT_S)  # the leader does not wait for the others
    trained = [("begin_save", "6"), ("train", 5, 6)]
    assert (first.calls, second.calls) == (trained, trained)
    first.released.set()
    second.released.set()
    write()
    leader.close()
    wait()
    assert first.calls == second.calls == [*trained, ("written", "6"), "close"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_that_one_rank_fails_to_write_is_an_error_of_the_first(
    scene: Callable[..., Scene], rank: int
) -> None:
    leader, first, second, _, wait = scene()
    write = leader.begin_save(Path("6"))
    for backend in (first, second):
        backend.released.set()
    (first, second)[rank].full = True
    wrong = (
        (OSError, "the disk is full") if rank == 0 else (RuntimeError, r"ranks \[1\] failed to write their part of 6")
    )
    with pytest.raises(wrong[0], match=wrong[1]):
        write()
    leader.close()
    wait()
    assert second.calls[-1] == "close"


def test_weights_are_gathered_anew_each_time_somebody_goes_through_them(scene: Callable[..., Scene]) -> None:
    leader, _, second, _, wait = scene()
    published = leader.weights()
    assert [name for name, _ in published.items()] == [name for name, _ in published.items()]
    leader.close()
    wait()
    assert second.calls == ["gather", "gather", "close"]


def test_whole_models_are_published_and_evaluated_without_the_others(scene: Callable[..., Scene]) -> None:
    leader, first, second, _, wait = scene(together=False)
    assert list(dict(leader.weights().items())) == ["a", "b"]
    leader.evaluate(Version(0), lambda: False)
    leader.close()
    wait()
    assert (first.calls, second.calls) == ([("evaluate", 0), "close"], ["close"])


def test_a_batch_that_was_sealed_anew_between_two_ranks_is_not_trained(scene: Callable[..., Scene]) -> None:
    data = batch(0)
    anew = dataclasses.replace(data, batch=BatchId(9))
    leader, _, second, _, wait = scene(data, anew)
    assert not leader.same(anew)
    assert leader.same(anew)
    leader.train(anew, Step(0), lambda: False)
    leader.close()
    wait()
    assert second.calls == [("train", 0, 9), "close"]


def test_a_rank_that_was_asked_to_end_stops_all_of_them_before_the_step(scene: Callable[..., Scene]) -> None:
    leader, _, second, _, wait = scene(None)
    with pytest.raises(Stopped):
        leader.same(batch(0))
    leader.save(Path("kept"))
    leader.close()
    wait()
    assert second.calls == [("save", "kept"), "close"]


def test_after_a_step_that_all_gave_up_a_checkpoint_can_be_saved(scene: Callable[..., Scene]) -> None:
    data = batch(0)
    leader, first, second, _, wait = scene(data)
    first.stops = second.stops = True
    assert leader.same(data)
    with pytest.raises(Stopped):
        leader.train(data, Step(0), lambda: True)
    leader.save(Path("kept"))
    leader.close()
    wait()
    assert second.calls == [("train", 0, 1), ("save", "kept"), "close"]


class Full(Recorded):
    """A backend whose device has too little memory for a step."""

    def train(self, batch: TrainBatch, step: Step, stopping: Stopping) -> StepResult:
        raise OutOfMemory("step 5: out of memory on rank 1")


class Ordered(Ranks):
    """A follower's ranks: rank 0 sends these orders and then waits for the follower in a pass."""

    def __init__(self, *orders: list[int]) -> None:
        super().__init__(Room(), 1)
        self._orders = iter(orders)

    def receive(self) -> tuple[list[int], str]:
        return [*next(self._orders), 0, 0, 0][:4], ""

    def gather(self, values: Array) -> Array:
        return values


def test_a_rank_whose_device_does_not_hold_a_step_tells_the_run_so_itself() -> None:
    fed = Fed(batch(5))
    ranks = Ordered([Order.LOAD, 3, 5], [Order.BATCH, 5], [Order.TRAIN, 5])
    with pytest.raises(OutOfMemory):
        follow(Full(together=True), ranks, fed, lambda: False, nothing_written)
    assert (fed.followed, fed.gave_up) == ([(3, 5)], ["step 5: out of memory on rank 1"])


def piece(step: int, group: int, *, last: bool = False) -> MicroBatch:
    """A piece of a step: one group, of which each rank has two rows."""
    data = assemble(header(step), members(step, lengths=(3, 2))[group : group + 1])
    return MicroBatch(data=data, first=group == 0, batch=header(step) if last else None, header=header(step))


def take(leader: Leader, *pieces: MicroBatch) -> None:
    for one in pieces:
        assert leader.share(one)
        if one.first:
            leader.begin()
        leader.add(one.data, lambda: False, last=one.batch is not None)


def test_every_rank_takes_its_share_of_every_piece_and_finishes_the_step(scene: Callable[..., Scene]) -> None:
    pieces = [piece(5, 0), piece(5, 1, last=True)]
    leader, first, second, _, wait = scene(piece(5, 1).data, piece(5, 2).data)
    take(leader, *pieces)
    whole = concatenated([one.data for one in pieces], header(5))
    assert leader.finish(whole, Step(5)).values == {"loss": 2.0}
    leader.close()
    wait()
    assert first.calls == ["begin", ("add", [0], False), ("add", [1], True), ("finish", 5, 6, 4), "close"]
    assert second.calls == ["begin", ("add", [1], False), ("add", [2], True), ("finish", 5, 6, 4), "close"]


def test_a_step_that_begins_again_begins_again_on_every_rank(scene: Callable[..., Scene]) -> None:
    shares = [piece(5, 1).data, None, piece(5, 2).data]
    leader, _, second, _, wait = scene(*shares)
    take(leader, piece(5, 0))
    assert not leader.share(piece(5, 1)), "the other rank could not fetch it"
    again = piece(5, 0, last=True)
    take(leader, again)
    leader.finish(concatenated([again.data], header(5)), Step(5))
    leader.close()
    wait()
    assert second.calls[:2] == ["begin", ("add", [1], False)]
    assert second.calls[2:] == ["begin", ("add", [2], True), ("finish", 5, 6, 2), "close"], "one piece's rows"


def test_a_rank_that_was_asked_to_end_stops_all_of_them_between_two_pieces(scene: Callable[..., Scene]) -> None:
    leader, _, second, _, wait = scene(piece(5, 1).data)
    take(leader, piece(5, 0))
    with pytest.raises(Stopped):
        leader.share(piece(5, 1))
    leader.save(Path("kept"))
    leader.close()
    wait()
    assert second.calls == ["begin", ("add", [1], False), ("save", "kept"), "close"]


def test_after_a_piece_that_all_gave_up_a_checkpoint_can_be_saved(scene: Callable[..., Scene]) -> None:
    leader, first, second, _, wait = scene(piece(5, 1).data)
    first.stops = second.stops = True
    with pytest.raises(Stopped):
        take(leader, piece(5, 0))
    leader.save(Path("kept"))
    leader.close()
    wait()
    assert second.calls == ["begin", ("add", [1], False), ("save", "kept"), "close"]
