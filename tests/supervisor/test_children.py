"""Real processes are watched, restarted, and ended together with every process they started."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from staleflow.supervisor import drain as drain_module
from staleflow.supervisor.children import Child, Restarts, visible
from staleflow.supervisor.drain import drain
from staleflow.supervisor.lifeline import Lifeline
from staleflow.supervisor.roles import Kind, Role, WorkingSince

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
PARENT = (
    f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); "
    "print(child.pid, flush=True); child.wait()"
)
POLITE = (
    "import signal, sys, time; signal.signal(15, lambda *_: (print(time.monotonic()), sys.exit(0))); "
    "sys.stdout.write('up\\n'); sys.stdout.flush(); time.sleep(600)"  # in one piece: the signal comes at once
)
HOLDING = f"from staleflow.supervisor import lifeline; lifeline.watch_supervisor(); {SLEEP}"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    """Start a Python one-liner as a role; end it after the test."""
    lifeline, children = Lifeline(), list[Child]()

    def child(code: str, name: str = "one", kind: Kind = Kind.WORKER) -> Child:
        role = Role(name=name, kind=kind, command=(sys.executable, "-c", code), threads=3)
        children.append(Child(role, tmp_path, lifeline))
        children[-1].start()
        return children[-1]

    yield child
    for one in children:
        one.sweep()
    lifeline.close()


def until(true: Callable[[], object], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def nothing() -> None: ...


def gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_delays_grow_up_to_a_cap_and_then_nobody_tries_any_more() -> None:
    policy = Restarts()
    assert [policy.after(worked_s=1.0) for _ in range(7)] == [0.25, 0.5, 1.0, 2.0, 4.0, None, None]


def test_a_process_that_worked_long_starts_counting_anew() -> None:
    policy = Restarts()
    for _ in range(4):
        policy.after(worked_s=1.0)
    assert policy.after(worked_s=Restarts.STABLE_S) == 0.25


@pytest.mark.parametrize(
    ("works", "code", "restarts"),
    [
        (WorkingSince.STARTED, "raise SystemExit(1)", 9),
        (WorkingSince.ATTACHED, "raise SystemExit(1)", Restarts.TRIES),
        (
            WorkingSince.ATTACHED,
            "from staleflow.process import readiness as s; s.report_attached(); raise SystemExit(1)",
            9,
        ),
        (WorkingSince.MACHINE, "raise SystemExit(1)", Restarts.TRIES),
        (WorkingSince.MACHINE, "raise SystemExit(3)", 9),
    ],
)
def test_only_who_has_come_to_work_counts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: WorkingSince, code: str, restarts: int
) -> None:
    monkeypatch.setattr(Restarts, "STABLE_S", 1e-9)  # every life counts as long
    monkeypatch.setattr(Restarts, "CAP_S", 0.0)
    lifeline = Lifeline()
    child = Child(
        Role(name="one", kind=Kind.WORKER, command=(sys.executable, "-c", code), works=works), tmp_path, lifeline
    )
    child.start()
    while child.restarts < 9:
        until(lambda: not child.alive)
        if not child.plan_restart():
            break
        until(child.restart_if_due)
    assert child.restarts == restarts
    child.sweep()
    lifeline.close()


def test_a_start_that_fails_is_tried_again_and_not_for_ever(
    start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Restarts, "CAP_S", 0.0)
    monkeypatch.setattr(Restarts, "STABLE_S", 0.5)
    child = start("import time; time.sleep(0.6); raise SystemExit(7)")  # this life was stable; a failed start is not
    asked, popen = list[bool](), subprocess.Popen

    def full(*_: object, **__: object) -> None:
        asked.append(True)
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    until(lambda: child.exit_code == 7)
    assert child.plan_restart()
    monkeypatch.setattr(subprocess, "Popen", full)
    assert child.restart_if_due() == "one could not be restarted: [Errno 11] Resource temporarily unavailable"
    assert (child.restarts, child.state().state) == (0, "waiting to restart")
    with monkeypatch.context() as room:
        room.setattr(subprocess, "Popen", popen)
        assert child.restart_if_due() == "one restarted (restart 1)"
    until(lambda: child.exit_code == 7)
    while child.restart_at is not None or child.plan_restart():
        assert child.restart_if_due()
        assert len(asked) <= 1 + Restarts.TRIES
    assert len(asked) == 1 + Restarts.TRIES
    assert (child.restarts, child.exit_code, child.restart_at) == (1, 7, None)


def test_a_start_that_fails_before_the_old_mark_is_gone_has_not_worked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Restarts, "CAP_S", 0.0)
    monkeypatch.setattr(Restarts, "STABLE_S", 0.2)
    code = (
        "from staleflow.process import readiness as s; import time; s.report_attached(); time.sleep(0.3); print('last')"
    )
    role = Role(name="one", kind=Kind.WORKER, command=(sys.executable, "-c", code), works=WorkingSince.ATTACHED)
    lifeline = Lifeline()
    child = Child(role, tmp_path, lifeline)
    child.start()
    until(lambda: child.exit_code == 0)

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "unlink", read_only)
    assert child.plan_restart()
    fails = 0
    while child.restart_at is not None:
        fails += bool(child.restart_if_due())
        assert fails <= Restarts.TRIES
    assert (fails, child.start_error) == (Restarts.TRIES, "[Errno 30] Read-only file system")
    assert child.last_lines() == ["last"], "of the process that ran"
    child.sweep()
    lifeline.close()


def test_a_group_is_killed_once(start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch) -> None:
    killed, killpg = list[int](), os.killpg

    def noted(group: int, number: int) -> None:
        killed.append(group)
        killpg(group, number)

    monkeypatch.setattr(os, "killpg", noted)
    child = start(SLEEP)
    groups = [child.pid]
    for _ in range(2):
        child.sweep()
    child.start()
    groups.append(child.pid)
    child.sweep()
    assert killed == groups


def test_a_child_has_its_own_session_its_threads_and_its_output(start: Callable[..., Child]) -> None:
    child = start("import os; print(os.getsid(0) == os.getpid(), os.environ['OMP_NUM_THREADS'])")
    until(lambda: child.exit_code == 0)
    assert child.output(5) == ["True 3"]
    assert child.state().state == "ended"


def test_output_is_that_of_the_newest_process(start: Callable[..., Child]) -> None:
    child = start("print('a line')")
    until(lambda: not child.alive)
    assert child.plan_restart()
    until(child.restart_if_due)
    until(lambda: not child.alive)
    assert child.restarts == 1
    assert child.output(5) == ["a line"]


def test_a_dead_child_waits_before_it_starts_again(
    start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Restarts, "FIRST_S", 8.0)
    child = start("raise SystemExit(7)")
    until(lambda: child.exit_code == 7)
    assert child.plan_restart()
    assert not child.restart_if_due()
    assert child.state().state == "waiting to restart"


def test_sweeping_ends_what_a_killed_child_had_started(start: Callable[..., Child]) -> None:
    child = start(PARENT)
    until(lambda: len(child.output(2)) == 2)  # the process number and the grandchild's line, in either order
    (grandchild,) = [int(line) for line in child.output(2) if line.isdecimal()]
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    until(lambda: not child.alive)
    assert not gone(grandchild)
    child.sweep()
    until(lambda: gone(grandchild))


def test_progress_bars_are_not_what_a_child_says(start: Callable[..., Child]) -> None:
    bars = "\\r".join(("Loading weights:   0%|          | 0/26 [00:00<?, ?it/s]", "12it [00:01, 9.42it/s]", "7.5s/it"))
    child = start(f"print('reading text', flush=True); print('{bars}\\rLoading weights: 100%|####| 26/26')")
    until(lambda: not child.alive)
    assert child.last_lines() == child.last_lines(12) == ["reading text"]
    quiet = start("pass", "two")
    until(lambda: not quiet.alive)
    assert quiet.last_lines() == []


def test_a_child_that_loads_says_how_far_it_is(start: Callable[..., Child]) -> None:
    bars = "\\r".join(f"weights:  {share}%|#   | {share}/100 [00:00<?, ?it/s]" for share in (10, 34))
    child = start(f"print('reading'); print('{bars}', end='', flush=True); import time; time.sleep(600)")
    until(lambda: child.loading() == "weights, 34 %, 34 of 100")
    assert child.state(child.loading()).doing == "weights, 34 %, 34 of 100"


def test_draining_asks_workers_first_and_the_scheduler_last(
    start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in Kind:
        monkeypatch.setitem(drain_module.TIMEOUTS_S, kind, 120.0)
    children = [start(POLITE, kind.value, kind) for kind in (Kind.SCHEDULER, Kind.SERVER, Kind.TRAINER, Kind.WORKER)]
    for child in children:
        until(partial(child.output, 1))
    drain(children, nothing, str, threading.Event())
    scheduler, server, trainer, worker = (float(child.output(1)[0]) for child in children)
    assert max(trainer, worker) < server < scheduler
    assert [child.exit_code for child in children] == [0, 0, 0, 0]


def test_who_does_not_listen_is_killed_at_once_when_somebody_insists(
    start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(drain_module.TIMEOUTS_S, Kind.WORKER, 600.0)
    child = start(DEAF)
    until(lambda: bool(child.output(1)))
    insists = threading.Event()
    insists.set()
    began = time.monotonic()
    drain([child], nothing, str, insists)
    assert child.exit_code == -signal.SIGKILL
    assert time.monotonic() - began < 120.0


@pytest.mark.parametrize("joined", [True, False])
def test_a_trainer_that_has_joined_has_time_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joined: bool
) -> None:
    monkeypatch.setitem(drain_module.TIMEOUTS_S, Kind.TRAINER, 0.5)
    announced = tmp_path / "announced"
    code = f"""
import os, signal, sys, time
from staleflow.process import readiness
def save(*_):
    while not os.path.exists({str(announced)!r}):
        time.sleep(0.01)
    print("saved")
    sys.exit(0)
{"readiness.report_attached()" if joined else ""}
signal.signal(signal.SIGTERM, save)
print("up")
time.sleep(600)
"""
    role = Role(name="trainer", kind=Kind.TRAINER, command=(sys.executable, "-c", code), works=WorkingSince.ATTACHED)
    lifeline, said = Lifeline(), list[str]()
    child = Child(role, tmp_path, lifeline)
    child.start()
    until(partial(child.output, 1))

    def notify(text: str) -> None:
        said.append(text)
        announced.touch()  # the trainer has taken longer than usual, and may end

    drain([child], nothing, notify, threading.Event())
    lifeline.close()
    assert (child.exit_code, child.output(1)) == ((0, ["saved"]) if joined else (-signal.SIGKILL, ["up"]))
    assert len(said) == joined


def test_who_looks_on_cannot_break_off_a_drain(start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(drain_module.TIMEOUTS_S, Kind.TRAINER, 0.0)
    monkeypatch.setitem(drain_module.TIMEOUTS_S, Kind.SCHEDULER, 120.0)
    monkeypatch.setattr(drain_module, "MACHINE_TIMEOUT_S", 0.5)
    trainer, scheduler = start(DEAF, "trainer", Kind.TRAINER), start(SLEEP, "scheduler", Kind.SCHEDULER)
    for child in (trainer, scheduler):
        until(partial(child.output, 1))
    called = set[str]()

    def show() -> None:
        called.add("show")
        raise ValueError

    def say(text: str) -> None:
        called.add("say")
        raise OSError

    drain([trainer, scheduler], show, say, threading.Event())
    assert called == {"show", "say"}
    assert (trainer.exit_code, scheduler.exit_code) == (-signal.SIGKILL, -signal.SIGTERM)


def test_children_end_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from staleflow.supervisor.children import Child\n"
        "from staleflow.supervisor.lifeline import Lifeline\n"
        "from staleflow.supervisor.roles import Kind, Role\n"
        f"role = Role(name='one', kind=Kind.WORKER, command=(sys.executable, '-c', {HOLDING!r}))\n"
        f"child = Child(role, Path({str(tmp_path)!r}), Lifeline()); child.start()\n"
        "while not child.output(1): time.sleep(0.01)\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        child = int(supervisor.stdout.readline())
        assert not gone(child)
        supervisor.kill()
    until(lambda: gone(child))


def test_gpus_are_counted_among_those_that_the_supervisor_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert (visible([1, 2]), visible([])) == ({"CUDA_VISIBLE_DEVICES": "1,2"}, {})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert visible([1]) == {"CUDA_VISIBLE_DEVICES": "GPU-b"}


def test_each_successor_fills_the_slot_of_the_process_before_it(start: Callable[..., Child]) -> None:
    """The scheduler gives the name to the successor at once, and to no other process."""
    code = "from staleflow.process import readiness; print(readiness.slot(), flush=True)"
    one, other = start(code, "one"), start(code, "other")
    until(lambda: one.last_lines() and other.last_lines() and one.exit_code == 0)
    (first,), (elsewhere,) = one.last_lines(), other.last_lines()
    one.start()
    until(lambda: one.last_lines() and one.exit_code == 0)
    assert one.last_lines() == [first]
    assert len(first) == len(elsewhere) == 32
    assert first != elsewhere
