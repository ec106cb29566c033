"""ssh gets the right arguments, and the machine behind it starts, survives a lost link and ends with its connection."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import load
from staleflow.launch import ssh
from staleflow.launch.remote import remote_command
from staleflow.launch.servers import resolved
from staleflow.launch.ssh import HEARTBEAT_INTERVAL_S, HEARTBEAT_TIMEOUT_S, Reach
from staleflow.supervisor.lifeline import VARIABLE

CLUSTER = Path(__file__).parent.parent.parent / "configs" / "cluster.toml"
HOSTS = 'launch.hosts=["trainer-1", "engines-1", "engines-2"]'
LOCAL = ["sh", "-c", 'exec sh -c "$1"']
"""A shell to a host that is this machine: its first argument is the host's name."""
LINK = """
import os, select, subprocess, sys
with open(sys.argv[1], "w") as file:
    print(os.getpid(), file=file)
there = subprocess.Popen(["sh", "-c", sys.argv[-1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
said = there.stdout.fileno()
goes = {0: there.stdin.fileno(), said: 1}
while True:
    for end in select.select([*goes], [], [])[0]:
        if not (data := os.read(end, 65536)):
            sys.exit()
        os.write(goes[end], data)
"""
"""Like ``LOCAL``, with a process in between that acts as the connection and writes its number into the file of its
first argument."""
MACHINE = """
import sys
from pathlib import Path
from staleflow.launch.machine import Machine
from staleflow.supervisor import drain, lifeline
from staleflow.supervisor.roles import Kind, Role
lifeline.watch_supervisor(120)
drain.TIMEOUTS_S[Kind.WORKER] = 120
role = Role(name="worker", kind=Kind.WORKER, command=tuple(sys.argv[2:]))
sys.exit(Machine([role], Path(sys.argv[1]), "tcp://nobody", "rollout").run())
"""
"""A machine that has a process already and needs no scheduler."""
WORKER = """
import asyncio, sys
from pathlib import Path
from staleflow.process.daemon import run
from staleflow.supervisor import lifeline
lifeline.watch_supervisor()
folder = Path(sys.argv[1])
async def main(stop):
    (folder / "began").touch()
    await stop.wait()
    print("draining", flush=True)
    await asyncio.sleep(1.0)
    (folder / "drained").touch()
sys.exit(run(main, "worker", folder))
"""


def reaches(*overrides: str) -> dict[str, Reach]:
    config, run_dir = load(CLUSTER, [HOSTS, *overrides]), Path("/run/first")
    ssh.check(config.launch)
    run = resolved(config, run_dir, "10.0.0.1")
    roles = ssh.machines(run, config.launch, run_dir, run.scheduler.bind)
    return {role.name: msgspec.json.decode(role.command[-1], type=Reach) for role in roles}


def test_each_host_has_its_part_its_number_and_the_keys_of_its_roles() -> None:
    found = reaches()
    assert {name: (reach.host, [Path(key).name for key in reach.key_files]) for name, reach in found.items()} == {
        "trainer-machine-0": ("trainer-1", ["trainer.key"]),
        "rollout-machine-0": ("engines-1", ["rollout.key", "server.key", "allowed.toml"]),
        "rollout-machine-1": ("engines-2", ["rollout.key", "server.key", "allowed.toml"]),
    }
    words = "rollout --connect tcp://10.0.0.1:5551 --machine 1 --machines 2"
    assert found["rollout-machine-1"].command.endswith(f"exec {sys.executable} -m staleflow.launch.machine {words}")


def test_setup_comes_before_python() -> None:
    command = reaches("launch.setup=. /opt/venv/bin/activate")["trainer-machine-0"].command
    assert "cd; . /opt/venv/bin/activate && STALEFLOW_KEY=" in command
    assert " exec python -m staleflow.launch.machine trainer " in command


def test_an_insecure_run_hands_out_nothing() -> None:
    reach = reaches("security.insecure=true")["rollout-machine-0"]
    assert (reach.keys_in, reach.key_files, "STALEFLOW_KEY" in reach.command) == ("", [], False)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ('launch.hosts=["a"]', "it must name launch.trainer_nodes + launch.rollout_nodes = 3 hosts"),
        (
            'launch.hosts=["a", "b", "-oProxyCommand=x"]',
            'launch.hosts is "-oProxyCommand=x"; it must be a host name',
        ),
        ("launch.shell=[]", "launch.shell is []; it must be a command"),
        ("scheduler.bind=tcp://127.0.0.1:5551", "other machines cannot reach it"),
    ],
)
def test_what_ssh_cannot_do_is_refused(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        reaches(override)
    assert said in str(refused.value)


def remote(command: str, home: Path, keys: list[Path], through: list[str] = LOCAL) -> "subprocess.Popen[bytes]":
    told = {
        "host": "here",
        "through": through,
        "command": command,
        "keys_in": "kept" if keys else "",
        "key_files": [str(key) for key in keys],
    }
    words = [sys.executable, "-m", "staleflow.launch.remote", json.dumps(told)]
    return subprocess.Popen(
        words, env={**os.environ, "HOME": str(home)}, stdout=subprocess.PIPE, start_new_session=True
    )


def test_keys_arrive_private_before_anything_starts_and_the_exit_code_comes_back(tmp_path: Path) -> None:
    key = tmp_path / "rollout.key"
    key.write_text("secret")
    key.chmod(0o644)
    running = remote(
        'stat -c %a "$keys" "$keys"/* "$keys"/..; echo "$keys"; ls "$keys"; exec sh -c "exit 2"', tmp_path, [key]
    )
    said, _ = running.communicate(timeout=120)
    *modes, folder, files = said.decode().split()
    assert (modes, files, running.returncode) == (["700", "600", "700"], "rollout.key", 2)
    assert folder.startswith(f"{tmp_path}/.staleflow/kept.")
    assert list((tmp_path / ".staleflow").iterdir()) == [], "and go with the machine"


def test_runs_of_one_name_on_one_home_have_keys_of_their_own(tmp_path: Path) -> None:
    """The same holds for a machine that drains after a lost link while the next connection has started it again."""
    running = list[subprocess.Popen[bytes]]()
    for run in ("alice", "bob"):
        (tmp_path / run).mkdir()
        (tmp_path / run / "rollout.key").write_text(f"secret of {run}")
        stay = f'cat "$keys"/rollout.key > {tmp_path}/{run}/got; echo there; cat >/dev/null; cat "$keys"/rollout.key'
        running.append(remote(stay, tmp_path, [tmp_path / run / "rollout.key"]))
        assert running[-1].stdout is not None
        assert running[-1].stdout.readline() == b"there\n"
    assert len(list((tmp_path / ".staleflow").iterdir())) == 2
    for process, run in zip(running, ("alice", "bob"), strict=True):
        process.terminate()
        said, _ = process.communicate(timeout=120)
        assert (said.decode(), (tmp_path / run / "got").read_text()) == (f"secret of {run}",) * 2
    assert list((tmp_path / ".staleflow").iterdir()) == []


def test_keys_that_do_not_arrive_whole_start_nothing(tmp_path: Path) -> None:
    key = tmp_path / "rollout.key"
    key.write_text("secret")
    reach = Reach(host="here", through=LOCAL, command=f"touch {tmp_path}/started", keys_in="kept", key_files=[str(key)])
    cut = ("sh", "-c", remote_command(reach, 10_240))
    done = subprocess.run(cut, input=b"x" * 700, env={**os.environ, "HOME": str(tmp_path)}, check=False)
    assert done.returncode != 0
    assert not (tmp_path / "started").exists()
    assert list((tmp_path / ".staleflow").iterdir()) == []


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_the_other_end_hears_it_when_this_one_goes(tmp_path: Path, how: signal.Signals) -> None:
    """``cat`` ends when its standard input does, as a machine drains."""
    ended = tmp_path / "ended"
    running = remote(f'touch "$HOME"/began; cat; touch {ended}', tmp_path, [])
    deadline = time.monotonic() + 120
    while not (tmp_path / "began").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    running.send_signal(how)
    running.wait(timeout=120)
    while not ended.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert running.stdout is not None
    running.stdout.close()


def test_a_machine_hears_now_and_then_that_the_link_is_there(tmp_path: Path) -> None:
    running = remote("head -c 1", tmp_path, [])
    said, _ = running.communicate(timeout=120)
    assert (said, running.returncode) == (b".", 0)
    assert f"{VARIABLE}=0:{HEARTBEAT_TIMEOUT_S:g} exec" in reaches()["rollout-machine-0"].command
    assert 3 * HEARTBEAT_INTERVAL_S < HEARTBEAT_TIMEOUT_S


@pytest.mark.slow
def test_a_machine_drains_when_nothing_is_heard_any_more(tmp_path: Path) -> None:
    """The link is lost without a notification: the standard input of the machine stays open."""
    words = machine(tmp_path, sys.executable, "-c", WORKER, str(tmp_path))
    silent = {**os.environ, VARIABLE: "0:60"}  # also the time for the worker to begin
    running = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=silent)
    assert running.stdin is not None
    try:
        while not (tmp_path / "began").exists():
            assert running.poll() is None
            running.stdin.write(b".")
            running.stdin.flush()
            time.sleep(0.1)
        assert running.wait(timeout=300) == 0
        assert (tmp_path / "drained").exists()
    finally:
        running.stdin.close()
        end(running)


def machine(folder: Path, *command: str) -> list[str]:
    return [sys.executable, "-c", MACHINE, str(folder), *command]


def test_a_machine_drains_though_nobody_is_left_to_hear_of_it(tmp_path: Path) -> None:
    """The link is lost at once: the machine's output goes into the pipe of a dead process."""
    link = [sys.executable, "-c", LINK, str(tmp_path / "link")]
    words = machine(tmp_path, sys.executable, "-c", WORKER, str(tmp_path))
    running = remote(f"{VARIABLE}=0 exec {shlex.join(words)}", tmp_path, [], link)
    try:
        until((tmp_path / "began").exists)
        os.kill(int((tmp_path / "link").read_text()), signal.SIGKILL)
        assert running.wait(timeout=120) == 128 + signal.SIGKILL
        until(lambda: "worker finished" in (tmp_path / "logs" / "worker.log").read_text())
        assert (tmp_path / "drained").exists()
    finally:
        end(running)


def test_a_machine_goes_on_though_nobody_takes_what_it_says(tmp_path: Path) -> None:
    """The link is silent: the pipe is full, and the end of a process is noticed nevertheless."""
    words = machine(tmp_path, "sh", "-c", "yes | head -n 200000; exit 2")
    running = subprocess.Popen(words, stdout=subprocess.PIPE)
    try:
        assert running.wait(timeout=120) == 2
        assert running.stdout is not None
        assert running.stdout.read().startswith(b"worker started\ny\ny\n")
    finally:
        end(running)


def test_a_line_longer_than_a_pipe_takes_at_once_arrives_whole(tmp_path: Path) -> None:
    words = machine(tmp_path, sys.executable, "-c", "print('x' * 300_000, flush=True); exit(2)")
    said = subprocess.run(words, stdout=subprocess.PIPE, timeout=120, check=False).stdout
    assert said.splitlines()[:2] == [b"worker started", b"x" * 300_000]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
