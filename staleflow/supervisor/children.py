"""One child process: started in its own session, watched, restarted with back-off, and killed with its whole group."""

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
from staleflow.supervisor.roles import Kind, Role, WorkingSince
from staleflow.supervisor.view import ProcessState

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

CUDA_VARIABLE = "CUDA_VISIBLE_DEVICES"

GAVE_UP = 1
"""Exit code of a machine's launcher that gave up because its own children kept dying, after whatever time."""

_MAX_OUTPUT_LINES = 1000
"""More lines than the 16 KiB tail of an output file can contain."""


def visible(gpus: Sequence[int]) -> dict[str, str]:
    """Return the environment that restricts CUDA to ``gpus``, which are indices among this process's visible GPUs.

    Return an empty mapping for no GPUs, which leaves all of them visible.
    """
    if not gpus:
        return {}
    own = [name for name in os.environ.get(CUDA_VARIABLE, "").split(",") if name]
    return {CUDA_VARIABLE: ",".join(own[gpu] if gpu < len(own) else str(gpu) for gpu in gpus)}


class Restarts:
    """Restart policy: exponential back-off and a limit on consecutive early deaths. No clock: time is an argument."""

    FIRST_S = 0.25
    CAP_S = 8.0
    STABLE_S = 20.0
    """Working this long resets the count of deaths."""
    TRIES = 5
    """Number of consecutive early deaths after which the process is still restarted."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def after(self, worked_s: float) -> float | None:
        """Return the seconds until the next start, or None to give up. ``worked_s``: uptime without loading."""
        self.in_a_row = 1 if worked_s >= self.STABLE_S else self.in_a_row + 1
        if self.in_a_row > self.TRIES:
            return None
        return float(min(self.FIRST_S * 2 ** (self.in_a_row - 1), self.CAP_S))


class Child:
    """The process of a role, across restarts."""

    def __init__(self, role: Role, run_dir: Path, lifeline: Lifeline) -> None:
        self.role = role
        self.restarts = 0
        self.restart_at: float | None = None
        """Monotonic time of the next start; None unless a restart is pending."""
        self.start_error = ""
        """Reason why the latest start failed; empty after a start that succeeded."""
        self.over = False
        """True if the process exited because the run ends, and must not be restarted."""
        self._policy = Restarts()
        self._lifeline = lifeline
        self._output = run_dir / "logs" / f"{role.name}.out"
        self._attached_file = (run_dir / "logs" / f".{role.name}.attached").absolute()
        self._slot = secrets.token_hex(16)
        self._process: subprocess.Popen[bytes] | None = None
        self._swept = False
        self._started_at = 0.0
        self._output_offset = 0

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
        """Exit code of the latest process; None while it runs."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Start the process in its own session, so that Ctrl-C in the terminal reaches the supervisor only."""
        self._started_at = time.monotonic()
        self._output.parent.mkdir(parents=True, exist_ok=True)
        self._attached_file.unlink(missing_ok=True)
        with self._output.open("ab") as output:
            offset = output.tell()
            self._process = subprocess.Popen(
                self.role.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                pass_fds=(self._lifeline.read_fd,),
                start_new_session=True,
            )
        self._output_offset, self._swept, self.start_error = offset, False, ""

    def _environment(self) -> dict[str, str]:
        threads = dict.fromkeys(THREAD_VARIABLES, str(self.role.threads))
        inherited = dict(os.environ)
        if not Path(inherited.get(KEY_VARIABLE, "")).is_dir():
            inherited.pop(KEY_VARIABLE, None)  # it names the key of one role; each child needs its own
        return {
            **inherited,
            **threads,
            **visible(self.role.gpus),
            **dict(self.role.variables),
            "OMP_WAIT_POLICY": "PASSIVE",  # many processes share few cores: idle OpenMP threads must not spin
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
            VARIABLE: str(self._lifeline.read_fd),
            readiness.VARIABLE: str(self._attached_file),
            readiness.SLOT_VARIABLE: self._slot,
        }

    def plan_restart(self) -> bool:
        """Schedule a restart after the death of the process. Return False if it died too often."""
        delay_s = self._policy.after(self._worked_s())
        if delay_s is None:
            return False
        self.restart_at = time.monotonic() + delay_s
        return True

    @property
    def attached_at(self) -> float | None:
        """Monotonic time at which the latest process attached to the run; None before, and for servers."""
        return readiness.attached_at(self._attached_file)

    def _worked_s(self) -> float:
        if self.start_error:
            return 0.0
        match self.role.works:
            case WorkingSince.STARTED:
                return time.monotonic() - self._started_at
            case WorkingSince.ATTACHED:
                at = self.attached_at
                return 0.0 if at is None else time.monotonic() - at
            case WorkingSince.MACHINE:
                return 0.0 if self.exit_code == GAVE_UP else time.monotonic() - self._started_at

    def restart_if_due(self) -> str:
        """Restart the process if its restart is due. Return a message for the user, or an empty string.

        A start that fails (no memory, no descriptors) counts as another death. After the last permitted one, no restart
        is pending any more.
        """
        if self.restart_at is None or time.monotonic() < self.restart_at:
            return ""
        self.restart_at = None
        try:
            self.start()
        except OSError as error:
            self.start_error = str(error)
            self.plan_restart()
            return f"{self.name} could not be restarted: {error}"
        self.restarts += 1
        return f"{self.name} restarted (restart {self.restarts})"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process only; it is responsible for its own children. Cancels a pending restart."""
        self.restart_at = None
        if self._process is not None and self.alive:
            self._process.send_signal(number)

    def sweep(self) -> None:
        """Kill the rest of the process group.

        Only the first call after a start has an effect, because the kernel may reuse the number of the group later.
        """
        self.restart_at = None
        if self._process is None or self._swept:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._swept = True

    def output(self, lines: int) -> list[str]:
        """Return the last lines that the latest process printed."""
        try:
            with self._output.open("rb") as output:
                size = output.seek(0, os.SEEK_END)
                output.seek(max(self._output_offset, size - 16_384))
                text = output.read().decode("utf-8", "replace")
        except OSError:  # no output yet, or no descriptors left
            return []
        return [line.rstrip() for line in text.replace("\r", "\n").splitlines() if line.strip()][-lines:]

    def last_lines(self, lines: int = 1) -> list[str]:
        """Return the last lines of output without progress bars."""
        return [line for line in self.output(_MAX_OUTPUT_LINES) if not bars.is_bar(line)][-lines:]

    def loading(self) -> str:
        """Return the loading progress from the progress bar that the process prints; empty without one."""
        return bars.progress(self.output(1))

    def state(self, doing: str = "") -> ProcessState:
        """Return the state for the view. ``doing``: loading progress."""
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
            attaches=self.role.works is WorkingSince.ATTACHED,
        )
