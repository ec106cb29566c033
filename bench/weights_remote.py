"""Weights to readers on other hosts: whole, through relays, and as deltas, beside the raw limit of ZeroMQ itself.

    python -m bench.weights_remote                    256 MB, links between hosts of 100 MB/s
    python -m bench.weights_remote --mb 1024 --mb-per-s 400

All processes run on this machine over TCP and are configured as if on different hosts, so that no process maps a file
of another. The raw limit is one process that sends frames of 16 MB and one that receives and discards them. Rows with a
link have relays with a limited number of bytes a second, as between two sites: these rows show the cost of depth, since
the processor does not decide. The row through one relay has its own limit: the same frames through a process in
between. The output is medians of ``--rounds``, each of a version that no reader has yet.

The goal: whole versions at 0.65 of the raw limit or more. Exit 1 when that is missed.
"""

import asyncio
import importlib.util
import logging
import multiprocessing
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

import click
import numpy as np
import uvloop
import zmq
from numpy.typing import NDArray

from staleflow.clients.weights import Publisher, Puller, mapped, relays
from staleflow.configs.loading.load import addresses, config_sha, from_json
from staleflow.configs.schema import Config
from staleflow.net.client import Client
from staleflow.net.endpoint import Call, Endpoint
from staleflow.process.daemon import Stop
from staleflow.process.host import reuse_memory
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import Lineage, TrainerTerm, Version, WorkerId
from staleflow.protocols.wire.messages import (
    Attach,
    AttachReply,
    GetRetainedVersions,
    GetStatus,
    ParametersStatus,
    RegisterVersion,
    RegisterVersionReply,
    RetainedVersions,
    SchedulerStatus,
)
from staleflow.servers.parameters import main as root
from staleflow.servers.parameters import tree
from staleflow.servers.parameters.relay import main as relay_main
from staleflow.servers.parameters.relay import service as relay

Arrays = dict[str, NDArray[np.uint16]]

FRAME_BYTES = 16 << 20
TENSOR_BYTES = 16 << 20
SHARED_MEMORY = "/dev/shm"
GOAL = 0.65
FRESH = 3
"""Versions until the file of a deleted one is used again, as in a run of hundreds from then on."""
SPAWN = multiprocessing.get_context("spawn")


# The raw limit -------------------------------------------------------------------------------------------------------


def send_frames(port: int, frames: int) -> None:
    context = zmq.Context()
    sender = context.socket(zmq.PUSH)
    sender.set(zmq.SNDHWM, 8)
    sender.connect(f"tcp://127.0.0.1:{port}")
    data = bytes(FRAME_BYTES)
    for _ in range(frames):
        sender.send(data, copy=False)
    sender.close()
    context.term()


def forward_frames(port: int, bound: "Connection[int, None]", frames: int) -> None:
    reuse_memory()
    context = zmq.Context()
    receiver, sender = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    receiver.set(zmq.RCVHWM, 8)
    sender.set(zmq.SNDHWM, 8)
    bound.send(receiver.bind_to_random_port("tcp://127.0.0.1"))
    sender.connect(f"tcp://127.0.0.1:{port}")
    for _ in range(frames):
        sender.send(receiver.recv(copy=False), copy=False)
    for connection in (receiver, sender):
        connection.close()
    context.term()


def raw_limit(nbytes: int, *, hops: int = 0) -> float:
    """Bytes a second of frames of 16 MB, one way, through that many processes in between."""
    frames = max(8, nbytes // FRAME_BYTES)
    context = zmq.Context()
    receiver = context.socket(zmq.PULL)
    receiver.set(zmq.RCVHWM, 8)
    port = receiver.bind_to_random_port("tcp://127.0.0.1")
    between = list[BaseProcess]()
    for _ in range(hops):
        here, remote = SPAWN.Pipe()
        between.append(SPAWN.Process(target=forward_frames, args=(port, remote, frames + 2)))
        between[-1].start()
        port = here.recv()
    sender = SPAWN.Process(target=send_frames, args=(port, frames + 2))
    sender.start()
    for _ in range(2):
        receiver.recv(copy=False)
    began = time.perf_counter()
    for _ in range(frames):
        receiver.recv(copy=False)
    took = time.perf_counter() - began
    for process in (sender, *between):
        process.join()
    receiver.close()
    context.term()
    return frames * FRAME_BYTES / took


# A run with relays ---------------------------------------------------------------------------------------------------


def config_of(port: int, delta: str) -> Config:
    return from_json(
        b"""{"prompts": {"path": "p.jsonl"}, "reward": {"run": "staleflow.examples.quickstart.task:reward"},
        "rollout": {"engine": "simulated"}, "trainer": {"backend": "simulated"},
        "parameters": {"bind": "tcp://127.0.0.1:%d", "keep_versions": %d, "delta": "%s"}}"""
        % (port, FRESH - 1, delta.encode())
    )


def serve(place: str, port: int, delta: str) -> None:
    """The parameter server, and a stand-in for the scheduler that registers every version."""
    logging.disable(logging.INFO)
    reuse_memory()
    config, folder = config_of(port, delta), Path(place)

    def answer(call: Call) -> None:
        match call.body:
            case Attach():
                call.reply(attached(config, folder))
            case RegisterVersion() as ask:
                call.reply(RegisterVersionReply(lineage=ask.lineage, version=ask.version))
            case GetRetainedVersions():
                call.reply(RetainedVersions(versions=[]))
            case GetStatus():
                call.reply(SchedulerStatus(trainer_term=1))
            case _:
                call.refuse(Code.DENIED, "not here")

    async def serving() -> None:
        scheduler = Endpoint(addresses(config, folder).scheduler, on_call=answer)
        await asyncio.gather(scheduler.serve(), root.serve_until(Stop(), config, folder))

    chain = mock.patch.object(tree, "FANOUT", 1)
    far = mock.patch.object(tree, "ROOT_READERS", 0)  # the reader goes to the last relay only
    others = mock.patch.object(tree, "is_loopback", str.isspace)  # no address is loopback: any host reaches all
    with chain, far, others, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serving())


def attached(config: Config, folder: Path) -> AttachReply:
    return AttachReply(
        run="bench",
        config=b"",
        config_sha=config_sha(config),
        run_dir="",
        shards=[],
        parameters=addresses(config, folder).parameters,
        lineage=Lineage(0),
        version=Version(0),
        lease_ms=1000,
    )


def serve_relay(place: str, port: int, delta: str, number: int, mb_per_s: float) -> None:
    logging.disable(logging.INFO)
    reuse_memory()
    config, folder = config_of(port, delta), Path(place)
    scheduler = addresses(config, folder).scheduler
    present = mock.patch.object(relay, "boot_id", return_value=f"relay host {number}")
    with present, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(relay_main.serve_until(Stop(), config, folder, f"relay-{number}", scheduler, mb_per_s=mb_per_s))


class World:
    """A parameter server, a chain of relays below it, a publisher beside it and a reader elsewhere."""

    def __init__(self, num_relays: int, *, delta: str = "off", mb_per_s: float = 0.0) -> None:
        self._place = Path(tempfile.mkdtemp(prefix="sf-", dir=SHARED_MEMORY))
        (self._place / "sock").mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address = f"tcp://127.0.0.1:{port}"
        self._processes: list[BaseProcess] = []
        self._start(serve, str(self._place), port, delta)
        self._publisher = Publisher(self.address, worker=WorkerId("trainer.1"))
        self._reader = Puller(self.address, worker=WorkerId("reader.1"), deltas=delta != "off")
        self._asking = Client(self.address, worker=WorkerId("looking.1"))
        self._relays = [(serve_relay, str(self._place), port, delta, at, mb_per_s) for at in range(num_relays)]

    def _start(self, *call: object) -> None:
        process = SPAWN.Process(target=call[0], args=call[1:], daemon=True)  # type: ignore[arg-type]
        process.start()
        self._processes.append(process)

    async def grow(self) -> None:
        """Start the relays, each below the one before."""
        for number, call in enumerate(self._relays):
            self._start(*call)
            while await self._num_relays() <= number:  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    async def _num_relays(self) -> int:
        return len((await self._asking.ask(GetStatus(), ParametersStatus, timeout_s=None)).relays)

    async def publish(self, version: int, arrays: Arrays) -> None:
        await self._publisher.publish(
            arrays, trainer_term=TrainerTerm(1), lineage=Lineage(0), version=Version(version), batch=None
        )

    async def pull(self, version: int) -> float:
        """Seconds until the reader has every byte, verified."""
        began = time.perf_counter()
        with elsewhere():
            pulled = await self._reader.pull(Lineage(0), Version(version))
        took = time.perf_counter() - began
        assert not pulled.mapped
        await pulled.close()
        return took

    def close(self) -> None:
        for connection in (self._publisher, self._reader, self._asking):
            connection.close()
        for process in self._processes:
            process.kill()
            process.join()
        shutil.rmtree(self._place, ignore_errors=True)


@contextmanager
def elsewhere() -> Generator[None]:
    """Make this process act as on a host of its own."""
    mapping = mock.patch.object(mapped, "boot_id", return_value="reader host")
    asking = mock.patch.object(relays, "boot_id", return_value="reader host")
    with mapping, asking:
        yield


# Measuring -----------------------------------------------------------------------------------------------------------


def tensors(nbytes: int) -> Arrays:
    """bfloat16, as bits: weights of deviation 0.02."""
    random = np.random.default_rng(0)
    count = max(1, nbytes // TENSOR_BYTES)
    one = (random.standard_normal(TENSOR_BYTES // 2, np.float32) * np.float32(0.02)).view(np.uint32) >> 16
    return {f"layer{number}": np.roll(one, number).astype(np.uint16) for number in range(count)}


def moved(arrays: Arrays, step: int) -> Arrays:
    """Change each fiftieth element by one bit, as a step at 1e-6 does."""
    after = {name: array.copy() for name, array in arrays.items()}
    for array in after.values():
        array[step::50] += 1
    return after


async def measure(nbytes: int, rounds: int, num_relays: int, *, delta: str = "off", mb_per_s: float = 0.0) -> float:
    """Median seconds of a version; the first ones, of fresh memory and new connections, do not count."""
    world, arrays, result = World(num_relays, delta=delta, mb_per_s=mb_per_s), tensors(nbytes), list[float]()
    try:
        await world.grow()
        for version in range(FRESH + rounds):
            await world.publish(version, arrays)
            result.append(await world.pull(version))
            arrays = moved(arrays, version)
        return statistics.median(result[FRESH:])
    finally:
        world.close()


def train(address: str, nbytes: int, pipe: "Connection[None, int]") -> None:
    """A trainer that serves its newest version itself, and publishes on request."""

    async def publish(publisher: Publisher, version: int) -> None:
        await publisher.publish(
            tensors(nbytes), trainer_term=TrainerTerm(1), lineage=Lineage(0), version=Version(version), batch=None
        )

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        publisher = runner.run(_publisher(address))
        while (version := pipe.recv()) >= 0:
            runner.run(publish(publisher, version))
            pipe.send(None)
        publisher.close()


async def _publisher(address: str) -> Publisher:
    return Publisher(address, worker=WorkerId("trainer.2"), direct="tcp://127.0.0.1:*")


async def measure_direct(nbytes: int, rounds: int) -> float:
    """Like ``measure``, for versions that come from the trainer's own memory through gloo."""
    world, result = World(0), list[float]()
    here, remote = SPAWN.Pipe()
    trainer = SPAWN.Process(target=train, args=(world.address, nbytes, remote), daemon=True)
    trainer.start()
    reader = Puller(world.address, worker=WorkerId("reader.2"), direct=True)
    try:
        for version in range(FRESH + rounds):
            here.send(version)
            await asyncio.to_thread(here.recv)
            began = time.perf_counter()
            pulled = await reader.pull(Lineage(0), Version(version))
            result.append(time.perf_counter() - began)
            assert pulled.direct
            await pulled.close()
        here.send(-1)
        await asyncio.to_thread(trainer.join)
        return statistics.median(result[FRESH:])
    finally:
        reader.close()
        trainer.kill()
        world.close()


def direct_row(nbytes: int, rounds: int, raw: float) -> None:
    """Skip the measurement where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        return
    seconds = asyncio.run(measure_direct(nbytes, rounds))
    rate = nbytes / seconds
    click.echo(f"| whole, from the trainer itself (gloo) | {seconds:.2f} | {rate / 1e9:.2f} | {rate / raw:.2f} |")


@click.command(help=__doc__)
@click.option("--mb", default=256, show_default=True, type=click.IntRange(min=16))
@click.option("--mb-per-s", default=100.0, show_default=True, help="Of a link between hosts.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1))
def main(mb: int, mb_per_s: float, rounds: int) -> None:
    nbytes = mb << 20
    reuse_memory()
    raw = statistics.median(raw_limit(nbytes) for _ in range(rounds))
    load = os.getloadavg()[0]
    click.echo(f"{mb} MiB, load average {load:.1f}; ZeroMQ, frames of 16 MiB one way: {raw / 1e9:.2f} GB/s\n")
    click.echo("| | seconds | GB/s | of ZeroMQ |\n| --- | ---: | ---: | ---: |")

    def row(what: str, num_relays: int, *, delta: str = "off", mb_per_s: float = 0.0, limit: float = raw) -> float:
        seconds = asyncio.run(measure(nbytes, rounds, num_relays, delta=delta, mb_per_s=mb_per_s))
        rate = nbytes / seconds
        click.echo(f"| {what} | {seconds:.2f} | {rate / 1e9:.2f} | {rate / limit:.2f} |")
        return rate / limit

    share = row("whole, from the parameter server", 0)
    direct_row(nbytes, rounds, raw)
    through = statistics.median(raw_limit(nbytes, hops=1) for _ in range(rounds))
    row(f"whole, through one relay (ZeroMQ through one process: {through / 1e9:.2f} GB/s)", 1, limit=through)
    for depth in (1, 2, 3):
        row(f"whole, {depth} deep, links of {mb_per_s:.0f} MB/s", depth, mb_per_s=mb_per_s)
    row(f"as a delta, 1 deep, links of {mb_per_s:.0f} MB/s", 1, delta="compressed", mb_per_s=mb_per_s)
    sys.exit(0 if share >= GOAL else 1)


if __name__ == "__main__":
    main()
