"""A simulated rollout worker over the shipped connections: real reports, rows, pulls and pushes, no engine.

It also does what no worker should: it pushes again what is pushed, pushes other bytes under the same lease, and pushes
what it was told to abort. Nothing of that may ever have an effect.
"""

import asyncio
import random
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from staleflow.clients.attachment import attach
from staleflow.clients.parameters import CorruptWeights, Puller
from staleflow.clients.rollout.pushes import Pusher
from staleflow.protocols.consistency.effects import Code, ReleaseWhy
from staleflow.protocols.consistency.ids import LeaseId, Lineage, Version
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import (
    Abort,
    Assign,
    Attach,
    Command,
    Commands,
    Detach,
    Done,
    GetRows,
    InstanceStats,
    Interrupt,
    Operations,
    PartialFrames,
    Pull,
    Pulled,
    PushGroups,
    PushItem,
    PutPartial,
    RegisterRelease,
    RegisterYield,
    Report,
    Result,
    Results,
    Rows,
    Yield,
)
from staleflow.protocols.wire.partial_samples import partial_sha
from staleflow.protocols.wire.tensors import arrays, specs_and_frames
from staleflow.protocols.wire.trajectory import GroupPayload
from staleflow.runtime.client import Client, worker_id
from staleflow.runtime.errors import Refused, Unavailable
from staleflow.sim.faults.journal import Acknowledged, Heard, Journal, Key
from staleflow.sim.faults.payload import Segments, are_weights, group_payload, is_what_was_written, row_of, sha_of
from staleflow.sim.faults.plan import NEAR
from staleflow.sim.faults.scene import Scene
from staleflow.sim.faults.virtual import Process

REPORT_MS = 500
TOKEN_S = 0.005
ROGUE_SHARE = 0.04
PUT_S = 2.0


class Held:
    """A lease that it works on."""

    def __init__(self, assign: Assign) -> None:
        self.assign = assign
        self.task: asyncio.Task[None] | None = None
        self.nudged = asyncio.Event()
        """It is to end early, or to leave."""
        self.leaving = False
        self.cut = False


class RolloutWorker:
    """One process's worth of rollout."""

    def __init__(self, scene: Scene, process: Process, name: str, capacity: int) -> None:
        self._scene = scene
        self._journal: Journal = scene.journal
        self._rng = random.Random(scene.rng.getrandbits(64))
        self._name = name
        self._capacity = capacity
        self.me = worker_id(name)
        transport = scene.network.transport(process)
        self._transport = transport
        self._scheduler = Client(scene.where.scheduler, worker=self.me, transport=transport)
        self._shards = [Client(address, worker=self.me, transport=transport) for address in scene.where.trajectories]
        self._pushers = [Pusher(shard, self.me, self._settled) for shard in self._shards]
        self._puller = Puller(scene.where.parameters, worker=self.me, transport=transport)
        self._held: dict[LeaseId, Held] = {}
        self._shas: dict[LeaseId, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.loaded = (Lineage(0), Version(-1))
        self._wanted: tuple[Lineage, Version] | None = None
        self._changed = asyncio.Event()
        self._ack = 0
        self._generated = 0

    async def run(self) -> None:
        """Work until the run drains; an error ends it."""
        hello = Attach(worker=self.me, name=self._name, role="rollout", capacity=self._capacity, slot=self._name)
        await attach(self._scheduler, hello, parameters=True)
        for pusher in self._pushers:
            self._spawn(pusher.run())
        self._spawn(self._pulls())
        self._spawn(self._reports())
        await self._failed

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._failed.done():
            self._failed.set_exception(error)

    # --- reports ---------------------------------------------------------------------------------------------

    async def _reports(self) -> None:
        loop, heard = asyncio.get_running_loop(), self._journal.heard.setdefault(self.me, [])
        while True:
            report = Report(
                worker=self.me, ack=self._ack, held=list(self._held), stats=self._stats(), wait_ms=REPORT_MS
            )
            sent_s = loop.time()
            answer = await self._scheduler.ask(report, Commands, timeout_s=None)
            heard.append(Heard(sent_s, loop.time()))
            self._obey(answer)
            if answer.drain and not self._held:
                await self.leave()
                return

    async def leave(self) -> None:
        """Say goodbye: the scheduler releases what is still held."""
        with suppress(Unavailable):
            await self._scheduler.ask(Detach(worker=self.me, why="goodbye"), Done, timeout_s=PUT_S)
        if not self._failed.done():
            self._failed.set_result(None)

    def _stats(self) -> InstanceStats:
        lineage, version = self.loaded
        running = sum(held.task is not None for held in self._held.values())
        return InstanceStats(
            lineage=lineage,
            version=version,
            running=running * self._scene.samples,
            slots=self._capacity * self._scene.samples,
            tokens_per_s=running / TOKEN_S,
            generated_tokens=self._generated,
        )

    def _obey(self, commands: Commands) -> None:
        for number, command in enumerate(commands.commands, start=commands.first):
            if number > self._ack:
                self._ack = number
                self._command(command)

    def _command(self, command: Command) -> None:
        match command:
            case Assign():
                if command.lease not in self._held:
                    held = self._held[command.lease] = Held(command)
                    held.task = self._spawn(self._produce(held))
            case Pull():
                self._wanted = (command.lineage, command.version)
                self._change()
            case Interrupt() | Yield():
                if (found := self._held.get(command.lease)) is not None:
                    found.cut = found.cut or isinstance(command, Interrupt)
                    found.leaving = isinstance(command, Yield)
                    found.nudged.set()
            case Abort():
                self._abort(command.lease)

    def _abort(self, lease: LeaseId) -> None:
        held = self._held.pop(lease, None)
        if held is None or held.task is None:
            return
        if self._rng.random() < 0.8:
            held.task.cancel()
        else:
            self._scene.counts["pushed what was aborted"] += 1

    def _change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # --- weights ---------------------------------------------------------------------------------------------

    async def _pulls(self) -> None:
        while True:
            while self._wanted is None or self._wanted == self.loaded:
                await self._changed.wait()
            await self._pull(*self._wanted)

    async def _pull(self, lineage: Lineage, version: Version) -> None:
        sha, ok = "", False
        try:
            async with await self._puller.pull(lineage, version) as pulled:
                sha = pulled.sha
                data = b"".join(tensor.data for tensor in pulled.tensors().values())
                self._journal.looked["rollout: weights"] += 1
                where = "near" if self._scene.host_of(self._name) == NEAR else "far"
                self._scene.counts[f"weights, {where}: {pulled.way}"] += 1
                if not are_weights(self._scene.seed, data, lineage, version):
                    self._journal.wrong.append(f"{self.me} got weights that are not ({lineage}, {version})")
                await asyncio.sleep(0.02)
            ok, self.loaded = True, (lineage, version)
            self._journal.pulled.append((lineage, version, sha))
        except (Refused, ProtocolError, CorruptWeights) as error:
            self._scene.counts[f"pull failed: {type(error).__name__}"] += 1
            if self._wanted == (lineage, version):
                self._wanted = None
        self._change()
        message = Pulled(worker=self.me, lineage=lineage, version=version, sha=sha, ok=ok)
        try:
            await self._scheduler.ask(message, Done, timeout_s=None)
        except Refused:
            self._scene.counts["news of a pull refused"] += 1

    async def _reached(self, assign: Assign) -> bool:
        wanted = (assign.lineage, assign.version)
        while self.loaded < wanted:
            if self._wanted is None or self._wanted < wanted:
                return False
            await self._changed.wait()
        return True

    # --- groups ----------------------------------------------------------------------------------------------

    async def _produce(self, held: Held) -> None:
        assign = held.assign
        if not await self._row(assign) or not await self._reached(assign):
            await self._give_up(assign)
            return
        begun = self.loaded
        tokens = 1 + min(int(self._rng.lognormvariate(2.0, 1.0)), 120)
        left_s = tokens * TOKEN_S * (1 + self._rng.random())
        while True:
            segments = await self._generated_within(held, begun, tokens, left_s)
            if not held.leaving or held.cut:
                break
            if await self._hand_over(held, segments):
                self._held.pop(assign.lease, None)
                return
            held.leaving, left_s = False, left_s / 2
        group = group_payload(self._scene.seed, assign.group, assign.lease, segments, self._scene.samples)
        self._push(assign, group, segments)

    async def _generated_within(
        self, held: Held, begun: tuple[Lineage, Version], tokens: int, left_s: float
    ) -> Segments:
        """What is written by then, or when somebody nudges it."""
        try:
            async with asyncio.timeout(left_s):
                await held.nudged.wait()
            held.nudged.clear()
            tokens = max(1, tokens // 2)
        except TimeoutError:
            pass
        self._generated += tokens * self._scene.samples
        if self.loaded <= begun or tokens < 2:
            return ((*begun, tokens),)
        first = self._rng.randrange(1, tokens)
        return ((*begun, first), (*self.loaded, tokens - first))

    async def _row(self, assign: Assign) -> bool:
        """The group's prompt row, and whatever another worker wrote of it."""
        partials = [assign.partial] if assign.partial else []
        try:
            reply, frames = await self._shards[assign.shard].call(
                GetRows(groups=[assign.group], partials=partials), timeout_s=None
            )
        except Refused:
            return False
        assert isinstance(reply, Rows)
        wanted = row_of(assign.group % self._scene.rows)
        if reply.rows != [wanted]:
            self._journal.wrong.append(f"{self.me} got {reply.rows} for group {assign.group}")
        if reply.partials and (partial := reply.partials[0]) is not None:
            if partial_sha(partial, frames) != assign.partial_sha:
                self._journal.wrong.append(f"{self.me} got other samples of group {assign.group} than were left")
            payload = GroupPayload.from_arrays(arrays(partial.frames, frames))
            self._journal.looked["rollout: partials"] += 1
            if not is_what_was_written(self._scene.seed, assign.group, payload, self._scene.samples):
                self._journal.wrong.append(f"{self.me} got samples of group {assign.group} that nobody wrote")
        return True

    async def _hand_over(self, held: Held, segments: Segments) -> bool:
        """Give the group up as it stands; True when its lease is over."""
        assign, newest = held.assign, segments[-1]
        payload = group_payload(self._scene.seed, assign.group, assign.lease, segments, self._scene.samples)
        specs, frames = specs_and_frames(payload.to_arrays())
        partial = PartialFrames(origin=assign.lease, frames=specs)
        put = PutPartial(group=assign.group, lease=assign.lease, partial=partial)
        op = RegisterYield(
            group=assign.group,
            lease=assign.lease,
            lineage=newest[0],
            version=newest[1],
            sha=partial_sha(partial, frames),
        )
        try:
            await self._shards[assign.shard].ask(put, Done, frames, timeout_s=PUT_S)
            answer = await self._scheduler.ask(Operations(ops=[op]), Results, timeout_s=None)
        except (Refused, Unavailable):
            return False
        return answer.results[0].code in (None, Code.STALE_LEASE)

    async def _give_up(self, assign: Assign) -> None:
        op = RegisterRelease(group=assign.group, lease=assign.lease, why=ReleaseWhy.ABORTED, detail="not here")
        try:
            await self._scheduler.ask(Operations(ops=[op]), Results, timeout_s=None)
        except Refused:
            self._scene.counts["release refused"] += 1
        self._held.pop(assign.lease, None)

    # --- pushes ----------------------------------------------------------------------------------------------

    def _push(self, assign: Assign, group: GroupPayload, segments: Segments) -> None:
        sha = self._shas[assign.lease] = sha_of(group)
        self._journal.send(Key(assign.group, assign.lease), self.me, sha, asyncio.get_running_loop().time())
        self._pushers[assign.shard].put(assign, group)
        if self._rng.random() < ROGUE_SHARE:
            self._spawn(self._again(assign, group, segments))

    def _settled(self, assign: Assign, result: Result) -> None:
        self._held.pop(assign.lease, None)
        self._note(assign, self._shas.pop(assign.lease), result)

    def _note(self, assign: Assign, sha: str, result: Result) -> None:
        if result.code is None or result.code is Code.DUPLICATE:
            now_s = asyncio.get_running_loop().time()
            self._journal.acknowledged.append(Acknowledged(Key(assign.group, assign.lease), sha, now_s))
        else:
            self._journal.refused[result.code] += 1

    async def _again(self, assign: Assign, group: GroupPayload, segments: Segments) -> None:
        """Push the same once more, now or much later; sometimes with other bytes. Not in the last moments of a run:
        what comes then and is refused has not been deleted yet when the disks are looked at."""
        await asyncio.sleep(self._rng.choice((0.0, 0.05, 1.0, 3 * self._scene.lease_s)))
        if self._scene.finishing:
            return
        if self._rng.random() < 0.4:
            scene = self._scene
            group = group_payload(scene.seed, assign.group, assign.lease, segments, scene.samples, variant=1)
            self._scene.counts["pushed other bytes"] += 1
        else:
            self._scene.counts["pushed again"] += 1
        sha = sha_of(group)
        self._journal.send(Key(assign.group, assign.lease), self.me, sha, asyncio.get_running_loop().time())
        specs, frames = specs_and_frames(group.to_arrays())
        item = PushItem(group=assign.group, lease=assign.lease, worker=self.me, truncated=False, frames=specs)
        try:
            shard = self._shards[assign.shard]
            results = (await shard.ask(PushGroups(items=[item]), Results, frames, timeout_s=None)).results
        except Refused as no:
            results = [Result(code=no.code)]
        self._note(assign, sha, results[0])
