"""An address is reported as free or in use."""

import socket
from pathlib import Path

import msgspec
import pytest

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import addresses, load
from staleflow.supervisor.addresses import binds, check_free, in_use, may_answer

SIMULATED = Path(__file__).parent.parent.parent / "configs" / "simulated.toml"


def listening(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))  # with SO_REUSEADDR, which a reserved port needs


def test_a_port_in_use_is_named(tmp_path: Path, ports: list[int]) -> None:
    address = f"tcp://127.0.0.1:{ports[0]}"
    with listening(ports[0]):
        assert in_use(address)
        with pytest.raises(ConfigError, match=rf'parameters\.bind is "{address}"; it is in use'):
            check_free(load(SIMULATED, [f"parameters.bind={address}"]), tmp_path)
        with pytest.raises(ConfigError, match=r"metrics\.bind is .*; it is in use"):
            check_free(load(SIMULATED, [f"metrics.bind={address.replace('tcp', 'http')}"]), tmp_path)
    assert not in_use(address)


def test_a_run_listens_at_what_its_servers_have_and_at_two_more_addresses() -> None:
    config = load(SIMULATED, ["metrics.bind=http://127.0.0.1:9100"])
    parameters = msgspec.structs.replace(config.parameters, direct_bind="tcp://127.0.0.1:9101")
    config = msgspec.structs.replace(config, parameters=parameters)
    assert binds(config, ("tcp://a:1", "tcp://a:2", "", "tcp://a:4")) == [
        ("scheduler.bind", "tcp://a:1"),
        ("trajectories.bind", "tcp://a:2"),
        ("parameters.bind", "tcp://a:4"),
        ("metrics.bind", "http://127.0.0.1:9100"),
        ("parameters.direct_bind", "tcp://127.0.0.1:9101"),
    ]


def test_a_socket_is_in_use_while_somebody_listens(short_dir: Path) -> None:
    address = addresses(load(SIMULATED), short_dir).scheduler
    assert not in_use(address)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(address.removeprefix("ipc://"))
        other.listen()
        assert in_use(address)
    assert not in_use(address)


def test_who_is_on_another_machine_must_be_asked_and_who_is_not_here_need_not(
    short_dir: Path, ports: list[int]
) -> None:
    elsewhere = "tcp://198.51.100.1:5551"  # an address reserved for documentation: no machine has it
    assert (in_use(elsewhere), may_answer(elsewhere)) == (False, True)
    assert may_answer("tcp://a-host-that-is.invalid:5551")
    assert not may_answer(addresses(load(SIMULATED), short_dir).scheduler)
    address = f"tcp://127.0.0.1:{ports[0]}"
    with listening(ports[0]):
        assert may_answer(address)
    assert not may_answer(address)
