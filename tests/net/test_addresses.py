"""Only loopback and Unix sockets may be bound, and no address that another process uses."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from staleflow.configs.errors import ConfigError
from staleflow.net.addresses import check_bind
from staleflow.net.endpoint import Endpoint


@pytest.fixture
def endpoints() -> Iterator[list[Endpoint]]:
    opened: list[Endpoint] = []
    yield opened
    for endpoint in opened:
        endpoint.close()


def open_at(bind: str) -> Endpoint:
    return Endpoint(bind, on_call=lambda call: None)


@pytest.mark.parametrize(
    "bind",
    [
        "tcp://0.0.0.0:5000",
        "tcp://*:5000",
        "tcp://[::]:5000",
        "tcp://[::0]:5000",
        "tcp://0:5000",
        "tcp://10.0.0.1:5000",
        "tcp://[fe80::1]:5000",
        "tcp://[::ffff:10.0.0.1]:5000",
        "tcp://eth0:5000",
        "tcp://lo:5000",
        "tcp://example.org:5000",
        "tcp://LOCALHOST.example.org:5000",
        "tcp://127.1:5000",
        "tcp://2130706433:5000",
        "tcp://128.0.0.1:5000",
    ],
)
def test_a_bind_beyond_loopback_is_refused(bind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_at(bind)
    allowed = "it must be on the loopback interface (127.0.0.1, [::1]) or an ipc:// path"
    assert str(caught.value) == f'bind is "{bind}"; without keys (security.keys) {allowed}'


@pytest.mark.parametrize(
    "bind",
    [
        "",
        "5000",
        "127.0.0.1:5000",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:",
        "tcp://127.0.0.1:x",
        "tcp://127.0.0.1:70000",
        "tcp://:5000",
        "tcp://::1:5000",
        "tcp://127.0.0.1:5000;tcp://0.0.0.0:5000",
        "tcp://0.0.0.0:0;127.0.0.1:5000",
        "tcp://127.0.0.1:5000\n",
        "udp://127.0.0.1:5000",
        "pgm://127.0.0.1:5000",
        "inproc://name",
        "ipc://",
        "ipc://relative/path",
        "ipc://@abstract",
        "ipc://*",
        "ipc:///" + "x" * 107,
    ],
)
def test_what_is_no_address_is_refused(bind: str) -> None:
    with pytest.raises(ConfigError, match="address is"):
        open_at(bind)


def test_loopback_spellings_are_allowed() -> None:
    assert check_bind("tcp://127.0.0.1:5000") == "tcp://127.0.0.1:5000"
    assert check_bind("tcp://127.8.9.10:5000") == "tcp://127.8.9.10:5000"
    assert check_bind("tcp://localhost:5000") == "tcp://127.0.0.1:5000"
    assert check_bind("tcp://[::1]:0") == check_bind("tcp://[0:0::1]:*") == "tcp://[::1]:*"
    assert check_bind("ipc:///run/s") == "ipc:///run/s"


def test_a_port_in_use_is_named(endpoints: list[Endpoint]) -> None:
    endpoints.append(open_at("tcp://127.0.0.1:0"))
    with pytest.raises(ConfigError) as caught:
        open_at(endpoints[0].address)
    assert str(caught.value) == f'bind is "{endpoints[0].address}"; it is in use; it must be free'


def test_a_socket_file_that_somebody_listens_on_is_left_alone(endpoints: list[Endpoint], ipc: str) -> None:
    endpoints.append(open_at(ipc))
    with pytest.raises(ConfigError, match="it is in use"):
        open_at(ipc)
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(ipc.removeprefix("ipc://"))


def test_the_socket_file_of_a_dead_process_is_removed(endpoints: list[Endpoint], ipc: str) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(ipc.removeprefix("ipc://"))
    endpoints.append(open_at(ipc))
    assert endpoints[0].address == ipc


def test_a_file_that_is_no_socket_is_left_alone(ipc: str) -> None:
    path = Path(ipc.removeprefix("ipc://"))
    path.write_text("precious")
    with pytest.raises(ConfigError, match="a file that is not a socket"):
        open_at(ipc)
    assert path.read_text() == "precious"


def test_a_missing_folder_is_named(short_dir: Path) -> None:
    with pytest.raises(ConfigError, match=f"the folder {short_dir}/none must exist"):
        open_at(f"ipc://{short_dir}/none/s")


def test_a_refused_bind_leaves_no_socket_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq.Context, "_instance", None)  # a context of its own, without the sockets of other tests
    for _ in range(3):
        with pytest.raises(ConfigError):
            open_at("tcp://0.0.0.0:5000")
    zmq.Context.instance().term()  # would block until every open socket is closed
