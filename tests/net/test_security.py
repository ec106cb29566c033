"""Each process loads the right key, and a server that is bound to every interface can be found."""

from pathlib import Path

import pytest

from staleflow.cli.main import main
from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config, Prompts, Reward, Security
from staleflow.net.addresses import is_loopback, reachable
from staleflow.net.keys import VARIABLE
from staleflow.net.permissions import Role
from staleflow.net.security import OBSERVER_ROLES, check_keys, client_sockets, security_mode, server_sockets
from staleflow.net.transport import SOCKETS, Sockets


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert main(["keygen", str(tmp_path / "keys")]) == 0
    return tmp_path / "keys"


def config(keys: Path | None = None, *, insecure: bool = False) -> Config:
    security = Security(keys=str(keys or ""), insecure=insecure)
    return Config(prompts=Prompts(path="/p.jsonl"), reward=Reward(run="a:b"), security=security)


def key_of(sockets: Sockets) -> tuple[Role, str]:
    key = sockets.key
    assert key is not None
    return key.role, Path(key.path).name


def test_without_keys_there_are_plain_sockets() -> None:
    assert server_sockets(config()) is SOCKETS
    assert client_sockets(config().security, Role.STAGE) is client_sockets(None, Role.STAGE) is SOCKETS
    assert server_sockets(config(insecure=True)).key is None
    check_keys(config())


def test_a_process_takes_the_file_of_its_role(folder: Path) -> None:
    run = config(folder)
    assert key_of(server_sockets(run)) == (Role.SERVER, "server.key")
    assert key_of(client_sockets(run.security, Role.ROLLOUT)) == (Role.ROLLOUT, "rollout.key")
    assert key_of(client_sockets(run.security, *OBSERVER_ROLES)) == (Role.MONITOR, "monitor.key")
    (folder / "monitor.key").unlink()
    assert key_of(client_sockets(run.security, *OBSERVER_ROLES)) == (Role.ADMIN, "admin.key")
    check_keys(run)
    assert [security_mode(one) for one in (run, config(), config(insecure=True))] == ["keys", "local", "insecure"]


def test_the_environment_names_another_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["keygen", str(folder), "--add", "rollout", "--name", "box-7"]) == 0
    monkeypatch.setenv(VARIABLE, str(folder / "box-7.key"))
    assert key_of(client_sockets(None, Role.ROLLOUT)) == (Role.ROLLOUT, "box-7.key")
    assert key_of(client_sockets(config(folder).security, Role.ROLLOUT)) == (Role.ROLLOUT, "box-7.key")
    with pytest.raises(ConfigError, match="its role is rollout; here it must be trainer"):
        client_sockets(None, Role.TRAINER)


def test_the_environment_names_a_folder_of_which_each_process_takes_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine of a launched run finds its keys although the configuration names a folder of another machine."""
    monkeypatch.setenv(VARIABLE, str(folder))
    elsewhere = config(Path("/not/here"))
    assert key_of(client_sockets(None, Role.ROLLOUT)) == (Role.ROLLOUT, "rollout.key")
    assert key_of(client_sockets(elsewhere.security, Role.STAGE)) == (Role.STAGE, "stage.key")
    assert key_of(server_sockets(elsewhere)) == (Role.SERVER, "server.key")


def test_a_run_whose_keys_are_not_all_there_does_not_start(folder: Path) -> None:
    (folder / "stage.key").unlink()
    with pytest.raises(ConfigError, match=r"stage\.key.*no such file; staleflow keygen makes it"):
        check_keys(config(folder))
    (folder / "allowed.toml").unlink()
    with pytest.raises(ConfigError, match=r"allow-list is .*allowed\.toml.*cannot be read"):
        server_sockets(config(folder))


def test_a_server_never_serves_with_the_key_of_a_worker(folder: Path) -> None:
    (folder / "server.key").unlink()
    (folder / "rollout.key").rename(folder / "server.key")
    with pytest.raises(ConfigError, match="its role is rollout; here it must be server"):
        server_sockets(config(folder))


@pytest.mark.parametrize(
    ("endpoint", "via", "found"),
    [
        ("tcp://0.0.0.0:6000", "tcp://node-3:5000", "tcp://node-3:6000"),
        ("tcp://[::]:6000", "tcp://[fe80::1]:5000", "tcp://[fe80::1]:6000"),
        ("tcp://10.0.0.7:6000", "tcp://node-3:5000", "tcp://10.0.0.7:6000"),
        ("tcp://0.0.0.0:6000", "ipc:///run/s", "tcp://0.0.0.0:6000"),
        ("ipc:///run/t", "tcp://node-3:5000", "ipc:///run/t"),
        ("", "tcp://node-3:5000", ""),
    ],
)
def test_a_server_on_every_interface_is_reached_where_its_scheduler_is(endpoint: str, via: str, found: str) -> None:
    assert reachable(endpoint, via) == found


def test_loopback_is_told_from_the_rest() -> None:
    assert all(map(is_loopback, ("ipc:///run/s", "tcp://127.0.0.1:5", "tcp://[::1]:5", "tcp://localhost:5")))
    assert not any(map(is_loopback, ("tcp://0.0.0.0:5", "tcp://node-3:5", "tcp://[::ffff:10.0.0.1]:5", "tcp://lo:5")))
