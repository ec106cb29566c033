"""A run as one heterogeneous Slurm job: a node of the servers, then the nodes of rollout, then those of the trainer.

Slurm places nodes and sends signals; on each node ``staleflow.launch.machine`` starts the processes and restarts the
ones that die. If a node fails, Slurm ends the whole heterogeneous job and does not requeue it. The run then drains, and
the next submitted job resumes it from the run directory, which must be on a disk that all nodes share.
"""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config
from staleflow.launch.placement import (
    PARTS,
    RENDEZVOUS_PORT_OFFSET,
    Part,
    head_cpus,
    machine_cpus,
    machine_words,
    place_of,
)
from staleflow.supervisor.drain import MACHINE_TIMEOUT_S

SCRIPT = "job.sbatch"
DRAIN_NOTICE_S = 120
"""Seconds before the time limit at which Slurm signals the job, so that the run can drain and write a checkpoint."""
EXIT_TIMEOUT_S = int(MACHINE_TIMEOUT_S)
"""Seconds that a machine has to exit after SIGTERM, because its trainer may write a checkpoint."""
FINISH_TIMEOUT_S = 600
"""Seconds that machines have to exit by themselves after a successful run; the trainer may write a checkpoint."""

_SPLITS = re.compile("hetjob|packjob", re.IGNORECASE)

_HEAD = """\
#!/bin/bash
# {name} on Slurm, created by staleflow launch. Submit this file again to resume the run.
"""

_BODY = """
umask 077
run={run}
{setup}{keys}head=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0" | head -n 1)
export scheduler=tcp://$head:{port}
{meet}
# gone SECONDS PID...: wait until these processes have exited; fails after SECONDS.
gone() {{ for ((left = $1; left; left--)); do kill -0 "${{@:2}}" 2>/dev/null || return 0; sleep 1; done; return 1; }}
# A signal ends the run: first the trainer, which writes a checkpoint, then the servers.
stop() {{
    trap '' TERM INT
    scancel --signal=TERM "$SLURM_JOB_ID_HET_GROUP_2"
    gone {leave} "$trainer"
    kill -TERM "$servers"
}} 2>/dev/null
trap stop TERM INT

# Servers and the stages without a model.
{python} -m staleflow.launch.head "$run" {gpus} &
servers=$!

# One task per node; each starts the processes of its node. If all tasks of a component fail, the run ends.
{steps}

while wait "$servers"; code=$?; [ "$code" -gt 128 ] && kill -0 "$servers" 2>/dev/null; do :; done
# After a successful run the machines exit by themselves, else they get SIGTERM. The end of the script kills the rest.
[ "$code" = 0 ] && gone {last} "$rollout" "$trainer"
scancel --signal=TERM "$SLURM_JOB_ID_HET_GROUP_1" "$SLURM_JOB_ID_HET_GROUP_2" 2>/dev/null
gone {leave} "$rollout" "$trainer"
exit "$code"
"""


def check(config: Config, run_dir: Path) -> None:
    """Raise ``ConfigError`` for values that Slurm would misinterpret."""
    for key, text in (
        ("name", config.name),
        *(("launch.options", option) for option in config.launch.options),
        ("run directory", str(run_dir)),
    ):
        if word := _SPLITS.search(text):
            allowed = f'sbatch takes "{word[0]}" anywhere in a line for the start of another job component: rename it'
            raise ConfigError(key, text, allowed)
    for option in config.launch.options:
        if not option.startswith("-"):
            raise ConfigError("launch.options", option, 'each must be an option, for example "--partition=gpu"')
    if not str(run_dir).isprintable() or "\\" in str(run_dir):
        allowed = "it must be printable and contain no backslash: sbatch does not accept others"
        raise ConfigError("run directory", str(run_dir), allowed)


def script(config: Config, run_dir: Path, keys: str) -> str:
    """Return the batch file. ``config`` is the user's, with ``[launch]``; ``keys`` is the folder of keys, or empty.

    Raise ``ConfigError`` like ``check``.
    """
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
            leave=EXIT_TIMEOUT_S,
            last=FINISH_TIMEOUT_S,
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
        f"--signal=B:TERM@{DRAIN_NOTICE_S}",
    ]
    components = [_options([*of_job, *everywhere, "--nodes=1", "--ntasks=1", f"--cpus-per-task={head_cpus(config)}"])]
    for part, count in parts.items():
        whole = [f"--gpus-per-node={launch.gpus_per_node}", "--exclusive"]
        whole = whole if launch.gpus_per_node else [f"--cpus-per-task={machine_cpus(config, part)}"]
        components.append(_options([*everywhere, f"--nodes={count}", "--ntasks-per-node=1", *whole]))
    return components


def _pattern(path: Path) -> str:
    """Return a path with ``%`` doubled, because Slurm substitutes patterns such as ``%j``."""
    return str(path).replace("%", "%%")


def _quoted(text: str) -> str:
    """Quote an option value for ``sbatch``.

    Inside double quotes, ``sbatch`` accepts a backslash before a double quote only. This differs from a shell: spaces
    must not be escaped, and old versions accept no other quotes.
    """
    return '"' + text.replace('"', '\\"') + '"'


def _options(options: list[str]) -> str:
    return "".join(f"#SBATCH {option}\n" for option in options)


def _step(config: Config, run_dir: Path, part: Part, count: int, group: int, python: str) -> str:
    place = place_of(config, part, count)
    meet = f"$first:{config.launch.port + RENDEZVOUS_PORT_OFFSET}"
    words = machine_words(place, "$scheduler", meet, number="$SLURM_PROCID")
    task = shlex.quote(f"exec {python} {' '.join(words)}")  # no argument needs quotes; $variables must stay unquoted
    logs = f"--output={shlex.quote(_pattern(run_dir / 'logs'))}/{part}-machine-%t.out"
    srun = f"srun --het-group={group} --kill-on-bad-exit=0 --cpu-bind=none {logs}"
    return f"({srun} \\\n    bash -c {task} || kill -TERM $$) &\n{part}=$!"


def submit(path: Path) -> str:
    """Submit the file with sbatch and return sbatch's output. Raise ``ConfigError`` if sbatch rejects it."""
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "sbatch", str(path), "sbatch is not installed here: submit this file on a login node of the cluster"
        )
    result = subprocess.run(("sbatch", str(path)), capture_output=True, text=True, check=False)
    if result.returncode:
        raise ConfigError("sbatch", str(path), f"sbatch rejected the file: {result.stderr.strip()}")
    return result.stdout.strip()
