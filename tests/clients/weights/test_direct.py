"""A reader that gets weights from the trainer's memory has the same bytes as from the server, or falls back to the
server."""

# pyright: reportPrivateUsage=false

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from staleflow.clients.trainer import main as trainer_main
from staleflow.clients.weights import NamedTensors, Publisher, PulledVersion, Puller, direct
from staleflow.clients.weights.direct import ASKS, Ask, connect
from staleflow.clients.weights.direct_source import MAX_TRANSFERS, DirectSource, HeldVersion
from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import load
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import Lineage, Version, WorkerId
from staleflow.protocols.wire.messages import BeginPublish, BeginPublishReply, CommitPublish, GetManifest, ManifestReply
from staleflow.protocols.wire.tensors import Array
from tests.servers.parameters.test_service import BYTES, begin, manifest
from tests.servers.running import WEIGHTS, Run, Trainer, produced

LOOPBACK = "tcp://127.0.0.1:*"
LARGE: dict[str, Array] = {
    "a": np.random.default_rng(0).random((700, 1000), dtype=np.float32),
    "empty": np.zeros((0, 4), np.float32),
    "b": np.random.default_rng(1).integers(0, 2**16, 300_001, dtype=np.uint16),
    "half": np.arange(5, dtype=np.float16),
    "flags": np.asarray([True, False]),
}


@pytest.fixture(autouse=True)
def small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut a version into several spans that end inside tensors; a machine that stalls is no reason to fall back."""
    monkeypatch.setattr(direct, "SPAN_BYTES", 1_000_003)
    monkeypatch.setattr(direct, "ANSWER_TIMEOUT_S", 20.0)
    monkeypatch.setattr(direct, "SPAN_TIMEOUT_S", 20.0)
    monkeypatch.setattr(direct, "CONFIRM_TIMEOUT_S", 20.0)


@pytest.fixture
async def trainer(run: Run) -> AsyncIterator[Trainer]:
    """A trainer that serves its newest version itself."""
    trainer = await run.trainer()
    trainer.publisher.close()
    trainer.publisher = Publisher(run.where.parameters, worker=trainer.worker, direct=LOOPBACK)
    yield trainer
    await asyncio.to_thread(trainer.publisher.close)


def reader(run: Run, number: int = 1) -> Puller:
    puller = Puller(run.where.parameters, worker=WorkerId(f"reader.{number}"), direct=True)
    run.clients.append(puller)
    return puller


def source(trainer: Trainer) -> DirectSource:
    assert trainer.publisher._source is not None
    return trainer.publisher._source


def same(pulled: PulledVersion, weights: dict[str, Array], *, direct: bool) -> None:
    found = pulled.arrays()
    assert list(found) == list(weights)
    for name, array in weights.items():
        assert (found[name].tobytes(), found[name].shape) == (array.tobytes(), array.shape)
        assert not found[name].flags.writeable
    assert (pulled.direct, pulled.mapped) == (direct, not direct)


async def test_two_readers_have_the_version_from_the_trainer_and_pins_from_the_server(
    run: Run, trainer: Trainer
) -> None:
    await trainer.publish(0, LARGE)
    readers = [reader(run, number) for number in range(2)]
    both = await asyncio.gather(*(puller.pull(Lineage(0), Version(0)) for puller in readers))
    for pulled in both:
        same(pulled, LARGE, direct=True)
    (version,) = (await run.status(run.where.parameters))["versions"]
    assert sorted(version["pinned_by"]) == ["reader.0", "reader.1"]
    for pulled in both:
        await pulled.close()
    async with await reader(run, 2).pull(Lineage(0), Version(0)) as late:
        same(late, LARGE, direct=True)


async def test_a_reader_that_did_not_ask_for_it_maps_the_file(run: Run, trainer: Trainer) -> None:
    await trainer.publish(0, WEIGHTS)
    puller = Puller(run.where.parameters, worker=WorkerId("reader.1"))
    run.clients.append(puller)
    async with await puller.pull(Lineage(0), Version(0)) as pulled:
        same(pulled, WEIGHTS, direct=False)


async def test_only_the_newest_version_comes_from_the_trainer(run: Run, trainer: Trainer) -> None:
    after = {name: array + array.dtype.type(1) for name, array in WEIGHTS.items()}
    await trainer.publish(0, WEIGHTS)
    async with produced(run):
        await trainer.publish(1, after, (await trainer.next_batch(0)).batch)
    async with await reader(run).pull(Lineage(0), Version(1)) as pulled:
        same(pulled, after, direct=True)
    async with await reader(run, 2).pull(Lineage(0), Version(0)) as pulled:
        same(pulled, WEIGHTS, direct=False)


async def test_one_who_asks_for_what_was_just_replaced_is_told_at_once(
    run: Run, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    await trainer.publish(0, WEIGHTS)
    source(trainer).hold(WEIGHTS, Lineage(0), Version(1))  # one step later; the server does not know it yet
    async with await reader(run).pull(Lineage(0), Version(0)) as pulled:
        same(pulled, WEIGHTS, direct=False)
    assert "version 0 of lineage 0 is not the newest" in caplog.text, "the trainer's answer, not the end of the wait"


async def test_an_optimizer_that_moves_on_changes_nothing_of_what_readers_get(run: Run, trainer: Trainer) -> None:
    model = {name: array.copy() for name, array in LARGE.items()}
    await trainer.publish(0, model)
    for array in model.values():
        array[...] = 0
    async with await reader(run).pull(Lineage(0), Version(0)) as pulled:
        same(pulled, LARGE, direct=True)


class OneByOne:
    """Weights of which only one tensor is in memory at a time."""

    def items(self) -> Iterator[tuple[str, Array]]:
        for name, array in LARGE.items():
            lent = array.copy()
            yield name, lent
            lent[...] = 0


async def test_weights_that_are_gathered_one_by_one_are_given_too(run: Run, trainer: Trainer) -> None:
    weights: NamedTensors = OneByOne()
    await trainer.publish(0, weights)
    async with await reader(run).pull(Lineage(0), Version(0)) as pulled:
        same(pulled, LARGE, direct=True)


async def test_bytes_that_are_not_those_of_the_manifest_are_never_loaded(run: Run, trainer: Trainer) -> None:
    await trainer.publish(0, LARGE)
    held = source(trainer)._newest
    assert held is not None
    held.data[2_500_000] ^= 1
    async with await reader(run).pull(Lineage(0), Version(0)) as pulled:
        same(pulled, LARGE, direct=False)


async def test_a_reader_that_dies_over_its_ask_keeps_nobody_else_waiting(run: Run, trainer: Trainer) -> None:
    await trainer.publish(0, LARGE)
    store = connect(source(trainer).endpoint)
    gone = Ask(group="gone", lineage=Lineage(0), version=Version(0), nbytes=3_400_074, card="")
    store.queue_push(ASKS, b"what is this?")
    store.queue_push(ASKS, msgspec.json.encode(gone))  # this reader never joins its group
    async with await reader(run).pull(Lineage(0), Version(0)) as pulled:
        same(pulled, LARGE, direct=True)


def ended_asks(opened: DirectSource, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the groups whose requests the source has finished with, a list that grows."""
    ended, give = list[str](), opened._give

    def noted(ask: Ask, asked_s: float) -> None:
        give(ask, asked_s)
        ended.append(ask.group)

    monkeypatch.setattr(opened, "_give", noted)
    return ended


async def wait_for_count(ended: list[str], count: int) -> None:
    async with asyncio.timeout(60):
        while len(ended) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def gone(store: direct.Store, number: int, version: int = 0) -> None:
    """Queue the request of a reader that leaves before its answer."""
    ask = Ask(group=f"gone-{number}", lineage=Lineage(0), version=Version(version), nbytes=132, card="")
    store.queue_push(ASKS, msgspec.json.encode(ask))


async def test_many_readers_that_have_left_keep_the_next_one_waiting_no_longer_than_it_waits(
    run: Run, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await trainer.publish(0, WEIGHTS)
    monkeypatch.setattr(direct, "CONFIRM_TIMEOUT_S", 5.0)
    assert 2 * direct.CONFIRM_TIMEOUT_S < 60.0 < 2 * MAX_TRANSFERS * direct.CONFIRM_TIMEOUT_S
    monkeypatch.setattr(direct, "ANSWER_TIMEOUT_S", 60.0)  # enough for all together, too little for one by one
    store = connect(source(trainer).endpoint)
    for number in range(2 * MAX_TRANSFERS):
        gone(store, number)
    async with await reader(run).pull(Lineage(0), Version(0)) as pulled:
        same(pulled, WEIGHTS, direct=True)


async def test_an_ask_that_nobody_waits_for_any_more_is_not_answered(
    run: Run, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await trainer.publish(0, WEIGHTS)
    monkeypatch.setattr(direct, "CONFIRM_TIMEOUT_S", 1.0)
    opened, barrier = source(trainer), threading.Barrier(MAX_TRANSFERS + 1, timeout=60)
    first, served = {f"gone-{number}" for number in range(MAX_TRANSFERS)}, list[str]()
    answered, ended = opened._answered, ended_asks(opened, monkeypatch)

    def noted(ask: Ask, held: HeldVersion | None, store: direct.Store) -> None:
        served.append(ask.group)
        if ask.group in first:
            barrier.wait()
            barrier.wait()
        answered(ask, held, store)

    monkeypatch.setattr(opened, "_answered", noted)
    store = connect(opened.endpoint)
    for number in range(3 * MAX_TRANSFERS):
        gone(store, number)
    await asyncio.to_thread(barrier.wait)
    monkeypatch.setattr(direct, "ANSWER_TIMEOUT_S", 0.0)  # the queued requests are older
    await asyncio.to_thread(barrier.wait)
    await wait_for_count(ended, 3 * MAX_TRANSFERS)
    monkeypatch.setattr(direct, "ANSWER_TIMEOUT_S", 20.0)
    monkeypatch.setattr(direct, "CONFIRM_TIMEOUT_S", 20.0)
    async with await reader(run).pull(Lineage(0), Version(0)) as pulled:
        same(pulled, WEIGHTS, direct=True)
    assert len(served) == MAX_TRANSFERS + 1


async def test_whoever_left_or_was_told_no_leaves_nothing_at_the_store(
    run: Run, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "CONFIRM_TIMEOUT_S", 1.0)
    await trainer.publish(0, WEIGHTS)
    ended = ended_asks(source(trainer), monkeypatch)
    store = connect(source(trainer).endpoint)
    before = store.list_keys()
    gone(store, 1)
    gone(store, 2, version=7)  # a version that never existed
    await wait_for_count(ended, 2)
    monkeypatch.setattr(direct, "CONFIRM_TIMEOUT_S", 20.0)
    async with await reader(run).pull(Lineage(0), Version(0)) as pulled:
        same(pulled, WEIGHTS, direct=True)
    source(trainer).hold(WEIGHTS, Lineage(0), Version(1))
    async with await reader(run, 2).pull(Lineage(0), Version(0)) as pulled:
        same(pulled, WEIGHTS, direct=False)
    await wait_for_count(ended, 4)
    assert not {*store.list_keys()} - {*before, ASKS}


@pytest.mark.parametrize("word", [b"end", b"", b"null"])
async def test_no_word_from_outside_ends_the_giving(run: Run, trainer: Trainer, word: bytes) -> None:
    await trainer.publish(0, WEIGHTS)
    connect(source(trainer).endpoint).queue_push(ASKS, word)
    async with await reader(run).pull(Lineage(0), Version(0)) as pulled:
        same(pulled, WEIGHTS, direct=True)


class Robbed:
    """A store whose queue an intruder empties immediately."""

    def __init__(self, store: direct.Store) -> None:
        self.store = store

    def queue_push(self, key: str, value: bytes) -> None:
        pass


def test_a_stranger_who_takes_every_ask_does_not_keep_the_trainer_from_closing() -> None:
    opened = DirectSource(LOOPBACK)
    opened._store = Robbed(opened._store)
    opened.close()
    opened._thread.join(60)
    assert not opened._thread.is_alive()


async def test_a_trainer_that_dies_in_the_middle_leaves_the_server(
    run: Run, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "SPAN_TIMEOUT_S", 2.0)  # the trainer drops lost readers after this time
    await trainer.publish(0, LARGE)
    take = direct.Group.take

    def cut(self: direct.Group, data: direct.Bytes) -> Iterator[int]:
        for arrived in take(self, data):
            yield arrived
            raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(direct.Group, "take", cut)
    async with await reader(run).pull(Lineage(0), Version(0)) as pulled:
        same(pulled, LARGE, direct=False)


async def test_a_trainer_that_is_gone_leaves_the_server(run: Run, trainer: Trainer, ports: list[int]) -> None:
    await asyncio.to_thread(trainer.publisher.close)
    at = f"tcp://127.0.0.1:{ports[0]}"  # no other process listens there once the trainer is gone
    trainer.publisher = Publisher(run.where.parameters, worker=trainer.worker, direct=at)
    await trainer.publish(0, WEIGHTS)
    puller = reader(run)
    endpoint = source(trainer).endpoint
    await asyncio.to_thread(trainer.publisher.close)
    async with await puller.pull(Lineage(0), Version(0)) as pulled:
        same(pulled, WEIGHTS, direct=False)
    with pytest.raises(ConnectionRefusedError):
        connect(endpoint)


async def test_a_place_that_is_no_address_is_refused_before_anybody_is_sent_there(run: Run) -> None:
    trainer = await run.trainer()
    client = run.client(run.where.parameters, trainer.worker)
    ask: BeginPublish = begin(trainer)
    to = await client.ask(ask, BeginPublishReply)
    with pytest.raises(Refused) as no:
        await client.call(CommitPublish(upload=to.upload, manifest=manifest(), direct="udp://nowhere"), [BYTES])
    assert no.value.code is Code.MALFORMED


async def test_the_server_sends_nobody_to_a_trainer_that_is_gone(run: Run, trainer: Trainer) -> None:
    await trainer.publish(0, WEIGHTS)
    client = run.client(run.where.parameters, WorkerId("reader.1"))
    ask = GetManifest(worker=WorkerId("reader.1"), lineage=Lineage(0), version=Version(0))
    assert (await client.ask(ask, ManifestReply)).direct == source(trainer).endpoint
    await asyncio.to_thread(trainer.publisher.close)
    async with asyncio.timeout(60):
        while (await client.ask(ask, ManifestReply)).direct:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


def test_it_listens_on_the_address_that_was_named_and_on_no_other() -> None:
    opened = DirectSource(LOOPBACK)
    try:
        port = int(opened.endpoint.rpartition(":")[2])
        socket.create_connection(("127.0.0.1", port)).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port))
        with pytest.raises(
            ConfigError, match=r"parameters\.direct_bind .* the system refuses it: Address already in use"
        ):
            DirectSource(f"tcp://127.0.0.1:{port}")
    finally:
        opened.close()


def test_a_configuration_says_where_engines_meet_the_trainer() -> None:
    folder = Path(__file__).parent.parent.parent.parent / "configs"
    assert trainer_main.direct_bind(load(folder / "smoke.toml")) == ""
    assert trainer_main.direct_bind(load(folder / "direct.toml")) == LOOPBACK
    named = ["parameters.direct_bind=tcp://127.0.0.1:5590"]
    assert trainer_main.direct_bind(load(folder / "direct.toml", named)) == "tcp://127.0.0.1:5590"


def test_a_copy_that_is_being_given_is_not_written_over() -> None:
    opened = DirectSource(LOOPBACK)
    try:
        opened.hold(WEIGHTS, Lineage(0), Version(0))
        ask = Ask(group="slow", lineage=Lineage(0), version=Version(0), nbytes=132, card="")
        held = opened._acquire(ask)
        assert held is not None
        before = held.data.tobytes()
        opened.hold({name: array + array.dtype.type(1) for name, array in WEIGHTS.items()}, Lineage(0), Version(1))
        assert held.data.tobytes() == before
        assert opened._acquire(ask) is None  # no longer the newest
        newest = opened._newest
        assert newest is not None
        opened.hold(WEIGHTS, Lineage(0), Version(2))
        assert opened._newest is not None
        assert opened._newest.data is newest.data  # no reader took that version, so its memory is reused
    finally:
        opened.close()
