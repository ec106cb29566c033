"""Supervise a run on this machine: build the model, start servers and workers, watch them, and shut everything down.

- Ctrl-C, SIGTERM and SIGHUP set a flag that every wait checks, so they take effect at any time. A second signal ends
  the shutdown's waits.
- A worker or server that dies is restarted with back-off. The run fails if a process keeps dying, or exits with code 2,
  which means a mistake of the operator. Both failures are reported with the last output of the process.
- No process is left behind: every child has its own process group, and each group is killed at the end.
"""

import secrets
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from staleflow.clients.admin import Admin
from staleflow.configs.loading.load import addresses
from staleflow.configs.schema import Config
from staleflow.net.errors import Refused, Unavailable
from staleflow.net.security import OBSERVER_ROLES, check_keys, client_sockets
from staleflow.process import memory_folder
from staleflow.process.host import usable_cores
from staleflow.process.sanitize import printable
from staleflow.protocols.wire.messages import ParametersStatus, SchedulerStatus, Status
from staleflow.supervisor import model, roles
from staleflow.supervisor.children import Child
from staleflow.supervisor.drain import drain
from staleflow.supervisor.elastic import Spares
from staleflow.supervisor.leftovers import sweep
from staleflow.supervisor.lifeline import Lifeline
from staleflow.supervisor.roles import Kind, Role
from staleflow.supervisor.stopping import Interrupted, StopSignals
from staleflow.supervisor.summary import Summary, ended, summarise, write
from staleflow.supervisor.view import SafeView, Snapshot, View
from staleflow.supervisor.watch import NewLines, StatusWatch

POLL_INTERVAL_S = 0.2
PARAMETERS_INTERVAL_S = 2.0
"""Seconds between two polls of the parameter server's status."""
START_TIMEOUT_S = 60.0
"""Seconds in which each server must answer."""
TRAINER_EXIT_TIMEOUT_S = 60.0
"""Seconds that the trainer has to exit after the run has finished."""
MAX_OUTPUT_LINES = 12
"""Number of output lines shown for a failed process."""


class Failure(Exception):
    """The run cannot continue. The text gives the reason and, on further lines, the output of the process."""

    def __init__(self, text: str, *, code: int = 1) -> None:
        super().__init__(text)
        self.code = code
        """Exit code of the run; 2 if resuming would fail again until the operator fixes the cause."""


class Supervisor:
    """Owner of all processes of one run. Call ``run`` once, from the main thread."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        view: View,
        resume: str,
        workers: Sequence[Role] | None = None,
        *,
        gpus: int = 0,
    ) -> None:
        """``workers`` replaces the workers of the configuration; these build the model on their own machines.

        ``gpus``: number of GPUs on this machine.
        """
        every = roles.workers(config, run_dir, gpus, usable_cores()) if workers is None else workers
        self._workers = [role for role in every if not role.spare]
        self._spares = Spares([role for role in every if role.spare])
        self._builds_model = workers is None
        self._config = config
        self._run_dir = run_dir
        self._view: View = SafeView(view)
        self._resume = resume
        self._session = secrets.token_hex(8)
        check_keys(config)
        self._sockets = client_sockets(config.security, *OBSERVER_ROLES)
        self._lifeline = Lifeline()
        self._children: list[Child] = []
        self._phase = "starting"
        self._detail = ""
        self._began = time.monotonic()
        self._lines = NewLines(run_dir / "metrics.jsonl")
        self._failed_code = 1
        self._recommended = ("", 0)
        """Action and number of the recommendation that was shown last."""

    def run(self) -> int:
        """Execute the run and return its exit code."""
        where = addresses(self._config, self._run_dir)
        with (
            StopSignals() as self._stop,
            StatusWatch(SchedulerStatus, where.scheduler, transport=self._sockets) as self._watch,
            StatusWatch(
                ParametersStatus, where.parameters, PARAMETERS_INTERVAL_S, transport=self._sockets
            ) as self._versions,
        ):
            self._view.start()
            sweep()
            try:
                outcome, error = self._outcome()
                self._watch.poll_now()
                status = self._status
            finally:
                try:
                    self._drain()
                finally:
                    memory_folder.remove(self._run_dir / "parameters")
                    self._lifeline.close()
                    self._view.stop()
        summary = self._summary(outcome, error, status)
        return self._report(summary, outcome, error)

    @property
    def _status(self) -> SchedulerStatus:
        return self._watch.newest or SchedulerStatus()

    def _outcome(self) -> tuple[str, str]:
        try:
            self._build_model()
            self._start_servers()
            self._start_workers()
            self._until_finished()
            self._await_trainer()
        except Interrupted:
            return "interrupted", ""
        except Failure as failure:
            self._failed_code = failure.code
            self._resume = self._resume if failure.code != 2 else ""  # an unchanged run would fail again
            return "failed", str(failure)
        status = self._status
        return ended(status), status.error

    # Starting ----------------------------------------------------------------------------------------------------

    def _build_model(self) -> None:
        if not self._builds_model:
            return
        if not model.missing(self._config, self._run_dir):
            model.ensure(self._config, self._run_dir)
            return
        self._phase = "building the model"
        builder = self._start(roles.model_builder(self._run_dir))
        while builder.alive:
            self._detail = builder.loading() or model.download_progress(self._run_dir, "".join(builder.last_lines()))
            self._wait()
        self._children.remove(builder)
        builder.sweep()
        self._detail = ""
        if builder.exit_code != 0:
            raise Failure(_with_output("model.build failed", builder), code=2 if builder.exit_code == 2 else 1)

    def _start_servers(self) -> None:
        self._phase = "starting servers"
        self._show()  # the view would miss this phase where all servers reply at once
        for role in roles.servers(self._config, self._run_dir, self._session):
            self._start(role)
        for address in addresses(self._config, self._run_dir).all:
            self._until_answers(address, time.monotonic() + START_TIMEOUT_S)

    def _until_answers(self, address: str, deadline: float) -> None:
        with Admin(address, "supervisor", transport=self._sockets) as admin:
            while True:
                try:
                    admin.status_of(Status, POLL_INTERVAL_S)
                    return
                except (Unavailable, Refused):
                    self._wait()
                if time.monotonic() > deadline:
                    raise Failure(f"the server at {address} did not answer within {START_TIMEOUT_S:g} s")

    def _start_workers(self) -> None:
        self._phase = "starting workers"
        for role in self._workers:
            self._start(role)

    def _start(self, role: Role) -> Child:
        child = Child(role, self._run_dir, self._lifeline)
        self._children.append(child)
        try:
            child.start()
        except OSError as error:
            raise Failure(f"{role.name} could not be started: {error}") from error
        return child

    # Watching ----------------------------------------------------------------------------------------------------

    def _until_finished(self) -> None:
        while not self._status.finished:
            self._wait()
            self._restart_dead(self._children)
            self._follow_scheduler()
            if self._status.drained:
                self._phase = "draining"
            elif self._status.trained:
                self._phase = "evaluating"
            elif self._status.version >= 0:
                self._phase = "training"

    def _follow_scheduler(self) -> None:
        """Show a new recommendation, and start the rollout workers that the scheduler wants."""
        status = self._status
        recommendation = status.recommendation
        if (change := (recommendation.action, recommendation.count)) != self._recommended and recommendation.action:
            self._recommended = change
            if recommendation.count:
                self._view.notify(f"the scheduler recommends: {recommendation.sentence}")
        if status.wanted and not (status.drained or status.trained or status.finished):
            for role in self._spares.take(status.wanted):
                self._start(role)
                self._view.notify(f"{role.name} starts (rollout workers wanted: {len(status.wanted)})")

    def _await_trainer(self) -> None:
        """Wait for the trainer to exit after the run has finished: it may still write a checkpoint."""
        self._phase = "finishing"
        trainer = [child for child in self._children if child.role.kind is Kind.TRAINER]
        deadline = time.monotonic() + TRAINER_EXIT_TIMEOUT_S
        while any(child.alive for child in trainer) and time.monotonic() < deadline:
            self._wait()

    def _wait(self) -> None:
        """Update the view and sleep for ``POLL_INTERVAL_S``. Raise ``Interrupted`` after a signal."""
        self._show()
        if self._stop.wait(POLL_INTERVAL_S):
            raise Interrupted
        if self._phase in ("starting servers", "starting workers"):
            self._restart_dead(self._children)

    def _restart_dead(self, children: list[Child]) -> None:
        for child in list(children):
            if child.over:
                continue
            if child.restart_at is not None:
                if message := child.restart_if_due():
                    self._view.notify(message)
            elif child.exit_code is not None:
                self._handle_exit(child)

    def _handle_exit(self, child: Child) -> None:
        code = child.exit_code
        child.sweep()
        if child.role.kind is not Kind.SCHEDULER:  # a dead scheduler cannot answer
            self._watch.poll_now()
        status = self._status
        leaves = (Kind.WORKER, status.drained), (Kind.TRAINER, status.trained)
        if status.finished or (code == 0 and any(child.role.kind is kind and due for kind, due in leaves)):
            # a trainer that exited during a drain without reporting its end is restarted to report it
            child.over = True
            return
        if self._spares.keep(child.role, status.wanted):
            self._children.remove(child)
            self._view.notify(f"{child.name} has left (rollout workers wanted: {len(status.wanted)})")
            return
        if code == 2:
            raise Failure(_with_output(f"{child.name} rejected its configuration", child, lines=1), code=2)
        if child.start_error:
            raise Failure(_with_output(f"{child.name} could not be restarted: {child.start_error}", child))
        if not child.plan_restart():
            raise Failure(_with_output(f"{child.name} keeps dying, last with {_code(code)}", child))
        if code != 0:
            self._view.notify(f"{child.name} died with {_code(code)}; restarting it")

    # The end -----------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        self._phase = "draining"
        self._detail = ""
        drain(self._children, self._show, self._view.notify, self._stop.second)

    def _show(self) -> None:
        self._view.show(
            Snapshot(
                phase=self._phase,
                elapsed_s=time.monotonic() - self._began,
                processes=tuple(child.state(self._loading(child)) for child in self._children),
                status=self._status,
                status_age_s=self._watch.age_s,
                lines=self._lines.take(),
                detail=self._detail,
                parameters=self._versions.newest or ParametersStatus(),
                unix_s=time.time(),
            )
        )

    def _loading(self, child: Child) -> str:
        """Return the loading progress of a worker or trainer that has not attached yet; empty otherwise."""
        if child.role.kind is Kind.TRAINER:
            waits = not self._status.trainer_term
        else:
            waits = child.role.kind is Kind.WORKER and all(it.name != child.name for it in self._status.workers)
        return printable(child.loading()) if waits and child.alive else ""

    def _summary(self, outcome: str, error: str, status: SchedulerStatus) -> Summary:
        summary = summarise(
            self._config,
            self._run_dir,
            outcome=outcome,
            error=error.partition("\n")[0],
            status=status,
            violations=_violations(self._run_dir / "trace.jsonl"),
            restarts={child.name: child.restarts for child in self._children},
            resume="" if outcome == "finished" else self._resume,
        )
        try:
            write(summary, self._run_dir)
        except OSError as full:  # a full disk must not hide the summary from the terminal
            self._view.notify(f"summary.json could not be written: {full}")
        return summary

    def _report(self, summary: Summary, outcome: str, error: str) -> int:
        if error:
            self._view.notify(f"the run failed: {error}")
        self._view.summary(summary)
        if outcome == "drained":
            at = f"step {summary.steps:,} of {summary.steps_wanted:,}"
            self._view.notify(f"drained at {at}; resume with: {summary.resume}")
        elif summary.resume:
            self._view.notify(f"resume with: {summary.resume}")
        if outcome == "interrupted":
            return 130
        return 0 if summary.good else self._failed_code


def _violations(trace: Path) -> int | None:
    from staleflow.trace.audit.report import audit

    return audit(trace).num_violations if trace.exists() else None


def _with_output(what: str, child: Child, lines: int = MAX_OUTPUT_LINES) -> str:
    """Return ``what`` with the last output of ``child``."""
    printed = child.last_lines(lines)
    if lines == 1 and printed:
        return f"{what}: {printed[0]}"
    return "\n  ".join((f"{what}; its output: logs/{child.name}.out", *printed))


def _code(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"
