"""The real service in this process, on a clock that only the test moves; the test sends every message of its peers.

``later`` answers are delivered as soon as the drain is over, so that a caller has its answer when ``ask`` returns.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from staleflow.configs.schema import Config
from staleflow.net.memory_transport import MemoryEndpoint
from staleflow.protocols.consistency.effects import Code, ReleaseWhy
from staleflow.protocols.consistency.ids import BatchId, LeaseId, Lineage, Segment, Step, TrainerTerm, Version, WorkerId
from staleflow.protocols.wire import messages
from staleflow.protocols.wire.messages import (
    Assign,
    Attach,
    Command,
    Commands,
    GetBatch,
    InstanceStats,
    Join,
    JoinReply,
    Op,
    Operations,
    Refusal,
    RegisterOccupy,
    RegisterPush,
    RegisterRelease,
    RegisterVersion,
    RegisterYield,
    Reply,
    Report,
    Request,
    Result,
    Results,
)
from staleflow.protocols.wire.messages.status import as_dict
from staleflow.servers.scheduler.ledger.interpreter import TABLES
from staleflow.servers.scheduler.main import open_service
from staleflow.store.memory import MemoryStore
from staleflow.trace.audit.report import AuditReport, audit
from tests.servers.scheduler.world import sha

TICK_MS = 50


class Hands:
    """A clock."""

    def __init__(self) -> None:
        self.ms = 1_000_000

    def now_ns(self) -> int:
        return self.ms * 1_000_000

    def now_ms(self) -> int:
        return self.ms

    def unix_ns(self) -> int:
        return self.now_ns()


class Table:
    """One run: the service, with a shard, a parameter server and a trainer that have joined; version 0 is published."""

    def __init__(self, run_dir: Path, config: Config, rows: int = 1000) -> None:
        run_dir.mkdir()
        self.run_dir, self.config = run_dir, config
        self.clock, self.store = Hands(), MemoryStore(TABLES)
        self.term = TrainerTerm(0)
        self.refused: list[Refusal] = []
        """Refusals sent to the trainer that waits for a batch."""
        self.batches: list[messages.Batch] = []
        self._open()
        self.attach("trajectories-0", "trajectories", endpoint="ipc:///none", rows=rows, prompts_sha="p")
        self.attach("parameters", "parameters", endpoint="ipc:///none")
        self.attach("trainer", "trainer")
        joined = self.ask("trainer", Join(trainer=WorkerId("trainer"), lineage=Lineage(0), version=Version(0)))
        assert isinstance(joined, JoinReply)
        self.term = joined.trainer_term
        self.publish(0)

    def _open(self, session: str = "") -> None:
        self.service, self.interpreter = open_service(
            self.config, self.run_dir, self.store, self.clock, session=session
        )
        self._answers: list[Callable[[], None]] = []
        self.endpoint = MemoryEndpoint(self.service.on_call, self._answers.append)

    def restart(self, session: str = "") -> None:
        """Kill and restart the scheduler; every attached peer is still connected, and its next message counts."""
        self.interpreter.trace.close()
        self._open(session)

    def close(self) -> AuditReport:
        """End the run; return the auditor's report."""
        self.service.close("test")
        self.interpreter.trace.close()
        report = audit(self.run_dir / "trace.jsonl")
        assert report.violations == []
        return report

    # --- messages ----------------------------------------------------------------------------------------------

    def call(self, worker: str, body: Request, on_reply: Callable[[Reply], None]) -> None:
        """Send a request, in a drain of its own."""
        self.endpoint.call(worker, body, on_reply)
        self.flush()

    def flush(self) -> None:
        self.service.flush()
        self.deliver()

    def deliver(self) -> None:
        """Deliver the answers that were given."""
        while self._answers:
            self._answers.pop(0)()

    def ask(self, worker: str, body: Request) -> Reply:
        """Send a request; return its answer, which must come at once."""
        found: list[Reply] = []
        self.call(worker, body, found.append)
        (reply,) = found
        return reply

    def attach(self, worker: str, role: str, **more: Any) -> None:
        attach = Attach(worker=WorkerId(worker), name=more.pop("name", worker), role=role, **more)
        reply = self.ask(worker, attach)
        assert isinstance(reply, messages.AttachReply), reply

    def after(self, ms: int) -> None:
        """Let time pass."""
        for _ in range(0, ms, TICK_MS):
            self.clock.ms += TICK_MS
            self.service.tick(self.endpoint.peers)
            self.deliver()

    def silent(self, worker: str) -> None:
        """Make a peer appear silent for longer than the three-second limit."""
        self.endpoint.leave(worker)
        self.service.on_gone(worker)
        self.flush()

    def status(self) -> dict[str, Any]:
        reply = self.ask("monitor", messages.GetStatus())
        assert isinstance(reply, messages.Status)
        return as_dict(reply)

    @property
    def why(self) -> str:
        return str(self.status()["why"])

    # --- the trainer -------------------------------------------------------------------------------------------

    def publish(self, version: int, batch: int | None = None) -> None:
        register = RegisterVersion(
            trainer_term=self.term,
            lineage=self.interpreter.machine.lineage,
            version=Version(version),
            batch=None if batch is None else BatchId(batch),
            sha=sha(version),
            nbytes=1,
        )
        reply = self.ask("trainer", register)
        assert isinstance(reply, messages.RegisterVersionReply), reply

    def train(self) -> None:
        """Consume the sealed batch."""
        step = Step(self.interpreter.machine.version)
        sealed = self.interpreter.machine.sealed_batch(step)
        assert sealed is not None
        self.publish(step + 1, sealed.batch)

    def roll_back(self, to: int) -> None:
        """Let the trainer join from an older checkpoint."""
        self.join("trainer", to)

    def join(self, trainer: str, version: int) -> None:
        """Let a trainer take over with the weights of a version."""
        join = Join(trainer=WorkerId(trainer), lineage=Lineage(0), version=Version(version))
        joined = self.ask(trainer, join)
        assert isinstance(joined, JoinReply), joined
        self.term = joined.trainer_term

    def wait_for_batch(self) -> None:
        """Let the trainer wait for the batch of the newest version's step."""
        ask = GetBatch(trainer_term=self.term, step=Step(self.interpreter.machine.version), wait_ms=60_000)

        def on_reply(reply: Reply) -> None:
            if isinstance(reply, Refusal):
                self.refused.append(reply)
            else:
                assert isinstance(reply, messages.Batch)
                self.batches.append(reply)

        self.call("trainer", ask, on_reply)

    # --- the shard ---------------------------------------------------------------------------------------------

    def operate(self, *ops: Op, by: str = "trajectories-0") -> list[Result]:
        reply = self.ask(by, Operations(ops=list(ops)))
        assert isinstance(reply, Results)
        return reply.results

    def push(self, assign: Assign, worker: str, segments: Sequence[tuple[int, int]] = ()) -> Code | None:
        """Register a push; segments of (version, tokens)."""
        written = [Segment(Lineage(0), Version(version), tokens) for version, tokens in segments]
        op = RegisterPush(
            group=assign.group,
            lease=assign.lease,
            worker=WorkerId(worker),
            shard=0,
            sha=sha(assign.lease),
            nbytes=1,
            truncated=False,
            segments=written or [Segment(assign.lineage, assign.version, 6)],
            samples=[3, 3],
            sequence_tokens=10,
        )
        return self.operate(op)[0].code

    def occupy(self, assign: Assign) -> None:
        op = RegisterOccupy(group=assign.group, lease=assign.lease)
        assert self.operate(op) == [Result()]

    def release(self, assign: Assign, why: ReleaseWhy, by: str, *, detail: str = "", hopeless: bool = False) -> None:
        op = RegisterRelease(group=assign.group, lease=assign.lease, why=why, detail=detail, hopeless=hopeless)
        assert self.operate(op, by=by) == [Result()]


class Seat:
    """A rollout instance at the table; it executes only ``Pull``, and records all other commands."""

    def __init__(self, table: Table, name: str, capacity: int = 4, **more: Any) -> None:
        self.table, self.name = table, name
        self.held: dict[LeaseId, Assign] = {}
        self.told: list[Command] = []
        """Commands other than assignments and pulls, in order."""
        self.loads = True
        """True if it executes orders to load weights."""
        self.ack = 0
        self.stats = InstanceStats(slots=2)
        self.evaluation = 0
        """Ticket that its reports name."""
        self.leaving = False
        table.attach(name, "rollout", capacity=capacity, **more)
        self.report()

    def report(self, **stats: Any) -> None:
        """Report its state until no more commands arrive."""
        self.stats = msgspec.structs.replace(self.stats, **stats)
        before = -1
        while before != self.ack:
            before = self.ack
            report = Report(
                worker=WorkerId(self.name),
                ack=self.ack,
                held=list(self.held),
                stats=self.stats,
                wait_ms=60_000,
                evaluation=self.evaluation,
                leaving=self.leaving,
            )
            self.table.call(self.name, report, self._hear)

    def _hear(self, reply: Reply) -> None:
        if not isinstance(reply, Commands):
            return
        for number, command in enumerate(reply.commands, reply.first):
            if number > self.ack:
                self.ack = number
                self._obey(command)

    def _obey(self, command: Command) -> None:
        match command:
            case Assign():
                self.held[command.lease] = command
            case messages.Pull() if self.loads:
                weights = {"lineage": command.lineage, "version": command.version}
                self.stats = msgspec.structs.replace(self.stats, **weights)
            case messages.Abort():
                self.held.pop(command.lease, None)
                self.told.append(command)
            case _:
                self.told.append(command)

    def holds(self) -> list[int]:
        """Return the groups that it works on."""
        return [int(assign.group) for assign in self.held.values()]

    def assign(self, group: int) -> Assign:
        return next(assign for assign in self.held.values() if assign.group == group)

    def finish(self, group: int) -> None:
        """Generate and reward a group, so that it is ready."""
        assign = self.assign(group)
        assert self.table.push(assign, self.name) is None
        self.table.occupy(assign)
        del self.held[assign.lease]

    def give_up(self, assign: Assign, version: int = 0, *, any_target: bool = False) -> Code | None:
        """Report that the shard has the tokens written so far; a group that moved is no longer held."""
        op = RegisterYield(
            group=assign.group,
            lease=assign.lease,
            lineage=Lineage(0),
            version=Version(version),
            sha="",
            any_target=any_target,
        )
        code = self.table.operate(op, by=self.name)[0].code
        if code is None:
            del self.held[assign.lease]
        return code
