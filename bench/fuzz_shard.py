"""A trajectory server under malformed messages: the real service and store, with a permissive scheduler."""

import asyncio
import shutil
from collections.abc import Hashable, Sequence
from pathlib import Path
from random import Random
from typing import cast

import msgspec
import numpy as np

from bench.fuzz_messages import Raw, Said
from bench.fuzz_target import UNREADABLE, Ears, Finding, must_be_unchanged, read, signature
from staleflow.configs.loading.prompt_rows import PromptRows
from staleflow.configs.schema import Config, Prompts, Reward, Rollout
from staleflow.configs.trainer import Trainer
from staleflow.net.client import Client
from staleflow.net.errors import Refused
from staleflow.process.host import boot_id
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId, LeaseId, WorkerId
from staleflow.protocols.wire import messages
from staleflow.protocols.wire.messages import Operations, Request, Result, Results
from staleflow.protocols.wire.tensors import specs_and_frames
from staleflow.protocols.wire.trajectory import GroupPayload
from staleflow.servers.runner import Tasks
from staleflow.servers.trajectories.main import make_service
from staleflow.servers.trajectories.prompts import LoadedPrompts
from staleflow.servers.trajectories.records import Key, parse_push
from staleflow.servers.trajectories.slabs import Slabs
from staleflow.servers.trajectories.store import TABLES, TrajectoryStore, unpack_verified
from staleflow.store.lmdb import Store

WORKER, STAGE, TRAINER = WorkerId("rollout-0"), WorkerId("reward-0"), WorkerId("trainer")
SAMPLES, TOKENS = 2, 5
MAP_BYTES = 64 << 20
MAX_HELD = 40
"""Number of payloads after which the shard restarts."""
REMEMBERED = 16


class Agreeable:
    """Stands in for the client of a scheduler that registers nearly everything."""

    def __init__(self, random: Random) -> None:
        self._random = random

    async def ask(self, body: Request, *_: object, **__: object) -> object:
        match body:
            case Operations():
                codes = (None, None, None, None, None, Code.STALE_LEASE, Code.STALE)
                return Results(results=[Result(code=self._random.choice(codes)) for _ in body.ops])
            case messages.GetRetained():
                return messages.Retained(keep=body.groups[: len(body.groups) // 2])
            case messages.GetExpected():
                groups = [GroupId(body.after + 1)] if body.after < 9 else []
                return messages.Expected(groups=groups, shas=["0" * 64] * len(groups))
            case messages.GetModelLimits(known=None):
                return messages.ModelLimits()
            case messages.GetModelLimits():
                raise Refused(Code.DENIED, "there is no other model")
            case messages.StageLoads():
                return messages.Done()
            case _:
                raise Finding(f"the shard asks {type(body).__name__}")


class ShardTarget:
    """One shard with one stage, in a folder of its own."""

    def __init__(self, folder: Path, random: Random) -> None:
        self._folder, self._random = folder, random
        rows = [msgspec.msgpack.encode({"prompt": f"{n} + 1", "answer": n}) for n in range(9)]
        self._prompts = LoadedPrompts(PromptRows(rows))
        self._last = 0
        self._pushed: dict[Key, str] = {}
        """Recently offered payloads, and the digest of each."""
        self._given: list[messages.StageItem] = []

    async def begin(self) -> None:
        """Start it on an empty store."""
        shutil.rmtree(self._folder, ignore_errors=True)
        store = Store(self._folder, tables=TABLES, map_bytes=MAP_BYTES, durability="process")
        slabs = Slabs(self._folder / "slabs", map_bytes=MAP_BYTES)
        self._store, self._close = TrajectoryStore(store, map_bytes=MAP_BYTES, slabs=slabs), store.close
        config = Config(
            prompts=Prompts(source="nobody:opens"),
            reward=Reward(run="nobody:calls"),
            rollout=Rollout(engine="simulated", group_size=SAMPLES),
            trainer=Trainer(backend="simulated", batch_size=2, steps=10),
        )
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        scheduler = cast("Client", Agreeable(self._random))
        self._tasks = Tasks(self._group)
        self._service = make_service(config, 0, self._store, self._prompts, scheduler, self._tasks)
        self._ears = Ears(self._service.on_call)
        self._working = self._group.create_task(self._service.work())
        self._pushed.clear()
        await self._turns()  # it receives the limits of the model
        self._say(self._push(*(self._fresh() for _ in range(6))))
        await self._turns()
        self._say(self._take())

    def _fresh(self) -> Key:
        self._last += 1
        return Key(GroupId(self._last % 50), LeaseId(self._last))

    def _say(self, said: Said) -> None:
        self._heard(said.peer, said.body, [bytes(frame) for frame in said.frames])

    def _heard(self, peer: str, body: Request, frames: Sequence[bytes]) -> messages.Reply | None:
        reply = self._ears.say(peer, body, frames, then=self._service.on_drained)
        if isinstance(reply, messages.StageWork):
            self._given = [*reply.items, *self._given][:4]
        return reply

    # --- valid messages ----------------------------------------------------------------------------------------------

    def seeds(self) -> Sequence[Said]:
        known = [*self._pushed][-4:] or [self._fresh()]
        fetch = messages.GetGroups(groups=[key.group for key in known], shas=[self._pushed[key] for key in known])
        return [
            *(self._push(self._fresh()) for _ in range(3)),
            self._push(*known[:2]),
            self._take(),
            self._partial(known[0]),
            Said(WORKER, messages.GetSlab(worker=WORKER, host=boot_id(), number=self._last, held=[])),
            self._push_placed(self._fresh()),
            Said(TRAINER, fetch),
            Said(TRAINER, msgspec.structs.replace(fetch, host=boot_id())),
            Said(WORKER, messages.GetRows(groups=[key.group for key in known])),
            Said(WORKER, messages.GetRows(groups=[known[0].group], partials=[known[0].lease])),
            Said("x", messages.GetStatus()),
            *(self._finish(Key(item.group, item.lease), item.ticket) for item in self._given),
        ]

    def _payload(self) -> tuple[list[messages.TensorSpec], list[memoryview]]:
        total = SAMPLES * TOKENS
        payload = GroupPayload(
            prompt_ids=np.arange(3, dtype=np.int32),
            lengths=np.full(SAMPLES, TOKENS, np.int32),
            token_ids=np.frombuffer(self._random.randbytes(total), np.uint8).astype(np.int32),
            logprobs=np.full(total, -0.5, np.float32),
            loss_mask=np.ones(total, np.uint8),
            segments=np.asarray([(sample, 0, 0, TOKENS) for sample in range(SAMPLES)], np.int64),
            finish=np.zeros(SAMPLES, np.uint8),
        )
        return specs_and_frames(payload.to_arrays())

    def _push(self, *keys: Key) -> Said:
        items: list[messages.PushItem] = []
        frames: list[memoryview] = []
        for group, lease in keys:
            specs, more = self._payload()
            frames += more
            item = messages.PushItem(group=group, lease=lease, worker=WORKER, truncated=False, frames=specs)
            self._pushed[Key(group, lease)] = parse_push(item, more, SAMPLES).record.sha
            items.append(item)
        while len(self._pushed) > REMEMBERED:
            del self._pushed[next(iter(self._pushed))]
        return Said(WORKER, messages.PushGroups(items=items), frames)

    def _push_placed(self, key: Key) -> Said:
        """A group at a position of a slab that contains no written group."""
        assert self._store.slabs is not None
        asked = messages.GetSlab(worker=WORKER, host=boot_id(), number=1 << 40, held=[])
        slab = self._store.slabs.give(asked, MAP_BYTES // 2)
        place = messages.Place(slab=slab.name, offset=self._random.randrange(64), nbytes=512)
        item = messages.PushItem(
            group=key.group, lease=key.lease, worker=WORKER, truncated=False, frames=[], place=place
        )
        return Said(WORKER, messages.PushGroups(items=[item]))

    def _partial(self, key: Key) -> Said:
        specs, frames = self._payload()
        partial = messages.PartialFrames(origin=key.lease, frames=specs)
        return Said(WORKER, messages.PutPartial(group=key.group, lease=key.lease, partial=partial), frames)

    def _take(self) -> Said:
        return Said(STAGE, messages.GetStageWork(stage="reward", worker=STAGE, max_groups=2, wait_ms=0))

    def _finish(self, key: Key, ticket: int) -> Said:
        specs, frames = specs_and_frames({"reward": np.asarray([0.0, 1.0], np.float32)})
        result = messages.StageResult(group=key.group, lease=key.lease, ticket=ticket, frames=specs)
        return Said(STAGE, messages.PutStageResults(stage="reward", worker=STAGE, results=[result]), frames)

    # --- messages ----------------------------------------------------------------------------------------------------

    def offer(self, raw: Raw) -> str:
        if (body := read(raw)) is None:
            return UNREADABLE
        before = self._state()
        received = self._heard(raw.peer, body, raw.frames)
        must_be_unchanged(body, received, before, self._state())
        return signature(body, received)

    def _state(self) -> Hashable:
        status = self._ears.say("state", messages.GetStatus(), then=self._service.on_drained)
        assert isinstance(status, messages.TrajectoriesStatus)
        return repr(msgspec.structs.replace(status, used_share=0.0))

    async def _turns(self) -> None:
        for _ in range(6):
            await asyncio.sleep(0)

    async def settle(self) -> None:
        """Finish all work under way, then check that every payload in the store is complete."""
        await self._turns()
        self._service.on_drained()
        stored = [*self._store.load()]
        for key, record, _ in stored:
            if record is None:
                raise Finding(f"the record of {key} is damaged")
            unpack_verified(key, record, self._store.payload(key, record))
        if len(stored) > MAX_HELD or self._working.done():
            await self.close()
            await self.begin()

    async def close(self) -> None:
        """Check that no task has failed."""
        self._service.drain()
        await self._tasks.drain()
        self._working.cancel()
        await self._group.__aexit__(None, None, None)
        self._close()
