"""Addresses of the servers of a launched run, and the configuration that all of its processes share."""

from pathlib import Path

import msgspec

from staleflow.configs.errors import ConfigError
from staleflow.configs.launch import Launch
from staleflow.configs.rules.checks import consistent
from staleflow.configs.schema import Config
from staleflow.launch.keys import with_keys
from staleflow.launch.network import host_of, tcp

EVERY_INTERFACE = "0.0.0.0"


def resolved(config: Config, run_dir: Path, host: str) -> Config:
    """Return the configuration of the run's processes.

    It has keys, and servers without an address bind to ``host`` at consecutive ports from ``launch.port``. The table
    ``[launch]`` is removed, so that the run can be resumed on other machines. Raise ``ConfigError`` for an address that
    only this machine can reach.
    """
    port, shards = config.launch.port, config.trajectories.shards
    _check_binds(config)
    scheduler = config.scheduler.bind or tcp(host, port)
    payload = config.trajectories.bind or [tcp(host, port + 1 + shard) for shard in range(shards)]
    weights = config.parameters.bind or tcp(host, port + 1 + shards)
    replace = msgspec.structs.replace
    run = replace(
        with_keys(config, run_dir),
        scheduler=replace(config.scheduler, bind=scheduler),
        trajectories=replace(config.trajectories, bind=payload),
        parameters=replace(config.parameters, bind=weights),
        launch=Launch(),
    )
    consistent(run)
    return run


def ports(config: Config) -> list[int]:
    """Return the default TCP ports: scheduler, trajectory servers, parameter server, in this order."""
    return [config.launch.port + at for at in range(config.trajectories.shards + 2)]


def _check_binds(config: Config) -> None:
    given = [("scheduler.bind", config.scheduler.bind), ("parameters.bind", config.parameters.bind)]
    given += [("trajectories.bind", bind) for bind in config.trajectories.bind]
    for key, bind in given:
        if bind.startswith("ipc://") or host_of(bind) == "localhost" or host_of(bind).startswith("127."):
            allowed = "other machines cannot reach it: leave it empty, or give a routable address of this machine"
            raise ConfigError(key, bind, allowed)
