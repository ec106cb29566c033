"""What ssh is told, and a machine behind it: started, kept, and ended when the connection's other end goes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from staleflow.configs.errors import ConfigError
from staleflow.configs.load import load
from staleflow.launch import ssh
from staleflow.launch.remote import whole
from staleflow.launch.servers import settled
from staleflow.launch.ssh import Reach

CLUSTER = Path(__file__).parent.parent.parent / "configs" / "cluster.toml"
HOSTS = 'launch.hosts=["trainer-1", "engines-1", "engines-2"]'
LOCAL = ["sh", "-c", 'exec sh -c "$1"']
"""A shell to a host that is here: its first argument is the host's name."""


def reaches(*overrides: str) -> dict[str, Reach]:
    config, run_dir = load(CLUSTER, [HOSTS, *overrides]), Path("/run/first")
    ssh.check(config.launch)
    run = settled(config, run_dir, "10.0.0.1")
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
            'launch.hosts is "-oProxyCommand=x"; it must be the name of a host',
        ),
        ("launch.shell=[]", "launch.shell is []; it must be a command"),
        ("scheduler.bind=tcp://127.0.0.1:5551", "other machines cannot reach it"),
    ],
)
def test_what_ssh_cannot_do_is_refused(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        reaches(override)
    assert said in str(refused.value)


def remote(command: str, home: Path, keys: list[Path]) -> "subprocess.Popen[bytes]":
    told = {
        "host": "here",
        "through": LOCAL,
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
    said, _ = running.communicate(timeout=20)
    *modes, folder, files = said.decode().split()
    assert (modes, files, running.returncode) == (["700", "600", "700"], "rollout.key", 2)
    assert folder.startswith(f"{tmp_path}/.staleflow/kept.")
    assert list((tmp_path / ".staleflow").iterdir()) == [], "and go with the machine"


def test_runs_of_one_name_on_one_home_have_keys_of_their_own(tmp_path: Path) -> None:
    """Also a machine that drains after its link was lost, while the next connection has started it anew."""
    running = list[subprocess.Popen[bytes]]()
    for run in ("alice", "bob"):
        (tmp_path / run).mkdir()
        (tmp_path / run / "rollout.key").write_text(f"secret of {run}")
        stay = f'cat "$keys"/rollout.key > {tmp_path}/{run}/got; echo there; cat; cat "$keys"/rollout.key'
        running.append(remote(stay, tmp_path, [tmp_path / run / "rollout.key"]))
        assert running[-1].stdout is not None
        assert running[-1].stdout.readline() == b"there\n"
    assert len(list((tmp_path / ".staleflow").iterdir())) == 2
    for process, run in zip(running, ("alice", "bob"), strict=True):
        process.terminate()
        said, _ = process.communicate(timeout=20)
        assert (said.decode(), (tmp_path / run / "got").read_text()) == (f"secret of {run}",) * 2
    assert list((tmp_path / ".staleflow").iterdir()) == []


def test_keys_that_do_not_arrive_whole_start_nothing(tmp_path: Path) -> None:
    key = tmp_path / "rollout.key"
    key.write_text("secret")
    reach = Reach(host="here", through=LOCAL, command=f"touch {tmp_path}/started", keys_in="kept", key_files=[str(key)])
    cut = ("sh", "-c", whole(reach, 10_240))
    done = subprocess.run(cut, input=b"x" * 700, env={**os.environ, "HOME": str(tmp_path)}, check=False)
    assert done.returncode != 0
    assert not (tmp_path / "started").exists()
    assert list((tmp_path / ".staleflow").iterdir()) == []


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_the_other_end_hears_it_when_this_one_goes(tmp_path: Path, how: signal.Signals) -> None:
    """``cat`` ends when its standard input does, as a machine drains."""
    ended = tmp_path / "ended"
    running = remote(f'touch "$HOME"/began; cat; touch {ended}', tmp_path, [])
    deadline = time.monotonic() + 20
    while not (tmp_path / "began").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    running.send_signal(how)
    running.wait(timeout=20)
    while not ended.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert running.stdout is not None
    running.stdout.close()
