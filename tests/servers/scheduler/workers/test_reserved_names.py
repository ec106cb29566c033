"""The name of a process is protected: from other roles, and from other keys while its owner is attached."""

import asyncio
import socket
from pathlib import Path

import pytest

from staleflow.cli.main import main
from staleflow.net.client import Client
from staleflow.net.errors import Refused
from staleflow.net.limits import TransportLimits
from staleflow.net.permissions import Role
from staleflow.net.security import client_sockets, server_sockets
from staleflow.process.daemon import Stop
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import (
    Attach,
    AttachReply,
    Commands,
    Detach,
    GetRetained,
    Ping,
    Refusal,
    Request,
    Retained,
)
from staleflow.servers.scheduler.main import open_store, serve_until
from staleflow.servers.scheduler.workers import registry
from staleflow.servers.scheduler.workers.attachments import name_objection
from staleflow.supervisor.joining import generated_name
from tests.servers.running import config_of, eventually
from tests.servers.scheduler.asked import Asked


def refused(answer: object) -> Code | None:
    return answer.code if isinstance(answer, Refusal) else None


def test_a_name_belongs_to_its_role(tmp_path: Path) -> None:
    run = Asked(tmp_path)
    run.cast("a")
    held = run.leases("a")
    for name in ("name-of-a", "trainer", "trajectories-0", "parameters"):
        assert refused(run.attach("evil", name, "monitor", Role.MONITOR)) is Code.DENIED
    assert run.leases("a") == held
    assert isinstance(run.report("a"), Commands | None)
    run.stop()
    run.start()
    answer = run.attach("b", "b", "rollout", Role.ROLLOUT, capacity=1)
    assert isinstance(answer, AttachReply)
    assert all(answer.shards)
    assert answer.parameters
    assert refused(run.attach("evil", "trajectories-0", "monitor", Role.MONITOR)) is Code.DENIED
    run.stop()


def test_a_name_belongs_to_its_key_while_its_owner_is_there(tmp_path: Path) -> None:
    run = Asked(tmp_path)
    run.cast("a")
    held = run.leases("a")
    other = ("evil", "name-of-a", "rollout", Role.ROLLOUT)
    assert refused(run.attach(*other, key="key-of-evil", capacity=4)) is Code.BUSY
    assert run.leases("a") == held
    run.service.on_gone("a")
    assert isinstance(
        run.attach("a.again", "name-of-a", "rollout", Role.ROLLOUT, key="key-of-a", capacity=4), AttachReply
    )
    run.service.on_gone("a.again")
    assert isinstance(run.attach(*other, key="key-of-evil", capacity=4), AttachReply)
    run.stop()


def test_a_live_process_keeps_its_name(tmp_path: Path) -> None:
    """The same key is no proof of identity: several workers may share one."""
    run = Asked(tmp_path)
    run.cast("a")
    held = run.leases("a")
    again = ("a.again", "name-of-a", "rollout", Role.ROLLOUT)
    for slot in ("", "made up"):
        answer = run.attach(*again, key="key-of-a", capacity=4, slot=slot)
        assert isinstance(answer, Refusal)
        assert answer.code is Code.BUSY
        assert answer.detail == "the live process a has this name; end it, or use another name"
        assert answer.retry_for_ms > TransportLimits().silence_s * 1_000, "long enough for a dead one to be silent"
    assert run.leases("a") == held
    run.service.on_gone("a")
    assert isinstance(run.attach(*again, key="key-of-a", capacity=4), AttachReply)
    run.stop()


def test_a_successor_in_the_same_slot_has_the_name_at_once(tmp_path: Path) -> None:
    run = Asked(tmp_path)
    run.cast()

    def attach(worker: str, slot: str, key: str = "box") -> object:
        return run.attach(worker, "rollout-0", "rollout", Role.ROLLOUT, key=key, capacity=1, slot=slot)

    assert isinstance(attach("a", "secret"), AttachReply)
    assert refused(attach("b", "other")) is Code.BUSY
    assert refused(attach("x", "secret", key="of another")) is Code.BUSY
    assert isinstance(attach("b", "secret"), AttachReply)
    run.stop()
    run.start()
    assert isinstance(run.report("b"), Refusal | Commands | None)  # reports again, so it is alive
    assert refused(attach("c", "other", key="rollout")) is Code.BUSY
    assert isinstance(attach("c", "secret", key="rollout"), AttachReply)
    run.stop()


@pytest.mark.parametrize(
    "name", ["trainer", "trainer-1", "trajectories-0", "parameters", "relay-0", "scheduler", "reward-7"]
)
def test_a_rollout_key_never_has_the_name_of_another_role(tmp_path: Path, name: str) -> None:
    """The name is also refused while it is free: its owner may have left briefly, or may attach later."""
    run = Asked(tmp_path)
    for _ in range(2):
        answer = run.attach("evil.1", name, "rollout", Role.ROLLOUT, key="box", capacity=1)
        assert isinstance(answer, Refusal)
        assert answer.code is Code.DENIED
        assert answer.detail.startswith(f'name is "{name}", which is reserved for ')
        assert refused(run.attach(f"{name}.ab12", "mine", "rollout", Role.ROLLOUT, key="box")) is Code.DENIED
        run.stop()
        run.start()
    run.stop()


def test_each_role_has_the_names_that_begin_with_its_word() -> None:
    stages = ("reward", "judge")
    own = {
        "rollout-0-1": "rollout",
        "judge-3": "stage",
        "trainer-1": "trainer",
        "relay-0": "relay",
        "admin.ab": "monitor",
    }
    for name, role in own.items():
        assert name_objection(name, role, stages) is None
        assert name_objection(name, "trajectories", stages) is not None
    for name in ("gpu-box-7", "trainers-box", "critic-0", "rolloutx", "日本"):
        assert name_objection(name, "rollout", stages) is None, "no word of a role or of a stage of this run"


def test_a_made_up_name_is_never_made_up_twice() -> None:
    assert len({generated_name("rollout", "") for _ in range(10_000)}) == 10_000
    assert len(generated_name("rollout", "").removeprefix("rollout-")) * 4 >= 64
    assert generated_name("stage", "judge").startswith("judge-")
    assert generated_name("train", "") == "trainer"


def test_an_echo_of_attach_does_not_throw_the_successor_out(tmp_path: Path) -> None:
    run = Asked(tmp_path)
    run.cast("a")
    first, second = ((worker, "name-of-a", "rollout", Role.ROLLOUT, "key-of-a") for worker in ("a", "a.again"))

    def attach(worker: str, name: str, role: str, key_role: Role, key: str) -> object:
        return run.attach(worker, name, role, key_role, key=key, capacity=4)

    run.service.on_gone("a")
    assert isinstance(attach(*second), AttachReply)
    late = attach(*first)
    assert late == Refusal(code=Code.FENCED, detail="a newer process has taken the name of a")
    assert isinstance(run.report("a.again"), Commands | None)
    assert refused(run.report("a")) is Code.FENCED
    run.stop()


def test_an_echo_of_attach_does_not_bring_a_server_back_to_where_it_was(tmp_path: Path) -> None:
    run = Asked(tmp_path)
    run.cast()

    def attach(worker: str, endpoint: str) -> object:
        return run.attach(worker, "trajectories-0", "trajectories", Role.SERVER, endpoint=endpoint, rows=1000)

    run.service.on_gone("shard.1")
    answer = attach("shard.2", "ipc:///new")
    assert refused(attach("shard.1", "ipc:///s")) is Code.FENCED
    assert isinstance(answer, AttachReply)
    assert attach("shard.2", "ipc:///new") == answer
    assert answer.shards == ["ipc:///new"]
    run.stop()


def test_who_has_said_goodbye_does_not_come_back_but_who_looks_may(tmp_path: Path) -> None:
    run = Asked(tmp_path)
    run.cast("a")
    run.ask("a", Role.ROLLOUT, Detach(worker=WorkerId("a"), why="test"), key="key-of-a")
    assert isinstance(
        run.attach("a.again", "name-of-a", "rollout", Role.ROLLOUT, key="key-of-a", capacity=4), AttachReply
    )
    late = run.attach("a", "name-of-a", "rollout", Role.ROLLOUT, key="key-of-a", capacity=4)
    assert late == Refusal(code=Code.FENCED, detail="a has detached")
    for _ in range(2):
        assert isinstance(run.attach("m", "m", "monitor", Role.MONITOR), AttachReply)
        run.ask("m", Role.MONITOR, Detach(worker=WorkerId("m"), why="test"))
    run.stop()


def test_those_that_are_over_are_not_known_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_ENDED", 2)
    run = Asked(tmp_path)
    for number in range(5):
        run.attach(f"w{number}", "w", "rollout", Role.ROLLOUT, capacity=1, slot="w")
    late = [
        refused(run.attach(f"w{number}", "w", "rollout", Role.ROLLOUT, capacity=1, slot="w")) for number in (3, 2, 4, 1)
    ]
    assert late == [Code.FENCED, Code.FENCED, None, None]
    run.stop()


def test_a_worker_is_its_roles_and_its_keys_if_only_its_role_is_known_after_a_restart(tmp_path: Path) -> None:
    run = Asked(tmp_path)
    run.cast("a")
    its_own, another = "rollout/key-of-a", "a has another key"
    theirs = [("monitor/m", Role.MONITOR), ("stage/s", Role.STAGE), ("server/s", Role.SERVER)]
    for known in (True, False):
        says = run.service.name_conflict
        assert says("a", Role.ROLLOUT, its_own) is None
        assert says("a", Role.ROLLOUT, "rollout/evil") == (another if known else None)
        assert [says("a", role, key) for key, role in theirs] == [
            f"a is a process of role rollout; a key of role {role} may not act for it" for _, role in theirs
        ]
        assert says("shard.1", Role.SERVER, "server/server") is None
        assert says("nobody", Role.MONITOR, "monitor/m") is None
        run.service.on_gone("a")
        assert says("a", Role.ROLLOUT, "rollout/evil") == (another if known else None)
        run.stop()
        run.start()
    run.stop()


async def test_after_a_restart_nobody_takes_the_name_of_a_server_that_is_not_back_yet(
    short_dir: Path, ports: list[int]
) -> None:
    assert main(["keygen", str(short_dir / "keys")]) == 0
    bind = f"tcp://127.0.0.1:{ports[0]}"
    config = config_of(short_dir / "run", security={"keys": str(short_dir / "keys")}, scheduler={"bind": bind})
    shard = WorkerId("trajectories-0.ab12cd34")
    hello = Attach(worker=shard, name="trajectories-0", role="trajectories", endpoint="ipc:///t", rows=40)

    async def ask(role: Role, body: Request) -> object:
        client = Client(bind, worker=shard, transport=client_sockets(config.security, role))
        try:
            return (await client.call(body))[0]
        except Refused as no:
            return no.code
        finally:
            client.close()

    async def answers(*asked: tuple[Role, Request]) -> list[object]:
        """Return the answers of a scheduler that is started for these requests."""
        stop, store = Stop(), open_store(config, short_dir / "run")
        sockets = server_sockets(config)
        serving = asyncio.create_task(serve_until(stop, config, short_dir / "run", store, transport=sockets))
        given = [await ask(role, body) for role, body in asked]
        stop.set("test")
        await serving
        store.close()
        await eventually(refused)
        return given

    async def refused() -> bool:
        """Return True once the port is closed; ZeroMQ closes it in a thread of its own."""
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", ports[0])) != 0

    assert isinstance((await answers((Role.SERVER, hello)))[0], AttachReply)
    squatters = (Role.MONITOR, Role.ROLLOUT, Role.STAGE)
    own = (Role.SERVER, GetRetained(shard=0, groups=[]))
    given = await answers(*((role, Ping()) for role in squatters), own)
    assert given == [Code.DENIED, Code.DENIED, Code.DENIED, Retained(keep=[])]


def test_a_name_can_be_printed(tmp_path: Path) -> None:
    run = Asked(tmp_path)
    for letter in ("\x1b", "\x07", "\n", "\x9b", "\x7f", "\u202e", "\u2028"):
        for worker, name in (("a", f"a{letter}]0;title"), (f"a{letter}", "a")):
            answer = run.attach(worker, name, "rollout", Role.ROLLOUT, capacity=1)
            assert isinstance(answer, Refusal)
            assert answer.code is Code.MALFORMED
            assert answer.detail.isprintable()
    assert isinstance(run.attach("b", "Läufer 日本", "rollout", Role.ROLLOUT, capacity=1), AttachReply)
    run.stop()
