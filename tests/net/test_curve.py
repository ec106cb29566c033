"""Endpoints with keys over real TCP admit only allowed keys, limit each role's requests, and follow key changes."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from staleflow.cli.main import main
from staleflow.configs.errors import ConfigError
from staleflow.net.allow_list import AllowList, read_allowed, write_allowed
from staleflow.net.client import Client
from staleflow.net.endpoint import Call, Endpoint
from staleflow.net.errors import Refused, Unavailable
from staleflow.net.keys import new_pair, read_key, write_key
from staleflow.net.permissions import Role
from staleflow.net.transport import Sockets
from staleflow.net.zmq_stream import end_context
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import TrainerTerm, WorkerId
from staleflow.protocols.wire.codec import encode_request
from staleflow.protocols.wire.messages import Done, Drain, Finished, GetStatus, Ping, RelayStatus, Request, Status

if TYPE_CHECKING:
    from tests.net.conftest import Network

LOOPBACK = "tcp://127.0.0.1:0"
FINISHED = Finished(trainer_term=TrainerTerm(0))


class Guarded:
    """An endpoint with keys that accepts every call, and clients with keys of any role."""

    def __init__(self, network: "Network", folder: Path) -> None:
        self.folder = folder
        self.network = network
        self.seen: list[Request] = []
        self.denied: list[tuple[str, str]] = []
        self.strangers: list[str] = []
        self.gone: list[str] = []
        self.others: set[tuple[str, Role, str]] = set()
        """(name, role, key) of processes that may not take the name."""
        self.allowed = folder / "allowed.toml"
        sockets = Sockets(read_key(folder / "server.key"), AllowList(self.allowed))
        sockets.on_rejected = lambda address, public: self.strangers.append(public)
        self.endpoint = Endpoint(
            LOOPBACK,
            on_call=self._yes,
            on_denied=lambda peer, verb: self.denied.append((peer, verb)),
            on_gone=self.gone.append,
            name_conflict=self._name_conflict,
            limits=network.limits,
            transport=sockets,
        )
        network.endpoints.append(self.endpoint)
        network.tasks.append(asyncio.create_task(self.endpoint.serve()))

    def _name_conflict(self, *who: *tuple[str, Role, str]) -> str | None:
        return "it is another's" if who in self.others else None

    def _yes(self, call: Call) -> None:
        self.seen.append(call.body)
        call.reply(Done() if not isinstance(call.body, GetStatus) else RelayStatus(), call.frames)

    def client(self, key: str | None, name: str = "worker-0.1") -> Client:
        """Create a client with the key in the folder's file ``key``; None connects without a key."""
        sockets = Sockets(read_key(self.folder / f"{key}.key")) if key else Sockets()
        limits = replace(self.network.limits, retry_s=20, retry_cap_s=20)  # a test compares the calls exactly
        client = Client(self.endpoint.address, worker=WorkerId(name), limits=limits, transport=sockets)
        self.network.clients.append(client)
        return client

    def revoke(self, name: str) -> None:
        held = read_allowed(self.allowed)
        write_allowed(self.allowed, {public: holder for public, holder in held.items() if holder.name != name})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert main(["keygen", str(tmp_path / "keys")]) == 0
    return tmp_path / "keys"


@pytest.fixture
async def guarded(network: "Network", folder: Path) -> AsyncIterator[Guarded]:
    yield Guarded(network, folder)
    await network.close()
    end_context()  # the endpoint's own context ends too


async def ping_on(client: Client) -> None:
    while True:
        await client.call(Ping())
        await asyncio.sleep(0.05)


async def refused(client: Client, body: Request) -> Refused:
    with pytest.raises(Refused) as caught:
        await client.call(body)
    return caught.value


async def test_a_key_may_ask_what_its_role_may(guarded: Guarded) -> None:
    assert await guarded.client("trainer", "trainer.1").ask(FINISHED, Done) == Done()
    assert await guarded.client("admin", "admin.1").ask(Drain(why=""), Done) == Done()
    assert await guarded.client("monitor", "monitor.1").ask(GetStatus(), Status) == RelayStatus()
    assert guarded.seen == [FINISHED, Drain(why=""), GetStatus()]


async def test_a_verb_of_another_role_is_denied_before_it_is_a_call(guarded: Guarded) -> None:
    no = await refused(guarded.client("rollout"), FINISHED)
    assert (no.code, no.detail) == (Code.DENIED, "a key of role rollout may not send Finished")
    assert (await refused(guarded.client("monitor", "monitor.1"), Drain(why=""))).code is Code.DENIED
    assert guarded.seen == []
    assert guarded.denied == [("worker-0.1", "Finished"), ("monitor.1", "Drain")]
    assert guarded.endpoint.counts.denied == 2


async def test_a_key_that_is_not_in_the_list_does_not_get_in(guarded: Guarded, folder: Path) -> None:
    public, secret = new_pair()
    write_key(folder / "stranger.key", Role.ADMIN, public, secret, read_key(folder / "server.key").public)
    no = await refused(guarded.client("stranger"), GetStatus())
    assert (no.code, guarded.strangers[0]) == (Code.DENIED, public.decode())
    assert no.detail.endswith(f"the key {folder}/stranger.key: it is not in the server's allow-list")
    assert (guarded.seen, guarded.endpoint.counts.calls) == ([], 0)


async def test_without_a_key_nobody_gets_in(guarded: Guarded) -> None:
    no = await refused(guarded.client(None), GetStatus())
    assert "was contacted with no key, but the server requires one; set STALEFLOW_KEY to its file" in no.detail
    assert guarded.seen == []


async def test_a_client_with_a_key_never_talks_in_the_clear(network: "Network", folder: Path) -> None:
    endpoint = network.endpoint(LOOPBACK, lambda call: call.reply(Done()))
    sockets = Sockets(read_key(folder / "admin.key"))
    client = Client(endpoint.address, worker=WorkerId("admin.1"), limits=network.limits, transport=sockets)
    network.clients.append(client)
    assert "but the server has no keys" in (await refused(client, Drain(why=""))).detail
    assert endpoint.counts.calls == 0


async def test_a_client_does_not_speak_to_a_server_with_another_key(
    guarded: Guarded, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = read_key(folder / "monitor.key")
    write_key(folder / "misled.key", Role.MONITOR, own.public, own.secret, new_pair()[0])
    with pytest.raises(Unavailable), caplog.at_level(logging.WARNING):
        await guarded.client("misled").call(GetStatus(), timeout_s=1)
    await guarded.network.until(lambda: "aborted the handshake; check that" in caplog.text)
    assert guarded.seen == []


async def test_what_travels_is_encrypted_only_with_keys(guarded: Guarded, network: "Network") -> None:
    """A relay on the path can read the bytes of a plain connection and none of an encrypted one."""
    plain = network.endpoint(LOOPBACK, lambda call: call.reply(Done()))
    word = b"a secret word of a trajectory"
    for address, sockets, sees in (
        (plain.address, Sockets(), True),
        (guarded.endpoint.address, Sockets(read_key(guarded.folder / "trainer.key")), False),
    ):
        relay = Relay(address)
        await relay.start()
        client = Client(relay.address, worker=WorkerId(f"trainer.{sees}"), limits=network.limits, transport=sockets)
        network.clients.append(client)
        await client.call(FINISHED, [word])
        assert (word in relay.heard) is sees
        client.close()
        await relay.close()


async def test_a_revoked_key_is_out_at_once_and_a_new_one_is_in(guarded: Guarded, folder: Path) -> None:
    client = guarded.client("rollout")
    await client.call(Ping())
    assert main(["keygen", str(folder), "--add", "rollout", "--name", "next"]) == 0
    await guarded.client("next", "worker-1.1").call(Ping())
    guarded.revoke("rollout")
    with pytest.raises(Refused) as caught:
        await asyncio.wait_for(ping_on(client), 60)
    assert caught.value.code is Code.DENIED
    await guarded.network.until(lambda: guarded.strangers)  # its connection was cut, and its reconnects fail
    await guarded.client("next", "worker-2.1").call(Ping())


async def test_the_message_of_a_key_revoked_meanwhile_changes_nothing(guarded: Guarded) -> None:
    client = guarded.client("trainer", "trainer.1")
    await client.call(FINISHED)
    guarded.revoke("trainer")
    await guarded.network.until(lambda: guarded.endpoint.peers == [])
    seen = len(guarded.seen)
    assert (await refused(client, FINISHED)).code is Code.DENIED
    assert len(guarded.seen) == seen


async def test_a_name_belongs_to_one_key_while_its_owner_is_there(guarded: Guarded) -> None:
    await guarded.client("trainer", "trainer.1").call(FINISHED)
    assert (await refused(guarded.client("rollout", "trainer.1"), Ping())).detail == "trainer.1 has another key"
    await guarded.client("trainer", "trainer.1").call(FINISHED)


async def test_who_only_looks_keeps_nobody_from_his_name_and_hides_nobodys_end(guarded: Guarded) -> None:
    squatters = [guarded.client(key, "trainer.1") for key in ("monitor", "admin")]
    for squatter in squatters:
        await squatter.call(Ping())
    owner = guarded.client("trainer", "trainer.1")
    assert await owner.ask(FINISHED, Done) == Done()
    assert (await refused(guarded.client("monitor", "trainer.1"), Ping())).detail == "trainer.1 has another key"
    owner.close()
    await guarded.network.until(lambda: guarded.gone == ["trainer.1"])  # both are still attached
    assert await guarded.client("trainer", "trainer.1").ask(FINISHED, Done) == Done()


async def test_the_service_may_say_whose_a_name_is(guarded: Guarded) -> None:
    guarded.others = {("trainer.1", Role.ROLLOUT, "rollout/rollout")}
    assert (await refused(guarded.client("rollout", "trainer.1"), Ping())).detail == "it is another's"
    assert await guarded.client("trainer", "trainer.1").ask(FINISHED, Done) == Done()
    assert guarded.denied == [("trainer.1", "Ping")]


async def test_a_raw_peer_without_curve_is_never_heard(guarded: Guarded, network: "Network") -> None:
    peer = network.dealer(guarded.endpoint.address, b"trainer.1/x")
    peer.zmq.send_multipart([encode_request(1, FINISHED)])
    assert not await asyncio.to_thread(peer.zmq.poll, 500)
    assert guarded.seen == []
    assert guarded.endpoint.counts.malformed == 0


@pytest.mark.parametrize(
    "bind", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0", "tcp://0:0", "tcp://127.1:0", "tcp://localhost:0"]
)
async def test_with_keys_any_address_of_this_machine_may_be_bound(bind: str, network: "Network", folder: Path) -> None:
    sockets = Sockets(read_key(folder / "server.key"), AllowList(folder / "allowed.toml"))
    network.endpoints.append(Endpoint(bind, on_call=lambda call: None, transport=sockets))
    assert network.endpoints[0].address.rpartition(":")[2] != "0"


@pytest.mark.parametrize("bind", ["tcp://no.such.host.invalid:0", "tcp://eth77:0", "tcp://10.255.255.1:0"])
async def test_with_keys_what_is_no_address_of_this_machine_is_refused(bind: str, folder: Path) -> None:
    sockets = Sockets(read_key(folder / "server.key"), AllowList(folder / "allowed.toml"))
    with pytest.raises(ConfigError, match="bind is"):
        Endpoint(bind, on_call=lambda call: None, transport=sockets)
    end_context()


async def test_insecure_binds_anywhere_and_says_so(network: "Network", caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        network.endpoints.append(
            Endpoint("tcp://0.0.0.0:0", on_call=lambda call: None, transport=Sockets(insecure=True))
        )
    assert f"INSECURE: {network.endpoints[0].address} has no keys" in caplog.text


async def test_a_unix_socket_is_for_this_user_only(network: "Network", ipc: str) -> None:
    network.endpoint(ipc, lambda call: None)
    assert os.stat(ipc.removeprefix("ipc://")).st_mode & 0o777 == 0o600


class Relay:
    """Relay of bytes between a client and a server that keeps a copy of them."""

    def __init__(self, address: str) -> None:
        self._to = int(address.rpartition(":")[2])
        self.heard = bytearray()
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.address = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, to = await asyncio.open_connection("127.0.0.1", self._to)
        self._writers += (writer, to)
        await asyncio.gather(self._pass(reader, to.write), self._pass(theirs, writer.write))

    async def _pass(self, reader: asyncio.StreamReader, write: Callable[[bytes], None]) -> None:
        while data := await reader.read(65_536):
            self.heard += data
            write(data)
        for writer in self._writers:
            writer.close()

    async def close(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
