"""A publisher resends a lost version while parts of it arrive, and waits where its own write finds no room."""

import errno
import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from staleflow.clients.weights import TRIES, NamedTensors, Publisher, host_buffer, publish
from staleflow.clients.weights.local_upload import ServerFiles
from staleflow.net.client import Client
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import BatchId, Lineage, TrainerTerm, Version, WorkerId
from staleflow.protocols.wire.codec import Data
from staleflow.protocols.wire.messages import (
    BeginPublish,
    BeginPublishReply,
    CommitPublish,
    Done,
    PublishChunk,
    RegisterVersionReply,
    Reply,
    Request,
)
from staleflow.protocols.wire.tensors import Array

WEIGHTS = {"scale": np.ones(1, np.float32), "a": np.zeros(1000, np.float32), "b": np.ones(1000, np.float32)}
"""The file has gaps between these tensors."""
REGISTERED = RegisterVersionReply(lineage=Lineage(0), version=Version(0))
WORKER = WorkerId("trainer.1")


class Server(Client):
    """A parameter server on another host, without a network. It forgets the first ``lost`` uploads after ``after``
    chunks, or, with None, at their commit."""

    def __init__(self, *, lost: int, after: int | None) -> None:
        super().__init__("tcp://127.0.0.1:1", worker=WORKER)
        self.begun = 0
        self._lost = lost
        self._after = after
        self._chunks = 0

    async def call(
        self, body: Request, frames: Sequence[Data] = (), *, timeout_s: float | None = 30.0
    ) -> tuple[Reply, list[memoryview]]:
        lost = self.begun <= self._lost
        match body:
            case BeginPublish():
                self.begun, self._chunks = self.begun + 1, 0
                return BeginPublishReply(upload=self.begun, path="", host="elsewhere"), []
            case PublishChunk():
                if lost and self._chunks == self._after:
                    raise Refused(Code.STALE, "begin again")
                self._chunks += 1
                return Done(), []
            case CommitPublish():
                if lost and self._after is None:
                    raise Refused(Code.STALE, "other bytes came")
                return REGISTERED, []
            case _:
                raise AssertionError(body)


def publisher(server: Client) -> Publisher:
    made = Publisher(server.address, worker=WORKER)
    made._client = server  # pyright: ignore[reportPrivateUsage]
    return made


async def published(server: Client) -> RegisterVersionReply:
    return await publisher(server).publish(
        WEIGHTS, trainer_term=TrainerTerm(1), lineage=Lineage(0), version=Version(0), batch=BatchId(1)
    )


async def test_a_version_of_which_some_arrives_is_sent_again_however_often_it_is_lost() -> None:
    server = Server(lost=2 * TRIES, after=1)
    assert await published(server) == REGISTERED
    assert server.begun == 2 * TRIES + 1


@pytest.mark.parametrize("after", [0, None])
async def test_a_version_of_which_nothing_arrives_or_other_bytes_is_given_up(after: int | None) -> None:
    server = Server(lost=2 * TRIES, after=after)
    with pytest.raises(Refused) as no:
        await published(server)
    assert (no.value.code, server.begun) == (Code.STALE, TRIES)


class Gathered:
    """Weights that change once they are released, as a model's do at the next update."""

    def __init__(self) -> None:
        self.iterated = 0
        self.released = False

    def items(self) -> Iterator[tuple[str, Array]]:
        assert not self.released, "they are the weights of another version now"
        self.iterated += 1
        yield from WEIGHTS.items()

    def release(self) -> None:
        self.released = True


async def released(server: Server, weights: NamedTensors, release: Callable[[], None]) -> RegisterVersionReply:
    return await publisher(server).publish(
        weights,
        trainer_term=TrainerTerm(1),
        lineage=Lineage(0),
        version=Version(0),
        batch=BatchId(1),
        released=release,
    )


async def test_gathered_weights_are_copied_and_released_although_the_upload_is_repeated() -> None:
    weights, server = Gathered(), Server(lost=2, after=1)
    assert await released(server, weights, weights.release) == REGISTERED
    assert (weights.released, weights.iterated, server.begun) == (True, 2, 3)


async def test_weights_in_main_memory_are_not_released_before_the_end() -> None:
    calls: list[None] = []
    await released(Server(lost=1, after=None), WEIGHTS, lambda: calls.append(None))
    assert calls == []


async def test_without_room_for_a_copy_gathered_weights_are_read_to_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_buffer, "available", lambda: 1000)
    weights, server = Gathered(), Server(lost=0, after=None)
    assert await released(server, weights, weights.release) == REGISTERED
    assert not weights.released
    assert "training waits for each version" in caplog.text


async def test_a_publisher_whose_own_write_finds_no_room_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = 0

    def full(*_: object) -> None:
        nonlocal tries
        tries += 1
        if tries <= 2 * TRIES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ServerFiles, "write", full)
    monkeypatch.setattr(publish, "FULL_RETRY_INTERVAL_S", 0.0)
    assert await published(Server(lost=0, after=None)) == REGISTERED
    assert tries == 2 * TRIES + 1
    assert os.strerror(errno.ENOSPC) in caplog.text
