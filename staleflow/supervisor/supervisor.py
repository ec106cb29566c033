"""A run on this machine: model, servers, workers, in this order; then watching; then the end, whatever brought it.

- Ctrl-C, SIGTERM and SIGHUP are a flag that every wait looks at, so they work at any moment; a second one stops the
  waiting.
- A worker or server that dies is started again with back-off. One that dies again and again ends the run, and so does
  one that leaves with exit code 2, the operator's mistake; both are reported with what they printed last.
- Nothing is left running: every child is its own process group, and each group is swept at the end.
"""

import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from staleflow.clients.admin import Admin
from staleflow.configs.loading.load import addresses
from staleflow.configs.schema import Config
from staleflow.net.errors import Refused, Unavailable
from staleflow.net.security import OBSERVER_ROLES, check_keys, client_sockets
from staleflow.process.sanitize import printable
from staleflow.supervisor import model, roles
from staleflow.supervisor.children import Child
from staleflow.supervisor.drain import drain
from staleflow.supervisor.lifeline import Lifeline
from staleflow.supervisor.roles import Kind, Role
from staleflow.supervisor.stopping import Interrupted, StopSignals
from staleflow.supervisor.summary import Summary, ended, summarise, write
from staleflow.supervisor.view import Snapshot, Undisturbed, View
from staleflow.supervisor.watch import NewLines, StatusWatch

TICK_S = 0.2
VERSIONS_S = 2.0
"""Between two looks at what the parameter server keeps."""
START_S = 60.0
"""Until servers must answer."""
LAST_WORDS_S = 60.0
"""For the trainer, between the end of the run and its own."""
TAIL = 12
"""Lines of a failed process's output that are shown."""


class Failure(Exception):
    """The run cannot go on; the text says why, several lines with what the process printed."""

    def __init__(self, text: str, *, code: int = 1) -> None:
        super().__init__(text)
        self.code = code
        """Exit code of the run: 2 where only the operator can help, so that resuming as it is fails again."""


class Supervisor:
    """Owns every process of one run. ``run`` is called once, from the main thread."""

    def __init__(
        self, config: Config, run_dir: Path, view: View, resume: str, workers: Sequence[Role] | None = None
    ) -> None:
        """``workers``: instead of those of the configuration; whoever of them needs the model makes it where it is."""
        self._workers = roles.workers(config, run_dir) if workers is None else workers
        self._builds = workers is None
        self._config = config
        self._run_dir = run_dir
        self._view: View = Undisturbed(view)
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

    def run(self) -> int:
        """The whole run; returns the exit code."""
        where = addresses(self._config, self._run_dir)
        with (
            StopSignals() as self._stop,
            StatusWatch(where.scheduler, transport=self._sockets) as self._watch,
            StatusWatch(where.parameters, VERSIONS_S, transport=self._sockets) as self._versions,
        ):
            self._view.start()
            try:
                outcome, error = self._outcome()
                self._watch.ask_now()
                status = self._watch.newest
            finally:
                try:
                    self._drain()
                finally:
                    self._lifeline.close()
                    self._view.stop()
        summary = self._summary(outcome, error, status)
        return self._report(summary, outcome, error)

    def _outcome(self) -> tuple[str, str]:
        try:
            self._build_model()
            self._start_servers()
            self._start_workers()
            self._until_finished()
            self._last_words()
        except Interrupted:
            return "interrupted", ""
        except Failure as failure:
            self._failed_code = failure.code
            self._resume = self._resume if failure.code != 2 else ""  # resumed as it is, the run fails again
            return "failed", str(failure)
        status = self._watch.newest
        return ended(status), str(status.get("error") or "")

    # Starting ----------------------------------------------------------------------------------------------------

    def _build_model(self) -> None:
        if not self._builds:
            return
        if not model.missing(self._config, self._run_dir):
            model.ensure(self._config, self._run_dir)
            return
        self._phase = "building the model"
        builder = self._start(roles.model_builder(self._run_dir))
        while builder.alive:
            self._detail = builder.loading() or model.so_far(self._run_dir, "".join(builder.words()))
            self._wait()
        self._children.remove(builder)
        builder.sweep()
        self._detail = ""
        if builder.exit_code != 0:
            raise Failure(_last_words("model.build failed", builder), code=2 if builder.exit_code == 2 else 1)

    def _start_servers(self) -> None:
        self._phase = "starting servers"
        for role in roles.servers(self._config, self._run_dir, self._session):
            self._start(role)
        for address in addresses(self._config, self._run_dir).all:
            self._until_answers(address, time.monotonic() + START_S)

    def _until_answers(self, address: str, deadline: float) -> None:
        with Admin(address, "supervisor", transport=self._sockets) as admin:
            while True:
                try:
                    admin.status(timeout_s=TICK_S)
                    return
                except (Unavailable, Refused):
                    self._wait()
                if time.monotonic() > deadline:
                    raise Failure(f"the server at {address} did not answer within {START_S:g} s")

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
        while not self._watch.newest.get("finished"):
            self._wait()
            self._look_after(self._children)
            if self._watch.newest.get("drained"):
                self._phase = "draining"
            elif self._watch.newest.get("version", -1) >= 0:
                self._phase = "training"

    def _last_words(self) -> None:
        """The run is over; the trainer still writes what it must."""
        self._phase = "finishing"
        trainer = [child for child in self._children if child.role.kind is Kind.TRAINER]
        deadline = time.monotonic() + LAST_WORDS_S
        while any(child.alive for child in trainer) and time.monotonic() < deadline:
            self._wait()

    def _wait(self) -> None:
        """A moment; then shows how things are. ``Interrupted`` when somebody wants the run to end."""
        self._show()
        if self._stop.wait(TICK_S):
            raise Interrupted
        if self._phase in ("starting servers", "starting workers"):
            self._look_after(self._children)

    def _look_after(self, children: list[Child]) -> None:
        for child in children:
            if child.over:
                continue
            if child.restart_at is not None:
                if said := child.restart_if_due():
                    self._view.say(said)
            elif child.exit_code is not None:
                self._died(child)

    def _died(self, child: Child) -> None:
        code = child.exit_code
        child.sweep()
        if child.role.kind is not Kind.SCHEDULER:  # nobody would answer
            self._watch.ask_now()
        status = self._watch.newest
        drained = code == 0 and child.role.kind is Kind.WORKER and bool(status.get("drained"))
        if status.get("finished") or drained:  # a trainer that left without a report comes back and makes it
            child.over = True
            return
        if code == 2:
            raise Failure(_last_words(f"{child.name} refuses to start", child, lines=1), code=2)
        if child.unstarted:
            raise Failure(_last_words(f"{child.name} cannot be started again: {child.unstarted}", child))
        if not child.plan_restart():
            raise Failure(_last_words(f"{child.name} died again and again, last with {_code(code)}", child))
        if code != 0:
            self._view.say(f"{child.name} died with {_code(code)}; it is started again")

    # The end -----------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        self._phase = "draining"
        self._detail = ""
        drain(self._children, self._show, self._view.say, self._stop.second)

    def _show(self) -> None:
        status = self._watch.newest
        self._view.show(
            Snapshot(
                phase=self._phase,
                elapsed_s=time.monotonic() - self._began,
                processes=tuple(child.state(self._loading(child)) for child in self._children),
                status=status,
                status_age_s=self._watch.age_s,
                lines=self._lines.take(),
                detail=self._detail,
                parameters=self._versions.newest,
                unix_s=time.time(),
            )
        )

    def _loading(self, child: Child) -> str:
        """Of a worker that the scheduler does not know yet, and of a trainer that has not begun."""
        status = self._watch.newest
        if child.role.kind is Kind.TRAINER:
            waits = not status.get("trainer_term")
        else:
            waits = child.role.kind is Kind.WORKER and not any(
                worker.get("name") == child.name for worker in status.get("workers") or ()
            )
        return printable(child.loading()) if waits and child.alive else ""

    def _summary(self, outcome: str, error: str, status: Mapping[str, Any]) -> Summary:
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
        except OSError as full:  # what the run came to is said all the same
            self._view.say(f"summary.json could not be written: {full}")
        return summary

    def _report(self, summary: Summary, outcome: str, error: str) -> int:
        if error:
            self._view.say(f"the run failed: {error}")
        self._view.summary(summary)
        if outcome == "drained":
            at = f"step {summary.steps:,} of {summary.steps_wanted:,}"
            self._view.say(f"drained at {at}; resume with: {summary.resume}")
        elif summary.resume:
            self._view.say(f"resume with: {summary.resume}")
        if outcome == "interrupted":
            return 130
        return 0 if summary.good else self._failed_code


def _violations(trace: Path) -> int | None:
    from staleflow.trace.audit.report import audit

    return audit(trace).num_violations if trace.exists() else None


def _last_words(what: str, child: Child, lines: int = TAIL) -> str:
    said = child.words(lines)
    where = f"its output: logs/{child.name}.out"
    if lines == 1 and said:
        return f"{what}: {said[0]}"
    return "\n  ".join((f"{what}; {where}", *said))


def _code(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"
