"""The peers of a rollout worker, on real sockets: each follows the test's script and records the calls it receives."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from staleflow.clients.weights import PulledVersion, Puller
from staleflow.net.client import Client
from staleflow.net.endpoint import Call, Endpoint
from staleflow.net.errors import Refused
from staleflow.net.limits import TransportLimits
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Version, WorkerId
from staleflow.protocols.wire.messages import (
    Assign,
    Command,
    Commands,
    Detach,
    Done,
    GetRows,
    Operations,
    PartialFrames,
    Pull,
    Pulled,
    PushGroups,
    PutPartial,
    RegisterRelease,
    RegisterYield,
    Report,
    Result,
    Results,
    Rows,
)
from staleflow.protocols.wire.partial_samples import partial_sha
from staleflow.protocols.wire.tensors import arrays
from staleflow.protocols.wire.trajectory import GroupPayload

ONCE = TransportLimits(retry_s=30.0, retry_cap_s=30.0)
"""For clients whose calls a test counts: a reply that a busy machine reads late does not cause a resend."""


@dataclass
class Scheduler:
    """Send the given commands immediately, and repeat them until the worker acknowledges them."""

    commands: list[Command] = field(default_factory=list[Command])
    reports: list[Report] = field(default_factory=list[Report])
    released: list[RegisterRelease] = field(default_factory=list[RegisterRelease])
    yielded: list[RegisterYield] = field(default_factory=list[RegisterYield])
    stays: Code | None = None
    """The refusal of every yield; None moves the group."""
    pulled: list[Pulled] = field(default_factory=list[Pulled])
    detached: list[str] = field(default_factory=list[str])
    drain: bool = False
    waiting: Call | None = None
    refuse: Code | None = None
    """The refusal of every report."""
    left: Callable[[int, int], tuple[PartialFrames, list[memoryview]] | None] = lambda group, lease: None
    """The partial group that a lease left at the shard."""

    def order(self, *commands: Command, drain: bool = False) -> None:
        self.commands += map(self._with_sha, commands)
        self.drain = drain
        if self.waiting is not None:
            self._answer(self.waiting)

    def _with_sha(self, command: Command) -> Command:
        """Give a lease that continues another lease the digest of that lease's partial group."""
        if not isinstance(command, Assign) or not command.partial or command.partial_sha:
            return command
        left = self.left(command.group, command.partial)
        return command if left is None else msgspec.structs.replace(command, partial_sha=partial_sha(*left))

    def hear(self, call: Call) -> None:
        match call.body:
            case Report() if self.refuse is not None:
                call.refuse(self.refuse, "said the test")
            case Report():
                self.reports.append(call.body)
                if self.waiting is not None and not self.waiting.done:
                    self.waiting.reply(Commands(first=1, commands=[], version=Version(0)))
                self.waiting = call
                if len(self.commands) > call.body.ack or not call.body.wait_ms:
                    self._answer(call)
                else:
                    asyncio.get_running_loop().call_later(0.05, self._answer, call)
            case Operations():
                self.released += [op for op in call.body.ops if isinstance(op, RegisterRelease)]
                yielded = [op for op in call.body.ops if isinstance(op, RegisterYield)]
                self.yielded += yielded
                code = self.stays if yielded else None
                call.reply(Results(results=[Result(code=code, detail="said the test")] * len(call.body.ops)))
            case Pulled():
                self.pulled.append(call.body)
                call.reply(Done())
            case Detach():
                self.detached.append(call.body.why)
                call.reply(Done())
            case _:
                call.refuse(Code.DENIED, "not in this play")

    @property
    def held(self) -> list[int]:
        return list(self.reports[-1].held)

    def _answer(self, call: Call) -> None:
        """Send the commands from the last acknowledged one; a worker skips those it has received."""
        assert isinstance(call.body, Report)
        if not call.done:
            self.waiting = None
            first = max(1, call.body.ack)  # repeat the last command, as after a lost reply
            call.reply(Commands(first=first, commands=self.commands[first - 1 :], version=Version(0), drain=self.drain))
        self.waiting = None


@dataclass
class Shard:
    """Serve the given rows and store pushed groups."""

    rows: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    payloads: dict[int, GroupPayload] = field(default_factory=dict[int, GroupPayload])
    truncated: dict[int, bool] = field(default_factory=dict[int, bool])
    codes: dict[int, list[Code]] = field(default_factory=dict[int, list[Code]])
    """Pending refusals by group."""
    partials: dict[tuple[int, int], tuple[PartialFrames, list[memoryview]]] = field(
        default_factory=dict[tuple[int, int], tuple[PartialFrames, list[memoryview]]]
    )
    """Partial groups by group and lease."""
    no_partials: Code | None = None
    """The refusal of partial groups."""
    refused: int = 0
    """Number of refused partial groups."""
    asked: list[GetRows] = field(default_factory=list[GetRows])
    hold: bool = False
    """Leave pushes unanswered."""
    pushes: list[Call] = field(default_factory=list[Call])
    offered: list[int] = field(default_factory=list[int])
    """Groups pushed, in order, including refused ones."""

    def hear(self, call: Call) -> None:
        match call.body:
            case GetRows():
                self._rows(call, call.body)
            case PutPartial() as put if self.no_partials is None:
                self.partials[put.group, put.lease] = put.partial, call.frames
                call.reply(Done())
            case PutPartial():
                self.refused += 1
                call.refuse(self.no_partials or Code.BUSY, "said the test")
            case PushGroups():
                self.pushes.append(call)
                if not self.hold:
                    self.answer(call)
            case _:
                call.refuse(Code.DENIED, "not in this play")

    def _rows(self, call: Call, asked: GetRows) -> None:
        self.asked.append(asked)
        found = [self.partials.get(key) for key in zip(asked.groups, asked.partials, strict=bool(asked.partials))]
        call.reply(
            Rows(
                rows=[self.rows.get(group, {"prompt": f"{group}="}) for group in asked.groups],
                partials=[None if one is None else one[0] for one in found],
            ),
            [frame for one in found if one is not None for frame in one[1]],
        )

    def partial(self, group: int, lease: int) -> tuple[PartialFrames, GroupPayload]:
        """Return the partial group of that lease."""
        header, frames = self.partials[group, lease]
        return header, GroupPayload.from_arrays(arrays(header.frames, frames))

    def answer(self, call: Call) -> None:
        assert isinstance(call.body, PushGroups)
        results: list[Result] = []
        frames = list(call.frames)
        for item in call.body.items:
            self.offered.append(item.group)
            mine, frames = frames[: len(item.frames)], frames[len(item.frames) :]
            if codes := self.codes.get(item.group):
                results.append(Result(code=codes.pop(0), detail="said the test"))
                continue
            named = {name: np.array(array) for name, array in arrays(item.frames, mine).items()}
            self.payloads[item.group] = GroupPayload.from_arrays(named)
            self.truncated[item.group] = item.truncated
            results.append(Result())
        call.reply(Results(results=results))


class Weights(Puller):
    """Versions without a server; the version named by ``refused`` does not exist."""

    refused = Version(-1)

    def __init__(self) -> None:
        self.given: list[Version] = []

    async def pull(self, lineage: Lineage, version: Version) -> PulledVersion:
        if version == self.refused:
            raise Refused(Code.BAD_VERSION, "no such version")
        self.given.append(version)
        return Empty()

    def close(self) -> None:
        pass


class Empty(PulledVersion):
    sha = "0" * 64
    mapped = True

    def __init__(self) -> None:
        pass

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {}

    async def close(self) -> None:
        pass


ME = WorkerId("rollout-0.test")


@dataclass
class Stage:
    """Both peers, and the clients connected to them."""

    folder: Path
    limits: TransportLimits = ONCE
    me: WorkerId = ME
    scheduler: Scheduler = field(default_factory=Scheduler)
    shard: Shard = field(default_factory=Shard)
    weights: Weights = field(default_factory=Weights)

    def __post_init__(self) -> None:
        self.endpoints = [
            Endpoint(f"ipc://{self.folder}/scheduler", on_call=self.scheduler.hear),
            Endpoint(f"ipc://{self.folder}/shard", on_call=self.shard.hear),
        ]
        self.scheduler.left = lambda group, lease: self.shard.partials.get((group, lease))
        self.clients = [Client(endpoint.address, worker=self.me, limits=self.limits) for endpoint in self.endpoints]

    def open_scheduler(self) -> None:
        """Reopen the scheduler at the same address after it was closed."""
        self.scheduler.waiting = None
        self.endpoints[0] = Endpoint(self.endpoints[0].address, on_call=self.scheduler.hear)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for endpoint in self.endpoints:
            endpoint.close()


def assign(group: int, lease: int = 0, version: int = 0, partial: int = 0) -> Assign:
    return Assign(
        group=GroupId(group),
        lease=LeaseId(lease or group),
        lineage=Lineage(0),
        version=Version(version),
        shard=0,
        partial=LeaseId(partial),
    )


def pull(version: int) -> Pull:
    return Pull(lineage=Lineage(0), version=Version(version))
