"""The witness: records every message between a shipped client and the servers in the journal.

It sits at the transport seam, so a shipped client does not know of it. A message is recorded before it leaves, and a
reply when it arrives. ``Rogue`` sits at the same seam and sends messages that no shipped client sends.
"""

import asyncio
import random
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from staleflow.net.client import Client
from staleflow.net.errors import Refused
from staleflow.net.limits import TransportLimits
from staleflow.net.transport import Link, OnMessage, Transport
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import Lineage, Step, TrainerTerm, Version, WorkerId
from staleflow.protocols.wire.codec import Data, ProtocolError, decode_reply, decode_request
from staleflow.protocols.wire.messages import (
    Abort,
    Assign,
    Batch,
    BeginPublish,
    BeginPublishReply,
    Commands,
    CommitPublish,
    Detach,
    Done,
    Finished,
    GetBatch,
    GetChunk,
    GetClaims,
    GetDelta,
    Join,
    JoinReply,
    Pulled,
    PushGroups,
    PushItem,
    Refusal,
    RegisterVersionReply,
    Reply,
    Report,
    Request,
    Result,
    Results,
)
from staleflow.protocols.wire.payload_digest import payload_digest
from staleflow.protocols.wire.tensors import arrays, specs_and_frames, unpack
from staleflow.protocols.wire.trajectory import GroupPayload
from staleflow.sim.faults.journal import Acknowledged, Committed, Key, Reported
from staleflow.sim.faults.payload import group_payload, is_written, other_bytes, sha_of
from staleflow.sim.faults.plan import MAX_NEW_TOKENS, NEAR
from staleflow.sim.faults.scene import Scene
from staleflow.sim.virtual import Process

T = TypeVar("T")

RESENT_SHARE: Final = 0.04
"""Share of pushes that are sent again."""
OTHER_SHARE: Final = 0.4
"""Share of those that have other bytes."""
ABORTED_SHARE: Final = 0.2
"""Share of aborted leases that are pushed nevertheless."""
ABORTED_TOKENS: Final = 3
POISON_SHARE: Final = 0.1
POISONED_TOKEN: Final = 1_000_000
"""Beyond every vocabulary."""
FALSE_SHARE: Final = 0.2
"""Share of reports of loaded versions that are accompanied by false ones."""
FUTURE: Final = Version(1_000_000)
"""A version that no run reaches."""
FUTURE_SHARE: Final = 0.2
"""Share of joins that are accompanied by a join from the future."""
OTHER_RANK_SHARE: Final = 0.2
"""Share of batches that another rank requests too."""
OTHER_TERM_SHARE: Final = 0.03
"""Share of publishes that are accompanied by one under a term that the scheduler never granted."""


class Witness:
    """The network as seen by one process. ``shipped``: its messages come from a shipped client."""

    def __init__(self, scene: Scene, process: Process, transport: Transport, *, shipped: bool = True) -> None:
        self.scene = scene
        self.process = process
        self.worker = WorkerId("")
        """Identity of the process, once it has connected."""
        self.shipped = shipped
        self.fetched = False
        """True if bytes of the current version arrived in messages."""
        self.uploads: dict[int, BeginPublish] = {}
        """Uploads by number. A commit may use another connection than the begin."""
        self._transport = transport
        self._rogue: Rogue | None = None

    @property
    def rogue(self) -> "Rogue":
        if self._rogue is None:
            self._rogue = Rogue(self)
        return self._rogue

    def aside(self) -> "Witness":
        """Return a witness of the same process for a client that misbehaves under the same identity."""
        return Witness(self.scene, self.process, self._transport, shipped=False)

    def bind(self, address: str, **_: object) -> tuple[Link, str]:
        raise NotImplementedError("clients bind nothing")

    def connect(self, address: str, route: bytes, *, limits: TransportLimits, on_message: OnMessage) -> Link:
        self.worker = self.worker or WorkerId(route.rpartition(b"/")[0].decode())
        line = Line(self, address, on_message)
        line.link = self._transport.connect(address, route, limits=limits, on_message=line.take)
        return line


@dataclass(frozen=True, slots=True)
class _Push:
    """A push without a reply yet."""

    keys: list[tuple[Key, str]]


@dataclass(frozen=True, slots=True)
class _Commit:
    """A complete version that waits to be registered."""

    begin: BeginPublish
    sha: str


class Line:
    """One connection of a client."""

    def __init__(self, witness: Witness, address: str, on_message: OnMessage) -> None:
        self.link: Link
        self._witness = witness
        self._scene = witness.scene
        self._address = address
        self._on_message = on_message
        self._waiting: dict[int, object] = {}
        """Facts about a request that are needed when its reply arrives, by request number."""

    def start(self) -> None:
        self.link.start()

    def close(self, linger_ms: int | None = None) -> None:
        self.link.close(linger_ms)

    def send(self, parts: Sequence[Data]) -> bool:
        id, body = decode_request(parts[0])
        if id not in self._waiting:
            self._record(id, body, parts[1:])
        return self.link.send(parts)

    def take(self, head: list[bytes], frames: list[memoryview], oversize: bool) -> None:
        id, reply = decode_reply(head[0])
        if id in self._waiting and not (isinstance(reply, Refusal) and reply.code is Code.BUSY):
            self._answered(self._waiting.pop(id), reply)
        self._on_message(head, frames, oversize)

    # --- requests ------------------------------------------------------------------------------------------------

    def _record(self, id: int, body: Request, frames: Sequence[Data]) -> None:
        journal, witness = self._scene.journal, self._witness
        match body:
            case Report():
                self._waiting[id] = self._scene.conductor.now_s
            case PushGroups() if body.items:
                self._waiting[id] = self._pushed(body.items, frames)
            case GetChunk() | GetDelta():
                witness.fetched = True
            case Pulled():
                self._waiting[id] = None
                if witness.shipped:
                    self._pulled(body)
                if witness.shipped and self._scene.false_reports:
                    witness.rogue.saw_pull(self._address, body)
            case GetBatch() | GetClaims() | Finished():
                self._waiting[id] = body
            case Join():
                self._waiting[id] = body
                if witness.shipped:
                    witness.rogue.saw_join(self._address)
            case BeginPublish():
                self._waiting[id] = body
                if witness.shipped:
                    witness.rogue.saw_publish(self._address, body)
            case CommitPublish() if (begin := witness.uploads.get(body.upload)) is not None:
                self._waiting[id] = _Commit(begin, body.manifest.sha)
                journal.published.setdefault((begin.lineage, begin.version), set()).add(body.manifest.sha)
            case Detach():
                self._waiting[id] = None
                self._scene.counts["a rollout worker left"] += body.worker in journal.reports
            case _:
                pass

    def _pushed(self, items: Sequence[PushItem], frames: Sequence[Data]) -> _Push:
        scene, start, keys = self._scene, 0, list[tuple[Key, str]]()
        for item in items:
            end = start + len(item.frames)
            key, place = Key(item.group, item.lease), item.place
            scene.counts[f"pushed in {'frames' if place is None else 'a slab'}"] += 1
            changed = place is not None and scene.flipped(key)
            data: bytes | memoryview = b""
            try:
                if place is not None:
                    data = scene.lent[place.slab][place.offset : place.offset + place.nbytes]
                    named = unpack(data)
                else:
                    named = arrays(item.frames, [memoryview(one).cast("B") for one in frames[start:end]])
                payload, start = GroupPayload.from_arrays(named), end
            except ProtocolError:
                if not changed:
                    raise
                keys.append((key, payload_digest((data,))))
                continue
            sha = sha_of(payload)
            scene.journal.send(key, item.worker, sha, scene.conductor.now_s, payload)
            keys.append((key, sha))
            if self._witness.shipped and not changed:
                self._check_pushed(key, payload)
                self._witness.rogue.saw_push(self._address, key, payload)
        return _Push(keys)

    def _check_pushed(self, key: Key, payload: GroupPayload) -> None:
        journal = self._scene.journal
        journal.checked["rollout: groups"] += 1
        origins = [lease for lease in reversed(journal.assigned.get(key.group, {})) if lease <= key.lease]
        if payload.num_samples != self._scene.samples or not is_written(
            self._scene.seed, key.group, origins, payload, self._scene.started
        ):
            journal.mismatches.append(f"{self._witness.worker} pushes bytes of group {key.group} that no engine wrote")

    def _pulled(self, pulled: Pulled) -> None:
        witness, scene = self._witness, self._scene
        if pulled.ok:
            where = "near" if scene.host_of(witness.process.name) == NEAR else "far"
            scene.counts[f"weights, {where}: {'over the network' if witness.fetched else 'mapped'}"] += 1
            scene.journal.pulled.append((pulled.lineage, pulled.version, pulled.sha))
        else:
            scene.counts["pull failed"] += 1
        witness.fetched = False

    # --- replies -------------------------------------------------------------------------------------------------

    def _answered(self, request: object, reply: Reply) -> None:
        match request, reply:
            case float(), Commands():
                reports = self._scene.journal.reports.setdefault(self._witness.worker, [])
                reports.append(Reported(request, self._scene.conductor.now_s))
                self._commanded(reply)
            case _Push(), Results():
                self._settled(request, reply.results)
            case _Push(), Refusal():
                self._settled(request, [Result(code=reply.code)] * len(request.keys))
            case GetBatch() | GetClaims(), Batch():
                self._sealed(request.trainer_term, reply)
            case BeginPublish(), BeginPublishReply():
                self._witness.uploads[reply.upload] = request
            case _Commit(), RegisterVersionReply():
                self._committed(request)
            case Join(), Refusal() if reply.code is Code.BAD_VERSION:
                self._scene.counts["a trainer came from a bad version"] += 1
            case Finished(), Done():
                self._scene.finished = True
                self._scene.on_finished()
                self._scene.journal.gave_up += [request.error] if request.error else []
            case None, Refusal():
                self._scene.counts[f"news refused: {reply.code}"] += 1
            case _:
                pass

    def _commanded(self, commands: Commands) -> None:
        for command in commands.commands:
            if isinstance(command, Assign):
                self._scene.journal.assigned.setdefault(command.group, {})[command.lease] = None
                self._witness.rogue.saw_assign(self._scene.where.trajectories[command.shard], command)
            elif isinstance(command, Abort):
                self._witness.rogue.saw_abort(command)

    def _sealed(self, term: TrainerTerm, batch: Batch) -> None:
        self._scene.journal.batches[batch.batch] = batch
        if self._witness.shipped:
            self._witness.rogue.saw_batch(self._address, term, batch)

    def _committed(self, commit: _Commit) -> None:
        journal, begin = self._scene.journal, commit.begin
        one = Committed(begin.trainer_term, begin.lineage, begin.version, commit.sha, begin.batch)
        if any((old.lineage, old.version) == (one.lineage, one.version) for old in reversed(journal.committed)):
            self._scene.counts["a damaged version was published again"] += 1
        journal.committed.append(one)

    def _settled(self, push: _Push, results: Sequence[Result]) -> None:
        journal = self._scene.journal
        for (key, sha), result in zip(push.keys, results, strict=True):
            if result.code is None or result.code is Code.DUPLICATE:
                journal.acknowledged.append(Acknowledged(key, sha, self._scene.conductor.now_s))
            elif result.code is not Code.BUSY:
                journal.refused[result.code] += 1
                if self._witness.shipped and result.code is Code.MALFORMED and not self._scene.flipped(key):
                    journal.mismatches.append(f"a shard read other bytes of group {key.group} than its worker pushed")


class Rogue:
    """Sends messages in the name of a client that the client itself never sends; none may have a second effect."""

    def __init__(self, witness: Witness) -> None:
        self._scene = witness.scene
        self._process = witness.process
        self._worker = witness.worker
        self._transport = witness.aside()
        self._rng = random.Random(witness.scene.rng.getrandbits(64))
        self._clients: dict[str, Client] = {}
        self._assigned: dict[int, tuple[str, Assign]] = {}

    # --- beside a rollout worker ---------------------------------------------------------------------------------

    def saw_assign(self, address: str, assign: Assign) -> None:
        self._assigned[assign.lease] = (address, assign)
        if self._scene.poison and self._rng.random() < POISON_SHARE:
            written = (assign.lineage, assign.version, 2 * MAX_NEW_TOKENS)
            payload = group_payload(self._scene.seed, assign.group, assign.lease, written, self._scene.samples)
            if self._rng.random() < 0.5:
                written = (assign.lineage, assign.version, ABORTED_TOKENS)
                payload = group_payload(self._scene.seed, assign.group, assign.lease, written, self._scene.samples)
                payload.token_ids[0] = POISONED_TOKEN
            key = Key(assign.group, assign.lease)
            self._scene.journal.poisoned.add((key, sha_of(payload)))
            self._spawn(self._push(address, key, payload, 0.0))

    def saw_push(self, address: str, key: Key, payload: GroupPayload) -> None:
        """Push the same payload again, now or much later, or other bytes under the same lease."""
        self._assigned.pop(key.lease, None)
        if self._rng.random() < RESENT_SHARE:
            delay_s = self._rng.choice((0.0, 0.05, 1.0, 3 * self._scene.lease_s))
            other = self._rng.random() < OTHER_SHARE
            self._scene.counts["pushed other bytes" if other else "pushed again"] += 1
            self._spawn(self._push(address, key, other_bytes(payload) if other else payload, delay_s))

    def saw_abort(self, abort: Abort) -> None:
        """Push the aborted lease."""
        address, assign = self._assigned.pop(abort.lease, ("", None))
        if assign is not None and self._rng.random() < ABORTED_SHARE:
            self._scene.counts["pushed what was aborted"] += 1
            written = (assign.lineage, assign.version, ABORTED_TOKENS)
            key = Key(assign.group, assign.lease)
            payload = group_payload(self._scene.seed, *key, written, self._scene.samples)
            self._spawn(self._push(address, key, payload, self._rng.random()))

    def saw_pull(self, scheduler: str, pulled: Pulled) -> None:
        """Report a version that is not published, and other bytes of this one."""
        if self._rng.random() < FALSE_SHARE:
            next_version = replace(pulled, version=Version(pulled.version + 1))
            for other in (next_version, replace(pulled, sha="0" * 64)):
                self._spawn(self._ask(scheduler, other, Done, what="a false report"))

    async def _push(self, address: str, key: Key, payload: GroupPayload, delay_s: float) -> None:
        """Push after a delay, but not in the last moments of a run: refused payload is not deleted before the disks are
        read."""
        await asyncio.sleep(delay_s)
        if not self._scene.finishing:
            specs, frames = specs_and_frames(payload.to_arrays())
            item = PushItem(group=key.group, lease=key.lease, worker=self._worker, truncated=False, frames=specs)
            await self._ask(address, PushGroups(items=[item]), Results, frames)

    # --- beside a trainer ----------------------------------------------------------------------------------------

    def saw_join(self, scheduler: str) -> None:
        """Join from a version that the run does not have."""
        if self._rng.random() < FUTURE_SHARE:
            join = Join(trainer=self._worker, lineage=Lineage(0), version=FUTURE)
            self._spawn(self._ask(scheduler, join, JoinReply))

    def saw_publish(self, parameters: str, begin: BeginPublish) -> None:
        """Publish under a term that the scheduler never granted; if it counted, no trainer could publish any more."""
        if self._rng.random() < OTHER_TERM_SHARE:
            term = TrainerTerm(begin.trainer_term + 2**40)
            other = BeginPublish(trainer_term=term, lineage=begin.lineage, version=Version(0), batch=None, nbytes=1)
            self._spawn(self._ask(parameters, other, BeginPublishReply, what="a term that nobody was given"))

    def saw_batch(self, scheduler: str, term: TrainerTerm, batch: Batch) -> None:
        """Request the same step as another rank, which must receive the same batch."""
        if self._rng.random() < OTHER_RANK_SHARE:
            self._spawn(self._other_rank(scheduler, GetBatch(trainer_term=term, step=Step(batch.step), rank=1), batch))

    async def _other_rank(self, scheduler: str, ask: GetBatch, batch: Batch) -> None:
        other = await self._ask(scheduler, ask, Batch)
        if other is not None and other.batch == batch.batch and other.digest != batch.digest:
            self._scene.journal.mismatches.append(f"two ranks got batch {batch.batch} with two digests")

    # --- calls ---------------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
        self._process.loop.create_task(work)

    async def _ask(
        self, address: str, body: Request, reply_type: type[T], frames: Sequence[Data] = (), *, what: str = "a rogue"
    ) -> T | None:
        client = self._clients.get(address)
        if client is None:
            client = self._clients[address] = Client(address, worker=self._worker, transport=self._transport)
        try:
            return await client.ask(body, reply_type, frames, timeout_s=None)
        except Refused as refusal:
            self._scene.counts[f"{what}: {refusal.code}"] += 1
            return None
