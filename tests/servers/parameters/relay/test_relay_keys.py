"""Relays with keys form the same tree and serve only the workers whose keys permit it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.cli.main import main
from staleflow.clients.weights import Publisher, Puller, mapped, relays
from staleflow.configs.loading.load import config_sha
from staleflow.configs.schema import Config
from staleflow.net.client import Client
from staleflow.net.endpoint import Call, Endpoint
from staleflow.net.errors import Refused
from staleflow.net.permissions import Role
from staleflow.net.security import client_sockets, server_sockets
from staleflow.net.transport import SOCKETS
from staleflow.net.zmq_stream import end_context
from staleflow.process.daemon import Stop
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import Lineage, TrainerTerm, Version, WorkerId
from staleflow.protocols.wire.messages import (
    Attach,
    AttachReply,
    GetChunk,
    GetManifest,
    GetRetainedVersions,
    GetStatus,
    JoinRelays,
    ManifestReply,
    ParametersStatus,
    Ping,
    Pong,
    RegisterVersion,
    RegisterVersionReply,
    RetainedVersions,
    SchedulerStatus,
    Sources,
)
from staleflow.protocols.wire.messages.status import RelayPlace
from staleflow.protocols.wire.tensors import Array
from staleflow.servers.parameters import main as parameters
from staleflow.servers.parameters import pins, tree
from staleflow.servers.parameters.relay import main as relay_main
from staleflow.servers.parameters.relay import service as relay
from staleflow.servers.parameters.service import ParameterService
from staleflow.servers.runner import Answer
from tests.servers.running import GIVE_UP_S, config_of, eventually

WEIGHTS: dict[str, Array] = {"w": np.random.default_rng(0).random((300, 100), dtype=np.float32)}


class Guarded:
    """A parameter server with a relay below it and a stored version, all over TCP with keys."""

    def __init__(self, folder: Path, ports: list[int]) -> None:
        assert main(["keygen", str(folder / "keys")]) == 0
        scheduler, root = (f"tcp://127.0.0.1:{port}" for port in ports[:2])
        self.run_dir, keys = folder / "run", {"keys": str(folder / "keys")}
        self.config: Config = config_of(
            self.run_dir, security=keys, scheduler={"bind": scheduler}, parameters={"bind": root}
        )
        self._own = server_sockets(self.config)
        self._scheduler = Endpoint(scheduler, on_call=self._answer, transport=self._own)
        self._stops = Stop(), Stop()
        self._clients: list[Client | Puller | Publisher] = []
        self.root = root
        below = relay_main.serve_until(
            self._stops[1], self.config, self.run_dir, "relay-0", self._scheduler.address, transport=self._own
        )
        above = parameters.serve_until(self._stops[0], self.config, self.run_dir, transport=self._own)
        self._serving = [asyncio.ensure_future(work) for work in (self._scheduler.serve(), above, below)]

    def _answer(self, call: Call) -> None:
        """Send the scheduler's replies, as far as weights are concerned."""
        match call.body:
            case Attach():
                call.reply(
                    AttachReply(
                        run="guarded",
                        config=b"",
                        config_sha=config_sha(self.config),
                        run_dir="",
                        shards=[],
                        parameters=self.root,
                        lineage=Lineage(0),
                        version=Version(0),
                        lease_ms=1000,
                    )
                )
            case RegisterVersion() as ask:
                call.reply(RegisterVersionReply(lineage=ask.lineage, version=ask.version))
            case GetRetainedVersions():
                call.reply(RetainedVersions(versions=[]))
            case _:
                call.reply(SchedulerStatus(trainer_term=1))

    def client(self, address: str, role: Role | None, name: str = "worker.1") -> Client:
        """Return a client with a key of this role, or without a key if ``role`` is None."""
        transport = SOCKETS if role is None else client_sockets(self.config.security, role)
        self._clients.append(made := Client(address, worker=WorkerId(name), transport=transport))
        return made

    async def publish(self, version: int = 0) -> None:
        trainer = client_sockets(self.config.security, Role.TRAINER)
        self._clients.append(publisher := Publisher(self.root, worker=WorkerId("trainer.1"), transport=trainer))
        await publisher.publish(
            WEIGHTS, trainer_term=TrainerTerm(1), lineage=Lineage(0), version=Version(version), batch=None
        )

    def reader(self) -> Puller:
        rollout = client_sockets(self.config.security, Role.ROLLOUT)
        self._clients.append(puller := Puller(self.root, worker=WorkerId("reader.1"), transport=rollout))
        return puller

    async def endpoint(self) -> str:
        """Wait until the relay is in the tree; return its endpoint."""
        looking = self.client(self.root, Role.MONITOR, "looking.1")
        relays_now = await eventually(lambda: _relays(looking))
        return str(relays_now[0].endpoint)

    async def close(self) -> None:
        for client in self._clients:
            client.close()
        for stop in self._stops:
            stop.set("test")
        await asyncio.gather(*self._serving[1:])
        self._scheduler.close()
        await self._serving[0]


async def _relays(looking: Client) -> tuple[RelayPlace, ...]:
    return (await looking.ask(GetStatus(), ParametersStatus)).relays


@pytest.fixture
async def guarded(short_dir: Path, ports: list[int], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Guarded]:
    """Put the parameter server, the relay and the readers on three different hosts."""
    monkeypatch.setattr(relay, "JOIN_INTERVAL_S", 0.05)
    monkeypatch.setattr(relay, "boot_id", lambda: "the relay's host")
    monkeypatch.setattr(tree, "is_loopback", str.isspace)  # always False: the relay is reachable from everywhere
    monkeypatch.setattr(tree, "ROOT_READERS", 0)
    for module in (mapped, relays):
        monkeypatch.setattr(module, "boot_id", lambda: "far away")
    guarded = Guarded(short_dir, ports)
    yield guarded
    await guarded.close()
    end_context()  # this also ends the endpoints' own contexts


async def test_readers_with_keys_have_the_version_from_a_relay_with_the_servers_key(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    serve = ParameterService._read  # pyright: ignore[reportPrivateUsage]

    async def noted(self: ParameterService, peer: str, ask: GetChunk, *stored: Any) -> Answer:
        asked.append(peer.partition(".")[0])
        return await serve(self, peer, ask, *stored)

    monkeypatch.setattr(ParameterService, "_read", noted)
    assert (await guarded.endpoint()).startswith("tcp://127.0.0.1:")
    await guarded.publish()
    async with await guarded.reader().pull(Lineage(0), Version(0)) as pulled:
        np.testing.assert_array_equal(pulled.arrays()["w"], WEIGHTS["w"])
    assert set(asked) == {"relay-0"}, "the reader took its bytes from the parameter server"


async def test_who_has_no_key_gets_no_word_out_of_a_relay(guarded: Guarded) -> None:
    endpoint = await guarded.endpoint()
    assert isinstance(await guarded.client(endpoint, Role.ROLLOUT).ask(Ping(), Pong, timeout_s=GIVE_UP_S), Pong)
    with pytest.raises(Refused, match="was contacted with no key"):
        await guarded.client(endpoint, None, "stranger.1").ask(Ping(), Pong, timeout_s=GIVE_UP_S)


@pytest.mark.parametrize("role", [Role.ROLLOUT, Role.TRAINER, Role.STAGE, Role.MONITOR])
async def test_nobody_but_a_server_s_key_joins_the_tree(guarded: Guarded, role: Role) -> None:
    worker = WorkerId("worker.1")
    join = JoinRelays(worker=worker, run="guarded", endpoint="tcp://127.0.0.1:5999", host="here")
    with pytest.raises(Refused) as no:
        await guarded.client(guarded.root, role, worker).ask(join, Sources, timeout_s=GIVE_UP_S)
    assert no.value.code is Code.DENIED


async def test_workers_of_one_key_pin_a_few_versions_together_at_the_parameter_server(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins, "MAX_PER_KEY", 1)
    for version in (0, 1):
        await guarded.publish(version)
    for name, role, version in (
        ("trainer.2", Role.TRAINER, 0),
        ("greedy.1", Role.ROLLOUT, 0),
        ("greedy.2", Role.ROLLOUT, 1),
    ):
        ask = GetManifest(worker=WorkerId(name), lineage=Lineage(0), version=Version(version))
        await guarded.client(guarded.root, role, name).ask(ask, ManifestReply, timeout_s=GIVE_UP_S)
    looking = guarded.client(guarded.root, Role.MONITOR, "looking.1")
    rows = (await looking.ask(GetStatus(), ParametersStatus)).versions
    assert {row.version: row.pinned_by for row in rows} == {0: ("trainer.2",), 1: ("greedy.2",)}
