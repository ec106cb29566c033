"""``staleflow run`` with every process it starts, launched through the command line as a user would."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from staleflow.clients.admin import Admin
from staleflow.configs.loading.load import addresses, read_run
from staleflow.net.permissions import Role
from staleflow.net.security import client_sockets

ROOT = Path(__file__).parent.parent.parent
CONFIGS = ROOT / "configs"
AUDITOR = ROOT.parent / "shared" / "check_trace.py"
"""The independent auditor, if the checkout has it in a folder next to it."""
END_S = 600.0
"""Time limit for a run or a wait that never ends; a loaded machine needs minutes."""


class Run:
    """One ``staleflow run``. Every ``wait`` has a deadline, and leaving the context kills all processes of the run."""

    def __init__(self, run_dir: Path, config: str, *arguments: str) -> None:
        self.run_dir = run_dir
        command = [
            sys.executable,
            "-m",
            "staleflow.cli",
            "run",
            str(CONFIGS / config),
            "--run-dir",
            str(run_dir),
            "--plain",
        ]
        self.process = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.output = ""
        self._read: list[dict[str, Any]] = []
        self._offset = 0

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        family = self.family()
        self.process.kill()
        self.process.wait()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=10)
        if self.process.stdout:
            self.process.stdout.close()

    def family(self) -> list[psutil.Process]:
        """Return every living descendant process."""
        try:
            children: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
            return children
        except psutil.NoSuchProcess:
            return []

    def role(self, *words: str) -> list[psutil.Process]:
        """Descendants whose command line contains all these words, e.g. ``role("attach", "rollout")``."""
        found: list[psutil.Process] = []
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if set(words) <= set(process.cmdline()):
                    found.append(process)
        return found

    def kill(self, *words: str) -> int:
        """``kill -9`` one process of a role; return its pid."""
        victim = self.role(*words)[0]
        pid: int = victim.pid
        victim.send_signal(signal.SIGKILL)
        return pid

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of the trace's complete lines so far. Only lines that are new are read again."""
        path = self.run_dir / "trace.jsonl"
        if path.exists():
            if path.stat().st_size < self._offset:  # a restarted scheduler has cut lines that were not committed
                self._read, self._offset = [], 0
            with path.open("rb") as trace:
                trace.seek(self._offset)
                whole, _, _ = trace.read().rpartition(b"\n")
            if whole:
                self._read += map(json.loads, whole.split(b"\n"))
                self._offset += len(whole) + 1
        yield from self._read

    def count(self, ev: str, **fields: object) -> int:
        return sum(e["ev"] == ev and all(e.get(k) == v for k, v in fields.items()) for e in self.events())

    def wait_for(self, ev: str, count: int, timeout_s: float, **fields: object) -> None:
        """Wait until the trace contains ``count`` events of this kind."""
        deadline = time.monotonic() + timeout_s
        while self.count(ev, **fields) < count:
            assert self.process.poll() is None, f"ended early with {self.process.returncode}: {self.finish(5)}"
            assert time.monotonic() < deadline, f"{count} {ev} {fields} did not come in {timeout_s} s: {self.tally()}"
            time.sleep(0.05)

    def wait_for_second(self, name: str) -> None:
        """Wait until a process of this name has attached after the first one."""
        deadline = time.monotonic() + END_S
        while len({e["worker"] for e in self.events() if e["ev"] == "attach" and name_of(e["worker"]) == name}) < 2:
            assert self.process.poll() is None, f"ended early with {self.process.returncode}: {self.finish(5)}"
            assert time.monotonic() < deadline, f"{name} attached no second time: {self.tally()}"
            time.sleep(0.05)

    def drain(self, *guests: "subprocess.Popen[Any]") -> list[int]:
        """End the run as ``staleflow drain`` does; return the exit codes of the workers that were attached by hand.

        The supervisor is stopped meanwhile: it would end the scheduler before a slow worker has detached.
        """
        if not guests:
            drain(self.run_dir)
            return []
        self.process.send_signal(signal.SIGSTOP)
        try:
            drain(self.run_dir)
            return [guest.wait(END_S) for guest in guests]
        finally:
            self.process.send_signal(signal.SIGCONT)

    def tally(self) -> Counter[str]:
        return Counter(e["ev"] for e in self.events())

    def finish(self, timeout_s: float) -> str:
        """Wait for the exit; return the output."""
        self.output, _ = self.process.communicate(timeout=timeout_s)
        return self.output

    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return summary


def drain(run_dir: Path) -> None:
    """Drain a run, without the short time limit of the command line."""
    config = read_run(run_dir)
    sockets = client_sockets(config.security, Role.ADMIN)
    with Admin(addresses(config, run_dir).scheduler, "drain", transport=sockets) as admin:
        admin.drain("the test has seen enough", timeout_s=END_S)


def name_of(worker: object) -> str:
    """Name of a worker, without the number of its process."""
    return str(worker).partition(".")[0]


def audited(run_dir: Path, *need: str) -> dict[str, Any]:
    """Return the report of our own audit, after the independent auditor has confirmed a clean trace."""
    from staleflow.trace.audit.report import audit

    report = audit(run_dir / "trace.jsonl")
    assert report.violations == [], report.violations[:3]
    if AUDITOR.exists():
        command = [sys.executable, str(AUDITOR), str(run_dir / "trace.jsonl"), "--need", *need]
        seen = subprocess.run(command, capture_output=True, text=True, check=False)
        assert seen.returncode == 0, seen.stdout + seen.stderr
    return dict(report.events)
