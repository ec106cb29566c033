"""A run as one heterogeneous Slurm job: a node of the servers, then the nodes of rollout, then those of the trainer.

Slurm places and signals; on each node ``staleflow.launch.machine`` starts what belongs there, and starts
again what dies. Slurm ends a heterogeneous job as a whole when a node fails, and requeues none: the run drains, and
goes on from its run directory, on a disk that all nodes see, with the job that is submitted next.
"""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config
from staleflow.launch.placement import MEET, PARTS, Part, head_cpus, machine_cpus, machine_words, place_of
from staleflow.supervisor.drain import MACHINE_S

SCRIPT = "job.sbatch"
DRAIN_S = 120
"""Before a time limit the run is asked to end: the trainer writes a checkpoint, and what is acknowledged is kept."""
LEAVE_S = int(MACHINE_S)
"""For a machine that is asked to end: its trainer saves."""
LAST_S = 600
"""For machines after a run that ended well: they end by themselves, the trainer's when it has saved."""

_SPLITS = re.compile("hetjob|packjob", re.IGNORECASE)

_HEAD = """\
#!/bin/bash
# {name} on Slurm, made by staleflow launch. Submit it again to go on where it ended.
"""

_BODY = """
umask 077
run={run}
{setup}{keys}head=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0" | head -n 1)
export scheduler=tcp://$head:{port}
{meet}
# Whether these processes are gone within so many seconds.
gone() {{ for ((left = $1; left; left--)); do kill -0 "${{@:2}}" 2>/dev/null || return 0; sleep 1; done; return 1; }}
# A signal ends the run: the trainer first, which saves, and the servers once it is gone.
stop() {{
    trap '' TERM INT
    scancel --signal=TERM "$SLURM_JOB_ID_HET_GROUP_2"
    gone {leave} "$trainer"
    kill -TERM "$servers"
}} 2>/dev/null
trap stop TERM INT

# Servers, and stages without a model.
{python} -m staleflow.launch.head "$run" {gpus} &
servers=$!

# One task a node; each starts the processes of its node, and ends with the run. Where nothing is left, the run ends.
{steps}

while wait "$servers"; code=$?; [ "$code" -gt 128 ] && kill -0 "$servers" 2>/dev/null; do :; done
# Machines of a run that ended well end by themselves. The others are asked, and the end of this script ends them all.
[ "$code" = 0 ] && gone {last} "$rollout" "$trainer"
scancel --signal=TERM "$SLURM_JOB_ID_HET_GROUP_1" "$SLURM_JOB_ID_HET_GROUP_2" 2>/dev/null
gone {leave} "$rollout" "$trainer"
exit "$code"
"""


def check(config: Config, run_dir: Path) -> None:
    """``ConfigError`` for what Slurm would not read as it was meant."""
    for key, text in (
        ("name", config.name),
        *(("launch.options", option) for option in config.launch.options),
        ("run directory", str(run_dir)),
    ):
        if word := _SPLITS.search(text):
            allowed = f'sbatch takes "{word[0]}" in a line for the next component of the job, wherever it stands'
            raise ConfigError(key, text, allowed)
    for option in config.launch.options:
        if not option.startswith("-"):
            raise ConfigError("launch.options", option, 'each must be an option, say "--partition=gpu"')
    if not str(run_dir).isprintable() or "\\" in str(run_dir):
        allowed = "sbatch cannot be told of it: it must be printable, without a backslash"
        raise ConfigError("run directory", str(run_dir), allowed)


def script(config: Config, run_dir: Path, keys: str) -> str:
    """The batch file. ``config`` as the user wrote it, with ``[launch]``; ``keys``: the folder of them, or none.
    ``ConfigError`` as ``check``."""
    check(config, run_dir)
    launch = config.launch
    python = "python" if launch.setup else shlex.quote(sys.executable)
    parts: dict[Part, int] = {"rollout": launch.rollout_nodes, "trainer": launch.trainer_nodes}
    meet = ""
    if launch.trainer_nodes > 1:
        group = PARTS.index("trainer") + 1
        meet = f'export first=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_{group}" | head -n 1)\n'
    steps = [_step(config, run_dir, part, count, at + 1, python) for at, (part, count) in enumerate(parts.items())]
    return (
        _HEAD.format(name=config.name)
        + "#SBATCH hetjob\n".join(_components(config, run_dir, parts))
        + _BODY.format(
            run=shlex.quote(str(run_dir)),
            setup=f"{launch.setup}\n" if launch.setup else "",
            keys=f"export STALEFLOW_KEY={shlex.quote(keys)}\n" if keys else "",
            port=launch.port,
            meet=meet,
            steps="\n".join(steps),
            leave=LEAVE_S,
            last=LAST_S,
            python=python,
            gpus=launch.gpus_per_node,
        )
    )


def _components(config: Config, run_dir: Path, parts: dict[Part, int]) -> list[str]:
    launch = config.launch
    everywhere = ["--no-requeue", *launch.options]
    of_job = [
        f"--job-name={config.name}",
        f"--output={_quoted(_pattern(run_dir / 'logs' / 'job.out'))}",
        "--open-mode=append",
        f"--signal=B:TERM@{DRAIN_S}",
    ]
    found = [_options([*of_job, *everywhere, "--nodes=1", "--ntasks=1", f"--cpus-per-task={head_cpus(config)}"])]
    for part, count in parts.items():
        whole = [f"--gpus-per-node={launch.gpus_per_node}", "--exclusive"]
        whole = whole if launch.gpus_per_node else [f"--cpus-per-task={machine_cpus(config, part)}"]
        found.append(_options([*everywhere, f"--nodes={count}", "--ntasks-per-node=1", *whole]))
    return found


def _pattern(path: Path) -> str:
    """A path as Slurm takes it, which puts numbers and names where a single ``%`` is."""
    return str(path).replace("%", "%%")


def _quoted(text: str) -> str:
    """As ``sbatch`` reads its options: what is between double quotes, with a backslash before one of them. That is not
    how a shell does it: spaces are not to be escaped, and old versions know no other quotes."""
    return '"' + text.replace('"', '\\"') + '"'


def _options(options: list[str]) -> str:
    return "".join(f"#SBATCH {option}\n" for option in options)


def _step(config: Config, run_dir: Path, part: Part, count: int, group: int, python: str) -> str:
    place = place_of(config, part, count)
    meet = f"$first:{config.launch.port + MEET}"
    words = machine_words(place, "$scheduler", meet, number="$SLURM_PROCID")
    task = shlex.quote(f"exec {python} {' '.join(words)}")  # nothing in the words needs quotes
    logs = f"--output={shlex.quote(_pattern(run_dir / 'logs'))}/{part}-machine-%t.out"
    srun = f"srun --het-group={group} --kill-on-bad-exit=0 --cpu-bind=none {logs}"
    return f"({srun} \\\n    bash -c {task} || kill -TERM $$) &\n{part}=$!"


def submit(path: Path) -> str:
    """Hands the file to sbatch; returns what it said. ``ConfigError`` when it does not take it."""
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "sbatch", str(path), "it is not installed here: submit this file on a login node of the cluster"
        )
    done = subprocess.run(("sbatch", str(path)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError("sbatch", str(path), f"it refuses the file: {done.stderr.strip()}")
    return done.stdout.strip()
