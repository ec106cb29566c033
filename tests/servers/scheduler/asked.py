"""A scheduler without sockets whose peers have keys; each request passes the role table, as at an endpoint."""

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from staleflow.net.endpoint import Call, Peer
from staleflow.net.permissions import Role, denial_reason
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import (
    BatchId,
    GroupId,
    LeaseId,
    Lineage,
    Segment,
    TrainerTerm,
    Version,
    WorkerId,
)
from staleflow.protocols.wire.codec import Data
from staleflow.protocols.wire.messages import (
    Attach,
    InstanceStats,
    Join,
    Op,
    Operations,
    Refusal,
    RegisterPush,
    RegisterVersion,
    Reply,
    Report,
    Request,
    Results,
)
from staleflow.servers.scheduler.main import open_service, open_store
from tests.servers.scheduler.world import config, sha


class _Answers:
    def __init__(self) -> None:
        self.got: list[Reply] = []

    def answer(self, peer: Peer, id: int, body: Reply, frames: Sequence[Data]) -> None:
        self.got.append(body)


class Asked:
    """The scheduler of one run directory; it can be stopped and started."""

    def __init__(self, run_dir: Path, **settings: Any) -> None:
        self.run_dir = run_dir
        self.config = config(**settings)
        self.last_id = 0
        self.start()

    def start(self, session: str = "") -> None:
        self.store = open_store(self.config, self.run_dir)
        self.service, self.interpreter = open_service(self.config, self.run_dir, self.store, session=session)
        self._peers: dict[str, Peer] = {}
        self._newest = _Answers()

    def stop(self) -> None:
        self.interpreter.trace.close()
        self.store.close()

    def ask(self, name: str, role: Role, body: Request, *, key: str = "", id: int = 0) -> Reply | None:
        """Return the reply, None while it waits. ``key``: name of the peer's key. ``id``: id of an earlier request."""
        if (why := denial_reason(role, name, body)) is not None:
            return Refusal(code=Code.DENIED, detail=why)
        self.last_id = self.last_id if id else self.last_id + 1
        holder = [role.encode(), (key or role).encode()]
        peer = self._peers.setdefault(name, Peer(f"{name}/connection".encode(), 0.0, holder))
        answers = self._newest = _Answers()
        self.service.on_call(Call(answers, peer, id or self.last_id, body, []))
        self.service.flush()
        return answers.got[0] if answers.got else None

    def waiting(self) -> Callable[[], Reply | None]:
        """Return a function that gives the reply to the newest request, None while it waits."""
        answers = self._newest
        return lambda: answers.got[0] if answers.got else None

    def attach(
        self, worker: str, name: str, role: str, key_role: Role, *, key: str = "", **fields: Any
    ) -> Reply | None:
        return self.ask(worker, key_role, Attach(worker=WorkerId(worker), name=name, role=role, **fields), key=key)

    def cast(self, *workers: str) -> None:
        """Attach every role, publish version 0, and lease at least one group to every worker."""
        self.attach("shard.1", "trajectories-0", "trajectories", Role.SERVER, endpoint="ipc:///s", rows=1000)
        self.attach("parameters.1", "parameters", "parameters", Role.SERVER, endpoint="ipc:///p")
        self.attach("trainer.1", "trainer", "trainer", Role.TRAINER)
        self.join("trainer.1")
        self.publish(0, None)
        for worker in workers:
            self.attach(worker, f"name-of-{worker}", "rollout", Role.ROLLOUT, key=f"key-of-{worker}", capacity=2)
        deadline = time.monotonic() + 100
        while not all(self.leases(worker) for worker in workers):
            assert time.monotonic() < deadline
            for worker in workers:
                self.report(worker)
            time.sleep(0.01)
            self.service.tick([])

    def join(self, trainer: str, version: int = 0, id: int = 0) -> Reply | None:
        body = Join(trainer=WorkerId(trainer), lineage=Lineage(0), version=Version(version))
        return self.ask(trainer, Role.TRAINER, body, id=id)

    def publish(self, version: int, batch: BatchId | None, lineage: int = 0) -> Reply | None:
        term = TrainerTerm(self.interpreter.machine.trainer_term)
        body = RegisterVersion(
            trainer_term=term,
            lineage=Lineage(lineage),
            version=Version(version),
            batch=batch,
            sha=sha(version),
            nbytes=1,
        )
        return self.ask("parameters.1", Role.SERVER, body)

    def leases(self, worker: str) -> tuple[tuple[GroupId, LeaseId], ...]:
        return self.interpreter.machine.leases_of(WorkerId(worker))

    def report(self, worker: str, held: Iterable[int] = ()) -> Reply | None:
        leases = [LeaseId(lease) for lease in held]
        stats = InstanceStats(version=Version(0))
        body = Report(worker=WorkerId(worker), ack=0, held=leases, stats=stats, wait_ms=0)
        return self.ask(worker, Role.ROLLOUT, body)

    def operate(self, peer: str, role: Role, *ops: Op) -> list[Code | None]:
        answer = self.ask(peer, role, Operations(ops=list(ops)))
        assert isinstance(answer, Results)
        return [result.code for result in answer.results]

    def push(self, group: GroupId, lease: LeaseId, worker: str) -> None:
        op = RegisterPush(
            group=group,
            lease=lease,
            worker=WorkerId(worker),
            shard=0,
            sha=sha(lease),
            nbytes=100,
            truncated=False,
            segments=[Segment(Lineage(0), Version(0), 6)],
            samples=[3, 3],
            sequence_tokens=10,
        )
        assert self.operate("shard.1", Role.SERVER, op) == [None]
