"""One child process: started in a session of its own, watched, restarted with back-off, ended with its whole group."""

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from staleflow.net.keys import VARIABLE as KEY_VARIABLE
from staleflow.process import readiness
from staleflow.supervisor import bars
from staleflow.supervisor.lifeline import VARIABLE, Lifeline
from staleflow.supervisor.roles import Kind, Role, Works
from staleflow.supervisor.view import ProcessState

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

CUDA_VARIABLE = "CUDA_VISIBLE_DEVICES"

GAVE_UP = 1
"""Exit code of a machine that could not go on: what it looks after died again and again, however long that took."""

_MANY = 1000
"""Lines: more than the bytes that are looked at hold."""


def visible(gpus: Sequence[int]) -> dict[str, str]:
    """What CUDA reads to see only these, counted among those that this process sees; nothing for none."""
    if not gpus:
        return {}
    own = [name for name in os.environ.get(CUDA_VARIABLE, "").split(",") if name]
    return {CUDA_VARIABLE: ",".join(own[gpu] if gpu < len(own) else str(gpu) for gpu in gpus)}


class Restarts:
    """When a process that died is started again, and when nobody should try any more. Pure: time comes in."""

    FIRST_S = 0.25
    CAP_S = 8.0
    STABLE_S = 20.0
    """A process that worked this long starts counting anew."""
    TRIES = 5
    """Such deaths in a row, without it, that are answered by another start."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def after(self, worked_s: float) -> float | None:
        """Seconds until the next start; None: give up. ``worked_s``: how long it lived, without its loading."""
        self.in_a_row = 1 if worked_s >= self.STABLE_S else self.in_a_row + 1
        if self.in_a_row > self.TRIES:
            return None
        return float(min(self.FIRST_S * 2 ** (self.in_a_row - 1), self.CAP_S))


class Child:
    """A role's process and its successors."""

    def __init__(self, role: Role, run_dir: Path, lifeline: Lifeline) -> None:
        self.role = role
        self.restarts = 0
        self.restart_at: float | None = None
        """Monotonic seconds; set while it waits to be started again."""
        self.unstarted = ""
        """Why its newest start failed; empty once one succeeds."""
        self.over = False
        """It ended because the run ends, and is not started again."""
        self._policy = Restarts()
        self._lifeline = lifeline
        self._output = run_dir / "logs" / f"{role.name}.out"
        self._told = (run_dir / "logs" / f".{role.name}.attached").absolute()
        self._slot = secrets.token_hex(16)
        self._process: subprocess.Popen[bytes] | None = None
        self._swept = False
        self._started_at = 0.0
        self._begins_at = 0

    @property
    def name(self) -> str:
        return self.role.name

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self.alive else None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Of the last process; None while it runs."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Starts it. Its own session: Ctrl-C in the terminal reaches the supervisor only."""
        self._started_at = time.monotonic()
        self._output.parent.mkdir(parents=True, exist_ok=True)
        self._told.unlink(missing_ok=True)
        with self._output.open("ab") as output:
            begins_at = output.tell()
            self._process = subprocess.Popen(
                self.role.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                pass_fds=(self._lifeline.read_fd,),
                start_new_session=True,
            )
        self._begins_at, self._swept, self.unstarted = begins_at, False, ""

    def _environment(self) -> dict[str, str]:
        threads = dict.fromkeys(THREAD_VARIABLES, str(self.role.threads))
        inherited = dict(os.environ)
        if not Path(inherited.get(KEY_VARIABLE, "")).is_dir():
            inherited.pop(KEY_VARIABLE, None)  # one role's file, and each child has its own
        return {
            **inherited,
            **threads,
            **visible(self.role.gpus),
            **dict(self.role.variables),
            "OMP_WAIT_POLICY": "PASSIVE",  # many processes share few cores: who waits must not spin
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
            VARIABLE: str(self._lifeline.read_fd),
            readiness.VARIABLE: str(self._told),
            readiness.SLOT_VARIABLE: self._slot,
        }

    def plan_restart(self) -> bool:
        """After its death: when to start again. False: it died too often."""
        delay_s = self._policy.after(self._worked_s())
        if delay_s is None:
            return False
        self.restart_at = time.monotonic() + delay_s
        return True

    @property
    def attached_at(self) -> float | None:
        """When its newest process joined the run, in monotonic seconds; None before, and of what does not tell."""
        return readiness.attached_at(self._told)

    def _worked_s(self) -> float:
        if self.unstarted:
            return 0.0
        match self.role.works:
            case Works.STARTED:
                return time.monotonic() - self._started_at
            case Works.ATTACHED:
                at = self.attached_at
                return 0.0 if at is None else time.monotonic() - at
            case Works.MACHINE:
                return 0.0 if self.exit_code == GAVE_UP else time.monotonic() - self._started_at

    def restart_if_due(self) -> str:
        """Starts it again when its time has come; what there is to say of it. A start that fails (no memory, no
        descriptor left) counts as a death at once: after the last one that is answered, it is dead and waits for
        nothing."""
        if self.restart_at is None or time.monotonic() < self.restart_at:
            return ""
        self.restart_at = None
        try:
            self.start()
        except OSError as error:
            self.unstarted = str(error)
            self.plan_restart()
            return f"{self.name} could not be started again: {error}"
        self.restarts += 1
        return f"{self.name} started again (restart {self.restarts})"

    def signal(self, number: signal.Signals) -> None:
        """To the process itself, which looks after its own children."""
        self.restart_at = None
        if self._process is not None and self.alive:
            self._process.send_signal(number)

    def sweep(self) -> None:
        """Kills whatever is left of its process group; afterwards nothing of it runs. Once: later its number may be
        another's."""
        self.restart_at = None
        if self._process is None or self._swept:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._swept = True

    def output(self, lines: int) -> list[str]:
        """The last lines that its newest process printed."""
        try:
            with self._output.open("rb") as output:
                size = output.seek(0, os.SEEK_END)
                output.seek(max(self._begins_at, size - 16_384))
                text = output.read().decode("utf-8", "replace")
        except OSError:  # none yet, or no descriptor to read it with
            return []
        return [line.rstrip() for line in text.replace("\r", "\n").splitlines() if line.strip()][-lines:]

    def words(self, lines: int = 1) -> list[str]:
        """The last lines that it printed and that are no progress bars."""
        return [line for line in self.output(_MANY) if not bars.is_bar(line)][-lines:]

    def loading(self) -> str:
        """How far it is with what it loads or downloads, by the bar that it prints; empty without one."""
        return bars.told(self.output(1))

    def state(self, doing: str = "") -> ProcessState:
        """For the view. ``doing``: how far it is with its loading."""
        if self.restart_at is not None:
            state = "waiting to restart"
        elif self._process is None:
            state = "not started"
        else:
            state = "running" if self.alive else "ended"
        kind = Kind.WORKER if self.role.kind is Kind.TRAINER else self.role.kind
        return ProcessState(
            name=self.name,
            kind=kind.value,
            state=state,
            pid=self.pid,
            restarts=self.restarts,
            doing=doing,
            attaches=self.role.works is Works.ATTACHED,
        )
