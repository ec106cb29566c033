"""In a run with keys, all traffic uses CURVE, no received data becomes code, and no secret is ever visible."""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from staleflow.cli.main import main
from staleflow.clients.admin import Admin
from staleflow.net.errors import Refused
from staleflow.net.keys import read_key
from staleflow.net.permissions import Role
from staleflow.net.transport import Sockets
from staleflow.protocols.consistency.effects import Code
from tests.process.running import END_S, Run, audited

pytestmark = pytest.mark.xdist_group("machine")

HOOK = Path(__file__).parent / "hook"
STEPS = 100_000
"""More steps than the test has time for: the test ends the run after its checks."""
IMPORTS = ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>", "<frozen runpy>")
"""Files that may turn other files into code. ``DEFINERS`` generate code from their own text during an import."""
DEFINERS = ("dataclasses.py", "collections/__init__.py", "enum.py", "typing.py", "functools.py", "inspect.py")


@pytest.fixture
def keys(run_dir: Path) -> Path:
    folder = run_dir.parent / "keys"
    assert main(["keygen", str(folder)]) == 0
    return folder


def overrides(keys: Path, ports: list[int]) -> tuple[list[str], str]:
    """Overrides for a run over TCP with keys; and the scheduler's address."""
    first, second, third = ports
    scheduler = f"tcp://127.0.0.1:{first}"
    return [
        f"security.keys={keys}",
        f"scheduler.bind={scheduler}",
        f'trajectories.bind=["tcp://127.0.0.1:{second}"]',
        f"parameters.bind=tcp://127.0.0.1:{third}",
        f"trainer.steps={STEPS}",
    ], scheduler


def test_a_run_with_keys_trains_unpickles_nothing_and_shows_no_secret(
    run_dir: Path,
    keys: Path,
    ports: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    heard = run_dir.parent / "heard"
    monkeypatch.setenv("PYTHONPATH", str(HOOK), prepend=os.pathsep)
    monkeypatch.setenv("AUDIT_TO", str(heard))
    secrets = [read_key(path).secret for path in keys.glob("*.key")]
    settings, scheduler = overrides(keys, ports)
    with Run(run_dir, "simulated.toml", *settings) as run:
        run.wait_for("consume", 2, END_S)
        seen = b"".join(_shown(process) for process in run.family())
        assert seen.count(b"serve") >= 3  # the hook has observed the servers
        assert b"STALEFLOW_KEY" not in seen
        _strangers_stay_out(scheduler, keys)
        _a_worker_of_another_machine_joins(run, scheduler, keys)
        assert status(capsys, str(run_dir))["security"] == "keys"  # it finds the keys by the configuration
        run.drain()
        output = run.finish(END_S)
    assert run.process.returncode == 0, output
    audited(run_dir, "consume=2", "close=1")
    assert run.count("auth", ok=False) >= 1
    assert run.count("reject", code="denied", op="Drain") == 1
    _no_secret(secrets, run_dir, seen + output.encode())
    _nothing_became_code(heard.read_text())


def status(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Return what ``staleflow status`` prints, once the scheduler has answered within the command's time limit."""
    deadline = time.monotonic() + END_S
    capsys.readouterr()
    while main(["status", *words, "--json"]) != 0:
        assert time.monotonic() < deadline, capsys.readouterr().err
        capsys.readouterr()
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def _shown(process: psutil.Process) -> bytes:
    """Command line and environment of a process, as ``ps`` shows them."""
    with contextlib.suppress(OSError):
        where = Path("/proc") / str(process.pid)
        return (where / "cmdline").read_bytes() + (where / "environ").read_bytes()
    return b""


def _strangers_stay_out(scheduler: str, keys: Path) -> None:
    with Admin(scheduler, "nobody") as nobody, pytest.raises(Refused) as caught:
        nobody.status(120)
    assert caught.value.code is Code.DENIED
    assert main(["keygen", str(keys.parent / "others")]) == 0
    other = read_key(keys.parent / "others" / "admin.key")
    mine = read_key(keys / "monitor.key")
    text = (keys.parent / "others" / "admin.key").read_text().replace(other.server.decode(), mine.server.decode())
    (keys.parent / "others" / "admin.key").write_text(text)
    forged = Sockets(read_key(keys.parent / "others" / "admin.key"))
    with Admin(scheduler, "forged", transport=forged) as stranger, pytest.raises(Refused):
        stranger.status(120)
    with Admin(scheduler, "looker", transport=Sockets(mine)) as looker:
        assert looker.status(120).security == "keys"
        with pytest.raises(Refused, match="a key of role monitor may not send Drain"):
            looker.drain("not mine to end", timeout_s=120)


def _a_worker_of_another_machine_joins(run: Run, scheduler: str, keys: Path) -> None:
    """A worker with the address and its own key file joins; without the key, the error names the missing key."""
    assert main(["keygen", str(keys), "--add", "stage", "--name", "box-7"]) == 0
    elsewhere = keys.parent / "elsewhere"
    elsewhere.mkdir()
    (keys / "box-7.key").rename(elsewhere / "box-7.key")
    command = [sys.executable, "-m", "staleflow.cli", "attach", "stage", "--connect", scheduler, "--name", "box-7"]
    env = {name: value for name, value in os.environ.items() if name != "AUDIT_TO"}
    no = subprocess.run(command, env=env, capture_output=True, text=True, timeout=END_S, check=False)
    assert (no.returncode, "the server requires one; set STALEFLOW_KEY to its file" in no.stderr) == (1, True)
    env["STALEFLOW_KEY"] = str(elsewhere / "box-7.key")
    with subprocess.Popen(command, env=env, cwd=elsewhere, stderr=subprocess.DEVNULL) as worker:
        run.wait_for("attach", 2, END_S, role="stage")
        worker.terminate()
        assert worker.wait(timeout=END_S) == 0


def _no_secret(secrets: list[bytes], run_dir: Path, said: bytes) -> None:
    assert len(secrets) == len(Role)
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert {"trace.jsonl", "metrics.jsonl", "scheduler.log"} <= {path.name for path in files}
    for data in (said, *(path.read_bytes() for path in files)):
        assert not any(secret in data for secret in secrets)


def _nothing_became_code(heard: str) -> None:
    lines = [line.split("\t") for line in heard.splitlines()]
    servers = [line for line in lines if line[0].startswith("serve")]
    assert {line[0].split("---")[0] for line in servers} == {
        "serve-scheduler",
        "serve-trajectories",
        "serve-parameters",
    }  # all servers were audited
    assert not [line for line in lines if line[1] == "pickle.find_class"]
    strange = [line for line in servers if line[2] not in IMPORTS and not line[2].endswith(DEFINERS)]
    assert {tuple(line[1:]) for line in strange} == set()


def test_the_hook_hears_what_it_is_there_for(tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    code = f"import pickle; pickle.loads({pickle.dumps(Path('x'))!r}); eval('1 + 1')"
    env = {**os.environ, "PYTHONPATH": str(HOOK), "AUDIT_TO": str(heard)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
    assert {"pickle.find_class", "exec", "compile"} <= {line.split("\t")[1] for line in heard.read_text().splitlines()}


@pytest.mark.parametrize("what", ["scheduler", "trajectories", "parameters"])
def test_no_server_starts_beyond_loopback_without_keys(
    run_dir: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bind = f'{what}.bind=["tcp://0.0.0.0:5000"]' if what == "trajectories" else f"{what}.bind=tcp://0.0.0.0:5000"
    config = Path(__file__).parent.parent.parent / "configs" / "simulated.toml"
    assert main(["serve", what, "--config", str(config), "--run-dir", str(run_dir), bind]) == 2
    assert "without security.keys only loopback may be bound" in capsys.readouterr().err
    assert not run_dir.exists()


def test_insecure_is_loud(run_dir: Path, ports: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    first = ports[0]
    settings = [f"scheduler.bind=tcp://0.0.0.0:{first}", f"trainer.steps={STEPS}", "--insecure"]
    with Run(run_dir, "simulated.toml", *settings) as run:
        run.wait_for("consume", 2, END_S)
        assert status(capsys, "--connect", f"tcp://127.0.0.1:{first}")["security"] == "insecure"
        run.process.send_signal(signal.SIGINT)
        output = run.finish(END_S)
    assert run.process.returncode == 130, output
    assert "INSECURE: bound beyond this machine without keys" in output
    log = (run_dir / "logs" / "scheduler.log").read_text()
    assert f"INSECURE: tcp://0.0.0.0:{first} has no keys; anyone who can reach it controls this run" in log
