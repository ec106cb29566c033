"""An interrupted launch leaves either a state that the next launch can continue from, or nothing."""

import os
from pathlib import Path
from typing import NoReturn

import pytest

from staleflow.configs.loading.load import load
from staleflow.launch import keys, ray_machines
from staleflow.net import key_folder
from tests.cli.conftest import Cli
from tests.cli.conftest import cli as cli  # the fixture

CLUSTER = Path(__file__).parent.parent.parent / "configs" / "cluster.toml"


def end(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def test_keys_are_all_there_or_none_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = keys.with_keys(load(CLUSTER), tmp_path)
    with monkeypatch.context() as killed:
        killed.setattr(key_folder, "write_allowed", end)
        with pytest.raises(KeyboardInterrupt):
            keys.ensure_keys(config, tmp_path)
    assert not (tmp_path / "keys").exists()
    keys.ensure_keys(config, tmp_path)
    made = {path.name: path.read_bytes() for path in (tmp_path / "keys").iterdir()}
    assert {"server.key", "rollout.key", "allowed.toml"} <= made.keys()
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700
    keys.ensure_keys(config, tmp_path)
    assert {path.name: path.read_bytes() for path in (tmp_path / "keys").iterdir()} == made


def test_a_job_that_slurm_refuses_is_gone_on_with_under_other_options(
    cli: Cli, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch = short_dir / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(
        '#!/bin/sh\ngrep -q partition=gpu "$1" && echo "Submitted $1" && exit\necho no such >&2\nexit 1\n'
    )
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    words = ("launch", "--on", "slurm", CLUSTER, "--run-dir", "made run")
    refused = cli(*words, 'launch.options=["--partition=cpu"]')
    assert (refused.code, refused.out) == (2, "")
    assert "sbatch rejected the file: no such" in refused.err
    before = (short_dir / "made run" / "keys" / "server.key").read_bytes()
    again = cli(*words, "--resume", 'launch.options=["--partition=gpu"]')
    assert (again.code, again.out.splitlines()[0]) == (0, f"Submitted {(short_dir / 'made run').resolve()}/job.sbatch")
    assert (short_dir / "made run" / "keys" / "server.key").read_bytes() == before


def test_an_actor_that_leaves_takes_its_keys_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    actor = ray_machines.Actor({"rollout.key": b"secret"})
    (folder,) = tmp_path.iterdir()
    assert (folder.stat().st_mode & 0o777, (folder / "rollout.key").stat().st_mode & 0o777) == (0o700, 0o600)
    actor.start(("-c", "raise SystemExit(3)"))
    actor.leave()
    assert (actor.code(), list(tmp_path.iterdir())) == (3, [])
