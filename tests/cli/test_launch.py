"""``staleflow launch`` rejects bad configurations, and a dry run has no effect."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from staleflow.cli.main import main
from staleflow.configs.loading.load import load, write_resolved
from staleflow.launch.servers import resolved
from staleflow.supervisor.summary import Summary, write
from tests.cli.conftest import Cli
from tests.cli.test_bad_input import refused

CLUSTER = Path(__file__).parent.parent.parent / "configs" / "cluster.toml"
HOSTS = 'launch.hosts=["gpu-1", "gpu-2", "gpu-3"]'
"""Names that no DNS resolves."""


@pytest.mark.parametrize("engine", ["ssh", "slurm", "kubernetes", "ray"])
def test_a_dry_run_says_what_would_be_and_leaves_nothing(cli: Cli, engine: str) -> None:
    said = cli("launch", "--on", engine, CLUSTER, HOSTS, "--dry-run")
    assert (said.code, said.err, said.left) == (0, "", [])
    assert all(word in said.out for word in ("5551", "rollout", "trainer"))
    assert "secret = " not in said.out, "no key is shown"


def test_a_dry_run_names_the_price_of_the_machines(cli: Cli) -> None:
    prices = ("launch.rollout_price=2.5", "launch.trainer_price=30", "launch.trainer_nodes=1")
    out = cli("launch", "--on", "ssh", CLUSTER, HOSTS, *prices, "--dry-run").out
    assert "price          35 an hour for 3 machines" in out.splitlines()


@pytest.mark.parametrize(
    ("engine", "begins"),
    [("ssh", ("ssh", "-T")), ("ray", ("python", "-m", "staleflow.launch.machine", "rollout"))],
)
def test_a_dry_run_shows_lines_of_a_shell_and_an_address_that_workers_can_reach(
    cli: Cli, engine: str, begins: tuple[str, ...]
) -> None:
    out = cli("launch", "--on", engine, CLUSTER, HOSTS, "launch.trainer_nodes=1", "--dry-run").out
    lines = out.partition("rollout-machine-1")[2].splitlines()
    assert ": relay-1, rollout-2, rollout-3; " in lines[0]
    words = shlex.split(lines[1])
    assert tuple(words[: len(begins)]) == begins
    asked = shlex.split(words[-1]) if engine == "ssh" else words
    assert asked[asked.index("--connect") + 1] == "tcp://THIS-MACHINE:5551"
    assert asked[-4:] == ["--machine", "1", "--machines", "2"]
    assert (engine == "ssh") == ("gpu-3" in words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--on", "ssh", CLUSTER],
            "launch.hosts is []; it must name launch.trainer_nodes + launch.rollout_nodes = 3 hosts",
        ),
        (
            ["--on", "ssh", CLUSTER, 'launch.hosts=["no.such.host", "b", "c"]'],
            'host is "no.such.host"; this machine cannot reach it',
        ),
        (["--on", "ray", CLUSTER, "--out", "x"], '--out is "x"; --on ray writes no files'),
        (["--on", "slurm"], "no configuration given; for example: staleflow launch --on slurm configs/cluster.toml"),
        (
            ["--on", "slurm", CLUSTER, "launch.rollout_nodes=5"],
            "launch.rollout_nodes is 5; it must be at most rollout.workers",
        ),
        (["--on", "slurm", CLUSTER, "launch.gpu_per_node=8"], "did you mean launch.gpus_per_node?"),
        (["--on", "kubernetes", CLUSTER, "launch.image="], 'launch.image is ""; it must name a container image'),
        (["--on", "nomad", CLUSTER], "'nomad' is not one of 'ssh', 'slurm', 'kubernetes', 'ray'"),
    ],
)
def test_what_cannot_be_launched_is_refused(cli: Cli, words: list[object], said: str) -> None:
    refused(cli("launch", *words), said)


def test_files_are_private_and_a_run_of_them_is_resumed_not_overwritten(cli: Cli, short_dir: Path) -> None:
    assert cli("launch", "--on", "slurm", CLUSTER, "--out", "job").code == 0
    job = short_dir / "job"
    assert sorted(path.name for path in job.iterdir()) == ["config.json", "config.toml", "job.sbatch", "keys", "logs"]
    assert job.stat().st_mode & 0o077 == (job / "keys").stat().st_mode & 0o077 == 0
    refused(cli("launch", "--on", "slurm", CLUSTER, "--out", "job"), "it contains a run already", ["job"])
    before = {path.name: path.read_bytes() for path in (job / "keys").iterdir()}
    again = cli("launch", "--on", "slurm", CLUSTER, "--out", "job", "--resume", "launch.rollout_nodes=4")
    assert again.code == 0
    assert {path.name: path.read_bytes() for path in (job / "keys").iterdir()} == before
    assert "--machines 4" in (job / "job.sbatch").read_text()


@pytest.mark.parametrize(("engine", "tool"), [("slurm", "sbatch"), ("kubernetes", "kubectl")])
def test_without_the_tool_the_files_are_there_and_it_says_what_to_do(short_dir: Path, engine: str, tool: str) -> None:
    command = [sys.executable, "-m", "staleflow.cli", "launch", "--on", engine, str(CLUSTER), "--run-dir", "made"]
    environment = {**os.environ, "PATH": str(short_dir)}
    done = subprocess.run(command, cwd=short_dir, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f'staleflow: {tool} is "{(short_dir / "made").resolve()}' in done.stderr
    assert "is not installed" in done.stderr
    assert (short_dir / "made" / "keys" / "server.key").is_file()


def test_what_a_finished_run_says_to_launch_for_more_steps_can_be_launched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, run = tmp_path / "mine.toml", tmp_path / "run"
    mine.write_text(CLUSTER.read_text() + 'hosts = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]\n')
    write_resolved(resolved(load(mine), run, "127.0.0.1"), run)
    done = Summary(
        name="cluster",
        run_dir=str(run),
        model=str(run / "checkpoints" / "30"),
        outcome="finished",
        steps=30,
        steps_wanted=30,
        max_staleness=2,
        bound="trajectory",
    )
    write(done, run)
    assert main(["launch", "--on", "ssh", str(mine), "--run-dir", str(run), "--resume"]) == 0
    _, staleflow, told = capsys.readouterr().out.strip().rpartition("staleflow launch")
    assert staleflow
    words = ["launch", *told.replace(" CONFIG ", f" {mine} ").replace("=N", "=60").split()]
    assert words[3:] == [str(mine), "trainer.steps=60", f"model.path={done.model}"]
    assert main([*words, "--dry-run"]) == 0
