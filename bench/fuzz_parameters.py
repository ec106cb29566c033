"""The parameter server under malformed messages: the real service and folder, with a permissive scheduler."""

import asyncio
import shutil
from collections.abc import Hashable, Sequence
from pathlib import Path
from random import Random
from typing import cast

from bench.disk import bytes_of
from bench.fuzz_messages import Raw, Said
from bench.fuzz_target import UNREADABLE, Ears, Finding, must_be_unchanged, read, signature
from staleflow.net.client import Client
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import Lineage, TrainerTerm, Version, WorkerId
from staleflow.protocols.wire import messages
from staleflow.protocols.wire.manifest import digest, lay_out
from staleflow.protocols.wire.messages import Request
from staleflow.servers.parameters.service import ParameterService
from staleflow.servers.parameters.versions import Versions
from staleflow.servers.runner import Tasks

READER, TRAINER, RELAY = WorkerId("rollout-0"), WorkerId("trainer"), WorkerId("relay-0")
MAX_VERSIONS = 8
"""Number of versions after which the server restarts."""
MAX_BYTES = 1 << 20


class Registry:
    """Stands in for the client of a scheduler that registers nearly everything."""

    def __init__(self, random: Random) -> None:
        self._random = random

    async def ask(self, body: Request, *_: object, **__: object) -> object:
        match body:
            case messages.RegisterVersion():
                if self._random.random() < 0.1:
                    raise Refused(Code.STALE, "no such batch")
                return messages.RegisterVersionReply(lineage=body.lineage, version=body.version)
            case messages.GetRetainedVersions():
                return messages.RetainedVersions(versions=[])
            case messages.GetStatus():
                return messages.SchedulerStatus(trainer_term=1)
            case _:
                raise Finding(f"the parameter server asks {type(body).__name__}")


class ParameterTarget:
    """One parameter server, in a folder of its own."""

    def __init__(self, folder: Path, random: Random) -> None:
        self._folder, self._random = folder, random

    async def begin(self) -> None:
        """Start it on an empty folder, with two versions and an upload under way."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._versions = Versions(self._folder, durability="process")
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        self._service = ParameterService(
            self._versions,
            cast("Client", Registry(self._random)),
            Tasks(self._group),
            keep_versions=2,
            chunk_bytes=256,
            budget_bytes=MAX_BYTES // 2,  # otherwise a trainer may announce any size, up to the disk
        )
        self._service.run = "fuzz"
        self._ears = Ears(self._service.on_call)
        self._working = self._group.create_task(self._service.work())
        self._upload = 0
        self._newest = -1
        for _ in range(2):
            await self._publish()

    async def _publish(self) -> None:
        data, manifest = self._weights(self._newest + 1)
        self._say(Said(TRAINER, self._begin_publish(manifest)))
        await self._rest()
        self._say(Said(TRAINER, messages.PublishChunk(upload=self._upload, offset=0), [data]))
        self._say(Said(TRAINER, messages.CommitPublish(upload=self._upload, manifest=manifest)))
        await self._rest()
        self._newest += 1

    def _weights(self, version: int) -> tuple[bytes, messages.Manifest]:
        data = bytes([version % 256]) * 400
        return data, lay_out([("w", "float32", (100,), digest(data))])

    def _spans(self, data: bytes) -> messages.CommitPublish:
        """A commit of the same bytes by two ranks."""
        spans = [
            messages.WrittenSpan(offset=start, nbytes=200, digest=digest(data[start : start + 200]))
            for start in (0, 200)
        ]
        return messages.CommitPublish(
            upload=self._upload, manifest=lay_out([("w", "float32", (100,), "")]), spans=spans
        )

    def _odd(self) -> messages.Manifest:
        """A self-consistent manifest that announces no bytes, or more bytes than any disk has."""
        shapes = [(), (0,), (0, 2**62), (1,) * 70, (2**20, 2**20), (2**40,), (2**21, 2**21)]
        shape = self._random.choice(shapes)
        return lay_out([("w", self._random.choice(("float32", "bool")), shape, digest(b""))])

    def _begin_publish(self, manifest: messages.Manifest) -> messages.BeginPublish:
        version = Version(self._newest + 1)
        return messages.BeginPublish(
            trainer_term=TrainerTerm(1), lineage=Lineage(0), version=version, batch=None, nbytes=manifest.nbytes
        )

    def _say(self, said: Said) -> None:
        self._heard(said.peer, said.body, [bytes(frame) for frame in said.frames])

    def _heard(self, peer: str, body: Request, frames: Sequence[bytes]) -> messages.Reply | None:
        return self._ears.say(peer, body, frames, then=self._service.on_drained, late=self._late)

    def _late(self, reply: messages.Reply) -> None:
        if isinstance(reply, messages.BeginPublishReply):
            self._upload = reply.upload

    def seeds(self) -> Sequence[Said]:
        lineage, version = Lineage(0), Version(max(self._newest, 0))
        data, manifest = self._weights(self._newest + 1)
        return [
            Said(READER, messages.GetManifest(worker=READER, lineage=lineage, version=version)),
            Said(READER, messages.GetChunk(lineage=lineage, version=version, offset=0, nbytes=400)),
            Said(READER, self._delta(version)),
            Said(READER, messages.GetSources(worker=READER, host="h")),
            Said(RELAY, messages.JoinRelays(worker=RELAY, run="fuzz", endpoint="tcp://10.0.0.1:1", host="h")),
            Said(READER, messages.Unpin(worker=READER, lineage=lineage, version=version)),
            Said(TRAINER, self._begin_publish(manifest)),
            Said(TRAINER, messages.PublishChunk(upload=self._upload, offset=0), [data]),
            Said(TRAINER, messages.PublishChunk(upload=self._upload, offset=200), [data[:200]]),
            Said(TRAINER, messages.CommitPublish(upload=self._upload, manifest=manifest)),
            Said(TRAINER, self._spans(data)),
            Said(TRAINER, self._begin_publish(self._odd())),
            Said("x", messages.GetStatus()),
        ]

    def _delta(self, version: Version) -> messages.GetDelta:
        """A request for the changes since the previous version."""
        base, lineage = Version(max(version - 1, 0)), Lineage(0)
        return messages.GetDelta(
            lineage=lineage, version=version, base_lineage=lineage, base_version=base, offset=0, nbytes=400, width=4
        )

    def offer(self, raw: Raw) -> str:
        if (body := read(raw)) is None:
            return UNREADABLE
        before = self._state()
        received = self._heard(raw.peer, body, raw.frames)
        must_be_unchanged(body, received, before, self._state())
        return signature(body, received)

    def _state(self) -> Hashable:
        status = self._ears.say("state", messages.GetStatus(), then=self._service.on_drained)
        assert isinstance(status, messages.ParametersStatus)
        return repr(status)

    async def _rest(self) -> None:
        """Wait until no task of the service runs."""
        for _ in range(4):
            await asyncio.sleep(0)
        own = (asyncio.current_task(), self._working)
        while others := [task for task in asyncio.all_tasks() if task not in own]:
            await asyncio.wait(others)

    async def settle(self) -> None:
        """Finish all work under way, then check that every visible version is complete."""
        await self._rest()
        for stored in self._versions.stored.values():
            self._versions.verify(stored)
        if bytes_of(self._folder) > MAX_BYTES:
            raise Finding("small messages have taken much of the disk")
        if len(self._versions.stored) > MAX_VERSIONS or self._random.random() < 0.02:
            await self.close()
            await self.begin()

    async def close(self) -> None:
        """Check that no task has failed."""
        self._working.cancel()
        await self._group.__aexit__(None, None, None)
