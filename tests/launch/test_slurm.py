"""The batch file of a run on Slurm has valid options, starts every process on its nodes, and ends cleanly."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import load
from staleflow.launch import slurm

Job = subprocess.Popen[bytes]
Ended = Callable[[Job], tuple[int, list[str]]]

CLUSTER = Path(__file__).parent.parent.parent / "configs" / "cluster.toml"
REAL = (
    *("rollout.engine=vllm", "trainer.backend=fsdp", "model.path=/data/model", "launch.gpus_per_node=8"),
    *("rollout.workers=16", "trainer.nproc=8", "trainer.batch_size=64", "launch.trainer_nodes=2"),
    *("launch.setup=. /opt/venv/bin/activate", 'launch.options=["--partition=gpu", "--time=24:00:00"]'),
)


def script(*overrides: str, keys: str = "/shared/run/keys") -> str:
    return slurm.script(load(CLUSTER, overrides), Path("/shared/run"), keys)


def components(text: str) -> list[list[str]]:
    """Options of each component of the job."""
    lines = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    found: list[list[str]] = [[]]
    for line in lines:
        if line == "hetjob":
            found.append([])
        else:
            found[-1].append(line)
    return found


def test_a_job_has_a_node_of_servers_then_those_of_rollout_and_of_the_trainer() -> None:
    servers, rollout, trainer = components(script(*REAL))
    everywhere = ["--no-requeue", "--partition=gpu", "--time=24:00:00"]
    whole = ["--ntasks-per-node=1", "--gpus-per-node=8", "--exclusive"]
    assert servers[-6:] == [*everywhere, "--nodes=1", "--ntasks=1", "--cpus-per-task=7"]
    assert "--signal=B:TERM@120" in servers
    assert rollout == [*everywhere, "--nodes=2", *whole]
    assert trainer == [*everywhere, "--nodes=2", *whole]


def test_machines_without_gpus_ask_for_the_processors_that_they_use() -> None:
    _, rollout, trainer = components(script())
    assert rollout == ["--no-requeue", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=3"]
    assert trainer == ["--no-requeue", "--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=1"]


@pytest.mark.parametrize("overrides", [(), REAL], ids=["simulated", "real"])
def test_it_is_a_shell_script(overrides: tuple[str, ...]) -> None:
    text = script(*overrides)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert "--machine $SLURM_PROCID --machines 2" in text
    assert ("--meet $first:5651" in text) == (". /opt/venv/bin/activate\n" in text) == bool(overrides)


def test_keys_are_named_and_not_shown() -> None:
    assert "export STALEFLOW_KEY=/shared/run/keys\n" in script()
    assert "STALEFLOW_KEY" not in script(keys="")


STAND_INS = {
    "scontrol": "echo head",
    "scancel": 'for part in "${{@:2}}"; do kill -TERM "$(cat "$0.$part")"; done',
    "srun": """
case $* in *"launch.machine trainer"*) part=trainer;; *) part=rollout;; esac
leave() {{ echo "$part left"; exit 0; }}
trap leave TERM
echo $$ > "${{0%/*}}/scancel.$part"
case $part in trainer) {trainer};; *) {rollout};; esac
""",
    "python": """
trap "echo drained; exit 130" TERM
until [ -s "${{0%/*}}/scancel.trainer" ] && [ -s "${{0%/*}}/scancel.rollout" ]; do sleep 0.1; done
echo serving
for _ in $(seq {steps}); do sleep 0.1; done
exit {head}
""",
}
"""Exit codes of Slurm and of staleflow: a machine's step exits when scancel signals it."""
STAYS = "while :; do sleep 0.1; done"
SERVED = 'until grep -q serving "${0%/*}/said"; do sleep 0.1; done'
"""Waits until the head has started."""


def job(folder: Path, *, trainer: str = STAYS, rollout: str = STAYS, steps: int = 600, head: int = 0) -> Job:
    """Run the batch file as Slurm would."""
    for name, text in STAND_INS.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{text.format(trainer=trainer, rollout=rollout, steps=steps, head=head)}\n")
        path.chmod(0o755)
    (folder / "job").write_text(slurm.script(load(CLUSTER, ["launch.setup=:"]), folder, ""))
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_NODELIST_HET_GROUP_0": "head"}
    environment |= {"SLURM_JOB_ID_HET_GROUP_1": "rollout", "SLURM_JOB_ID_HET_GROUP_2": "trainer"}
    with (folder / "said").open("w") as said:
        return subprocess.Popen(
            ["bash", str(folder / "job")], env=environment, stdout=said, stderr=said, start_new_session=True
        )


@pytest.fixture
def ended(tmp_path: Path) -> Iterator[Ended]:
    """Exit code of a job and the output of its processes; the job leaves nothing behind."""
    jobs = list[Job]()

    def wait(running: Job) -> tuple[int, list[str]]:
        jobs.append(running)
        return running.wait(timeout=300), (tmp_path / "said").read_text().splitlines()

    yield wait
    for running in jobs:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()


@pytest.mark.parametrize(
    ("trainer", "rollout", "code", "said"),
    [
        (f"{SERVED}; exit 2", STAYS, 130, ["serving", "drained", "rollout left"]),
        (STAYS, f"{SERVED}; exit 1", 130, ["serving", "trainer left", "drained"]),
    ],
    ids=["no trainer is left", "no engine is left"],
)
def test_it_ends_when_nothing_is_left_of_a_part(
    tmp_path: Path, ended: Ended, trainer: str, rollout: str, code: int, said: list[str]
) -> None:
    assert ended(job(tmp_path, trainer=trainer, rollout=rollout)) == (code, said)


def test_machines_of_a_run_that_ended_well_are_not_asked_to_leave(tmp_path: Path, ended: Ended) -> None:
    saves = f"{SERVED}; sleep 2; echo saved; exit 0"
    assert ended(job(tmp_path, trainer=saves, rollout="exit 0", steps=3)) == (0, ["serving", "saved"])


def test_machines_that_wait_for_a_head_that_failed_are_asked_to_leave(tmp_path: Path, ended: Ended) -> None:
    code, said = ended(job(tmp_path, steps=5, head=1))
    assert (code, sorted(said)) == (1, ["rollout left", "serving", "trainer left"])


def test_it_ends_though_a_machine_does_not(tmp_path: Path, ended: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "EXIT_TIMEOUT_S", 1)
    deaf = f"trap '' TERM; {STAYS}"
    assert ended(job(tmp_path, trainer=deaf, rollout=deaf, steps=5, head=1)) == (1, ["serving"])


def test_a_signal_ends_the_trainer_then_the_servers(tmp_path: Path, ended: Ended) -> None:
    running = job(tmp_path, trainer=f"trap 'sleep 2; leave' TERM; echo ready; {STAYS}")
    deadline = time.monotonic() + 60
    waits = psutil.Process(running.pid)  # asleep once both steps have started: the script is in ``wait``
    while len((tmp_path / "said").read_text().split()) < 2 or waits.status() != psutil.STATUS_SLEEPING:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    running.terminate()
    code, said = ended(running)
    assert (code, said[2:]) == (130, ["trainer left", "drained", "rollout left"])


def argument(text: str) -> tuple[str, str]:
    """The first argument of a line as ``sbatch`` reads it, and the rest of the line. A backslash quotes the next
    letter, also between quotes; outside of quotes a space ends the argument and ``#`` begins a comment."""
    found, quote, text = "", "", text.lstrip()
    while text and (quote or not text[0].isspace()):
        letter, text = text[0], text[1:]
        if letter == "\\":
            found, text = found + text[:1], text[1:]
        elif quote:
            found, quote = (found, "") if letter == quote else (found + letter, quote)
        elif letter in "\"'":
            quote = letter
        elif letter == "#":
            return found, ""
        else:
            found += letter
    assert not quote, "sbatch: unmatched quote"
    return found, text


def expanded(pattern: str) -> str:
    """A file name as Slurm expands it."""
    return re.sub("%(.)", lambda found: {"%": "%", "j": "JOB", "x": "NAME", "t": "0"}[found[1]], pattern)


ODD = ("x y%j", "%x%%", "a # b", "it's", 'say "so"', "$HOME `id` $(id)", "tab;&|<>*?[]{}", "ü → ö", "-o", "a=b", "~")


@pytest.mark.parametrize("name", ODD)
def test_whatever_a_run_directory_is_called_logs_are_in_it(name: str) -> None:
    run_dir = Path("/shared") / name / name
    text = slurm.script(load(CLUSTER), run_dir, str(run_dir / "keys"))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    for line in (line for component in components(text) for line in component):
        whole, rest = argument(line)
        assert rest == ""
        if whole.startswith("--output="):
            assert expanded(whole) == f"--output={run_dir}/logs/job.out"
    told = "\n".join(line for line in text.splitlines() if line.startswith(("run=", "export STALEFLOW_KEY=", "umask")))
    steps = text.replace("\\\n", "").replace("srun", 'printf "%s\\n"').splitlines()
    printed = "\n".join(line.partition(" bash -c")[0].lstrip("(") for line in steps if 'printf "%s' in line)
    shown = f'{told}\nprintf "%s\\n" "$run" "$STALEFLOW_KEY"\n{printed}'
    said = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[:2] == [str(run_dir), str(run_dir / "keys")]
    assert [expanded(word) for word in said if word.startswith("--output")] == [
        f"--output={run_dir}/logs/{part}-machine-0.out" for part in ("rollout", "trainer")
    ]


@pytest.mark.parametrize(
    ("overrides", "run_dir", "said"),
    [
        (
            [],
            "/r/x y%j\ntouch /tmp/PWNED\n#",
            'run directory is "/r/x y%j\\ntouch /tmp/PWNED\\n#"; it must be printable',
        ),
        ([], "/r/a\\b", "it must be printable and contain no backslash"),
        ([], "/r/my-HetJobs", 'sbatch takes "HetJob" anywhere in a line for the start of another'),
        (["name=packjob"], "/r", 'name is "packjob"; sbatch takes'),
        (['launch.options=["--comment=hetjob"]'], "/r", 'launch.options is "--comment=hetjob"; sbatch takes'),
        (['launch.options=["-p gpu", "gpu"]'], "/r", 'launch.options is "gpu"; each must be an option, for example'),
        (['launch.options=["-p gpu\\ntouch /tmp/PWNED"]'], "/r", 'launch.options is ["-p gpu\\ntouch /tmp/PWNED"]; it'),
        (['launch.setup=". a\\n"'], "/r", 'launch.setup is ". a\\n"; it must be a printable string'),
    ],
)
def test_what_slurm_would_read_otherwise_is_refused(overrides: list[str], run_dir: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        slurm.script(load(CLUSTER, overrides), Path(run_dir), "")
    assert said in str(refused.value)
