"""Bad input exits with code 2 and one line with the key, the value and the allowed values, and has no other effect."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import SIMULATED, Cli, Said

CLUSTER = SIMULATED.parent / "cluster.toml"


def refused(said: Said, words: str, left: list[str] | None = None) -> None:
    assert words in said.err
    assert said.err.count("\n") == 1
    assert said.err.startswith("staleflow: ")
    assert (said.code, said.out, said.left) == (2, "", left or [])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("staleness.max_stalenes=1", "there is no such key, did you mean staleness.max_staleness?"),
        ("staleness.max_staleness=two", 'staleness.max_staleness is "two"; it must be an integer from 0 to 1024'),
        ("staleness.max_staleness=-1", "staleness.max_staleness is -1; it must be an integer from 0 to 1024"),
        ("rollout.redundancy.samples=99", "rollout.redundancy.samples is 99; it must be a number from 1 to 8"),
        ("prompts.eval_path=none.jsonl", 'none.jsonl"; no such file'),
        ("reward.run=nowhere:score", 'reward.run is "nowhere:score"; it cannot be imported'),
        ("prompts.epochs=1 trainer.steps=100000", "prompts.epochs is 1;"),
        ("scheduler.bind=tcp://0.0.0.0:5000", "only loopback may be bound"),
        ("not-an-override", "it must be key=value"),
    ],
)
def test_a_run_is_refused(cli: Cli, override: str, words: str) -> None:
    refused(cli("run", SIMULATED, *override.split()), words)


def test_a_configuration_that_is_not_there(cli: Cli) -> None:
    refused(cli("run", "none.toml"), 'configuration file is "none.toml"; no such file')
    refused(cli("run"), "no configuration given")
    refused(cli("run", "."), ". is a directory; to continue the run in it: staleflow run --resume .")
    refused(cli("run", "--resume"), "no run given; for example: staleflow run --resume runs/")
    refused(cli("run", "--resume", "--run-dir", "x"), 'run directory is "x"; it has no config.json')


def test_a_key_that_a_resumed_run_may_not_change(cli: Cli, short_dir: Path) -> None:
    from staleflow.configs.loading.load import load, write_resolved

    write_resolved(load(SIMULATED), short_dir / "r")
    words = (
        "seed is 1; a run keeps its configuration: --resume may change trainer.steps, trainer.nproc, trainer.backend, "
    )
    refused(cli("run", "--resume", "--run-dir", "r", "seed=1"), words, ["r"])


def test_a_model_directory_without_tokenizer(cli: Cli, short_dir: Path) -> None:
    model = short_dir / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    said = cli("run", SIMULATED, f"model.path={model}", "rollout.engine=transformers")
    refused(said, f'model.path is "{model.resolve()}"; it has no tokenizer', ["model"])


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_an_engine_that_is_not_installed(cli: Cli, short_dir: Path) -> None:
    from staleflow.configs.loading.extras import install
    from staleflow.configs.loading.load import load, write_resolved

    words = f"the package vllm is not installed: {install('vllm')}"
    refused(cli("run", SIMULATED.parent / "quickstart-vllm.toml"), words)
    write_resolved(load(SIMULATED.parent / "quickstart-vllm.toml"), short_dir / "r")
    refused(cli("attach", "rollout", "--run-dir", "r"), words, ["r"])
    assert not (short_dir / "r" / "model").exists()


def test_a_key_of_a_stage_that_the_run_does_not_have(cli: Cli) -> None:
    refused(cli("run", SIMULATED, "reference.threads=2"), "reference.threads is 2; the run has no reference stage")


def test_a_port_in_use(cli: Cli) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        said = cli("run", SIMULATED, f"scheduler.bind={address}")
    refused(said, f'scheduler.bind is "{address}"; it is in use')


def test_a_run_directory_of_another_run_or_another_configuration(cli: Cli, short_dir: Path) -> None:
    from staleflow.configs.loading.load import load, write_resolved

    used = short_dir / "used"
    write_resolved(load(SIMULATED), used)
    before = {path: path.read_bytes() for path in used.iterdir()}
    refused(cli("run", SIMULATED, "--run-dir", used), "it contains a run already: add --resume", ["used"])
    said = cli("run", SIMULATED, "seed=9", "--run-dir", used, "--resume")
    refused(said, f"seed is 9; {used} was created with 0", ["used"])
    said = cli("serve", "scheduler", "--config", SIMULATED, "seed=9", "--run-dir", used)
    refused(said, f"seed is 9; {used} was created with 0", ["used"])
    assert {path: path.read_bytes() for path in used.iterdir()} == before


def test_nothing_to_resume(cli: Cli, short_dir: Path) -> None:
    refused(cli("run", SIMULATED, "--resume"), "no run of this name exists under runs/")
    refused(cli("run", SIMULATED, "--resume", "--run-dir", "none"), "it has no config.json")


def test_daemons_and_workers_are_refused_alike(cli: Cli) -> None:
    refused(cli("serve", "scheduler", "--run-dir", "none"), "it has no config.json")
    refused(
        cli("serve", "scheduler", "--run-dir", "r", "--config", SIMULATED, "seed=-1"), "it must be an integer from 0"
    )
    refused(cli("serve", "scheduler", "--run-dir", "r", "seed=1"), "add --config")
    refused(cli("attach", "rollout", "--run-dir", "none"), "it has no config.json")
    refused(cli("attach", "rollout"), "add --run-dir DIR or --connect ADDRESS")
    refused(cli("attach", "rollout", "--connect", "nonsense"), "nonsense")


@pytest.mark.parametrize("name", ["../parameters", "a/b", ".."])
def test_a_name_that_is_a_path(cli: Cli, short_dir: Path, name: str) -> None:
    refused(cli("attach", "relay", "--name", name, "--run-dir", "r"), f'--name is "{name}"', [])


def test_a_stage_that_the_run_does_not_have(cli: Cli, short_dir: Path) -> None:
    from staleflow.configs.loading.load import load, write_resolved

    write_resolved(load(SIMULATED), short_dir / "r")
    said = cli("attach", "stage", "--stage", "critic", "--run-dir", "r")
    refused(said, 'stage is "critic"; this run has no such stage; it has reward', ["r"])
    said = cli("attach", "stage", "--stage", "judge", "--run-dir", "r")
    refused(said, 'stage is "judge"; this run has no such stage; it has reward', ["r"])


def test_a_shard_that_the_run_does_not_have(cli: Cli) -> None:
    said = cli("serve", "trajectories", "--config", SIMULATED, "--run-dir", "r", "--shard", 1)
    refused(said, "--shard is 1; trajectories.shards is 1", [])


def test_words_that_do_not_exist(cli: Cli) -> None:
    refused(cli("rum"), "No such command 'rum': did you mean 'run'?")
    refused(cli("zzz"), "No such command 'zzz': valid commands are init, run,")
    refused(cli("run", SIMULATED, "--fast"), "No such option '--fast'")
    refused(cli("serve", "coffee", "--run-dir", "r"), "'coffee' is not one of 'scheduler'")
    refused(cli("serve", "scheduler"), "Missing option '--run-dir'")


@pytest.mark.parametrize(
    "words",
    [
        ("run", SIMULATED, "--run-dir"),
        ("keygen",),
        ("simulate", SIMULATED, "--steps", 2, "--trace"),
        ("simulate", SIMULATED, "--steps", 2, "--plot"),
        ("launch", "--on", "slurm", CLUSTER, "--out"),
    ],
    ids=lambda words: f"{words[0]} {words[-1]}",
)
def test_a_path_that_cannot_be_written(cli: Cli, short_dir: Path, words: tuple[object, ...]) -> None:
    """A file in the place of a folder."""
    (short_dir / "file").touch()
    said = cli(*words, "file/x")
    assert said.code == 2
    assert said.err.count("\n") == 1, said.err
    assert said.err.startswith("staleflow: ")
    assert "file" in said.err
    assert said.left == ["file"]


def test_a_run_that_is_being_started_is_said_to_be(cli: Cli, short_dir: Path) -> None:
    """Building a model may take minutes before the scheduler starts."""
    from staleflow.configs.loading.load import load
    from staleflow.supervisor import rundir

    pid = os.getpid()
    with rundir.claim(load(SIMULATED), short_dir / "r", resume=False):
        said = cli("status", "r")
        starting = f"staleflow: the run in r is being started (process {pid})\n"
        assert (said.code, said.out, said.err) == (1, "", starting)
        assert json.loads(cli("status", "r", "--json").out) == {"phase": "starting"}
        refused(cli("top", "r"), f"the run in r is being started (process {pid})", ["r"])
        running = f"it is running (process {pid}); watch it with staleflow top r"
        refused(cli("run", SIMULATED, "--run-dir", "r"), running, ["r"])
        refused(cli("run", "--run-dir", "r", "--resume"), running, ["r"])
    said = cli("status", "r")
    assert said.code == 1
    assert said.err.endswith("does not answer: the run has ended, or was never started\n")


def test_a_run_whose_scheduler_died_is_not_called_starting(cli: Cli, short_dir: Path) -> None:
    from staleflow.configs.loading.load import load
    from staleflow.supervisor import rundir

    with rundir.claim(load(SIMULATED), short_dir / "r", resume=False):
        began_s = (short_dir / "r" / ".lock").stat().st_mtime
        (short_dir / "r" / "trace.jsonl").touch()
        os.utime(short_dir / "r" / "trace.jsonl", (began_s + 1, began_s + 1))
        down = f"the scheduler of the run in r is down: process {os.getpid()} restarts it, or ends the run"
        assert cli("status", "r").err == f"staleflow: {down}\n"
        os.utime(short_dir / "r" / "trace.jsonl", (began_s - 1, began_s - 1))
        assert cli("status", "r").err == f"staleflow: the run in r is being resumed (process {os.getpid()})\n"


def test_a_scheduler_that_listens_and_is_stopped_is_named_with_its_process(cli: Cli, short_dir: Path) -> None:
    from staleflow.configs.loading.load import addresses, load, write_resolved

    config = load(SIMULATED)
    (short_dir / "r").mkdir()
    address = addresses(config, short_dir / "r").scheduler
    write_resolved(config, short_dir / "r")
    code = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); print(); input()"
    words = [sys.executable, "-c", code, address.removeprefix("ipc://")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.kill(process.pid, signal.SIGSTOP)
        said = cli("status", "r").err
        os.kill(process.pid, signal.SIGKILL)
    assert said.splitlines()[-1] == (
        f"staleflow: the scheduler at {address} does not answer: its process {process.pid} is stopped; "
        f"kill -CONT {process.pid} continues it"
    )


def test_status_does_not_wait_for_a_file_system_that_hangs(cli: Cli, short_dir: Path) -> None:
    """Opening a pipe without a writer blocks like a read from an unresponsive network file system."""
    (short_dir / "r").mkdir()
    os.mkfifo(short_dir / "r" / "config.json")
    said = cli("status", "r")
    refused(said, "its file system did not respond within 5 s; --connect ADDRESS needs no files", ["r"])


def test_a_run_whose_scheduler_is_on_another_machine_is_not_taken_for_ended(cli: Cli, short_dir: Path) -> None:
    from staleflow.configs.loading.load import load, write_resolved

    elsewhere = ["security.insecure=true", "scheduler.bind=tcp://198.51.100.1:5551"]  # an address that no machine has
    write_resolved(load(SIMULATED, elsewhere), short_dir / "r")
    said = cli("status", "r")
    silent = "does not answer: it cannot be reached from here, or the run has ended"
    last = said.err.splitlines()[-1]
    assert (said.code, last) == (1, f"staleflow: the scheduler at tcp://198.51.100.1:5551 {silent}")


def test_a_run_bound_to_every_interface_may_be_elsewhere(cli: Cli, short_dir: Path, ports: list[int]) -> None:
    from staleflow.configs.loading.load import load, write_resolved

    bound = ["security.insecure=true", f"scheduler.bind=tcp://0.0.0.0:{ports[0]}"]
    write_resolved(load(SIMULATED, bound), short_dir / "r")
    where = f"or its servers are on another machine: --connect tcp://THAT-MACHINE:{ports[0]}"
    assert where in cli("status", "r").err
    refused(cli("top", "r"), where, ["r"])


LAUNCH = ("launch", CLUSTER, "--on")
DRAWING = "it applies to the search: leave it out, or --graph and --mermaid"
HANDED = "submits a job and shows no progress: leave it out"
DRY = "a dry run shows no progress: leave it out"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("doctor", "nonsense", "no.such.key=1"),
            'override is "nonsense"; overrides change a configuration: add --config',
        ),
        (("plan", SIMULATED, "--graph", "--json"), f"--json is true; {DRAWING}"),
        (("plan", SIMULATED, "--graph", "--etas", "x", "--devices", 4), f'--etas is "x"; {DRAWING}'),
        (("plan", SIMULATED, "--mermaid", "--devices", 4), f"--devices is 4; {DRAWING}"),
        (("plan", SIMULATED, "--graph", "--jobs", 1), f"--jobs is 1; {DRAWING}"),
        (("attach", "rollout", "--bind", "tcp://*:1"), '--bind is "tcp://*:1"; only a relay accepts it'),
        (("attach", "stage", "--mb-per-s", 3), "--mb-per-s is 3.0; only a relay accepts it"),
        (("attach", "relay", "--nproc", 2), "--nproc is 2; only the trainer accepts it"),
        (("attach", "train", "--stage", "reward"), '--stage is "reward"; only a stage worker accepts it'),
        ((*LAUNCH, "slurm", "--dry-run", "--json", "--plain"), f"--plain is true; --on slurm {HANDED}"),
        ((*LAUNCH, "kubernetes", "--json"), f"--json is true; --on kubernetes {HANDED}"),
        ((*LAUNCH, "kubernetes", "--resume"), "--resume is true; --on kubernetes always resumes"),
        ((*LAUNCH, "ray", "--dry-run", "--json"), f"--json is true; {DRY}"),
        ((*LAUNCH, "ssh", "--dry-run", "--plain"), f"--plain is true; {DRY}"),
        ((*LAUNCH, "slurm", "--run-dir", "a", "--out", "b"), '--run-dir is "a"; --out b is the run directory'),
        (("chaos", "none", "--kind", "kill", "--stop-for", 3), "--stop-for is 3.0; only --kind stop accepts it"),
        (("trace", "plot", "none", "--seconds", 3), "--seconds is 3.0; it applies to the plot only: add --out"),
    ],
)
def test_words_that_mean_nothing_there(cli: Cli, words: tuple[object, ...], said: str) -> None:
    refused(cli(*words), said)


def test_ranks_that_torchrun_did_not_start(cli: Cli, short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from staleflow.configs.loading.load import load, write_resolved

    write_resolved(load(SIMULATED), short_dir / "r")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    said = cli("attach", "train", "--run-dir", "r", "--nproc", 4)
    refused(said, "--nproc is 4; torchrun has started 2 ranks already: leave out --nproc", ["r"])


def test_status_and_trace_of_nothing(cli: Cli) -> None:
    refused(cli("status"), "give RUN_DIR or --connect ADDRESS")
    assert cli("report").err == "staleflow: no run given and none found under runs/: give RUN_DIR\n"
    refused(cli("status", "none"), "it has no config.json")
    refused(cli("trace", "check", "none.jsonl"), "no such file")
    refused(cli("trace", "show", "none", "3"), "no such file")


def test_top_of_nothing(cli: Cli, short_dir: Path) -> None:
    from staleflow.configs.loading.load import load, write_resolved

    refused(cli("top"), "give RUN_DIR or --connect ADDRESS")
    refused(cli("top", "none"), "it has no config.json")
    refused(cli("top", "none", "--replay"), 'trace is "none"; no such file')
    refused(cli("top", "--connect", "ipc:///nobody", "--replay"), "--replay reads a trace: give RUN_DIR")
    refused(cli("top", "none", "--speed", "10"), "--speed applies to a replay only: add --replay")
    refused(cli("top", "none", "--replay", "--once", "--speed", "10"), "--speed has no effect with --once")
    refused(cli("top", "none", "--replay", "--speed", "0"), "0.0 is not in the range 0.1<=x<=1000.0")
    write_resolved(load(SIMULATED), short_dir / "r")
    refused(cli("top", "r"), "no process listens there: the run has ended, or was never started", ["r"])
