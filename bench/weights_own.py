"""The product's own way for ``bench.weights``: the shipped parameter server in a process of its own, its real clients.

The scheduler is a stand-in that registers every version; the harness announces a version to the readers in its place.
"""

import asyncio
import logging
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop
from numpy.typing import NDArray

from staleflow.clients.weights import Publisher, Puller
from staleflow.clients.weights.pull import PulledVersion
from staleflow.configs.loading.load import addresses, from_json
from staleflow.configs.schema import Config, VersionStore
from staleflow.net.endpoint import Call, Endpoint
from staleflow.process import memory_folder
from staleflow.process.daemon import Stop
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import Lineage, TrainerTerm, Version, WorkerId
from staleflow.protocols.wire.messages import (
    Attach,
    AttachReply,
    GetRetainedVersions,
    GetStatus,
    RegisterVersion,
    RegisterVersionReply,
    RetainedVersions,
    SchedulerStatus,
)
from staleflow.servers.parameters.main import serve_until

CONFIG = b"""{
    "prompts": {"path": "p.jsonl"}, "reward": {"run": "staleflow.examples.quickstart.task:reward"},
    "rollout": {"engine": "simulated"}, "trainer": {"backend": "simulated"}, "parameters": {"store": "%s"}
}"""


def config_of(place: str, store: VersionStore = "auto") -> Config:
    """Return the configuration of the servers in this folder."""
    Path(place, "sock").mkdir(exist_ok=True)
    return from_json(CONFIG.replace(b"%s", store.encode()))


def _answer(call: Call) -> None:
    match call.body:
        case Attach():
            call.reply(
                AttachReply(
                    run="bench",
                    config=b"",
                    config_sha="",
                    run_dir="",
                    shards=[],
                    parameters="",
                    lineage=Lineage(0),
                    version=Version(0),
                    lease_ms=1000,
                )
            )
        case RegisterVersion() as ask:
            call.reply(RegisterVersionReply(lineage=ask.lineage, version=ask.version))
        case GetRetainedVersions():
            call.reply(RetainedVersions(versions=[]))
        case GetStatus():
            call.reply(SchedulerStatus(trainer_term=1))
        case _:
            call.refuse(Code.DENIED, "not here")


def _serve(place: str, store: VersionStore) -> None:
    """Scheduler and parameter server on one loop, until killed."""
    logging.disable(logging.INFO)
    config = config_of(place, store)

    async def serving() -> None:
        scheduler = Endpoint(addresses(config, Path(place)).scheduler, on_call=_answer)
        await asyncio.gather(scheduler.serve(), serve_until(Stop(), config, Path(place)))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serving())


class OwnPublisher:
    """Publishes version after version."""

    def __init__(self, place: str, store: VersionStore = "auto") -> None:
        address = addresses(config_of(place), Path(place)).parameters
        self._place = place
        self._server = multiprocessing.get_context("spawn").Process(target=_serve, args=(place, store), daemon=True)
        self._server.start()
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._publisher = self._runner.run(_made(lambda: Publisher(address, worker=WorkerId("trainer.1"))))
        self._version = 0

    def publish(self, arrays: dict[str, NDArray[Any]]) -> int:
        return self.publish_weights(arrays)

    def publish_weights(self, weights: Any) -> int:
        """Publish arrays, or weights of several ranks; return the version."""
        version, self._version = self._version, self._version + 1
        self._runner.run(
            self._publisher.publish(
                weights, trainer_term=TrainerTerm(1), lineage=Lineage(0), version=Version(version), batch=None
            )
        )
        return version

    def close(self) -> None:
        self._publisher.close()
        self._runner.close()
        self._server.kill()
        self._server.join()
        memory_folder.remove(Path(self._place, "parameters"))


class OwnReader:
    """Maps, verifies and lends a version."""

    def __init__(self, place: str, number: int, *, verified: bool = True) -> None:
        self._verified = verified
        address = addresses(config_of(place), Path(place)).parameters
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._puller = self._runner.run(_made(lambda: Puller(address, worker=WorkerId(f"reader.{number}"))))

    def reach(self, token: int) -> None:
        self._pulled: PulledVersion = self._runner.run(self._puller.reach(Lineage(0), Version(token)))

    def views(self) -> Iterator[tuple[str, NDArray[Any]]]:
        yield from self.verified().items()
        self.release()

    def verified(self) -> dict[str, NDArray[Any]]:
        """Return the arrays of the version, verified if this reader verifies."""
        if self._verified:
            self._runner.run(self._pulled.verify())
        return self._pulled.arrays()

    def release(self) -> None:
        self._runner.run(self._pulled.close())
        del self._pulled

    def close(self) -> None:
        self._puller.close()
        self._runner.close()


async def _made(make: Any) -> Any:
    return make()
