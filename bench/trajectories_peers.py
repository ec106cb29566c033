# pyright: basic, reportMissingImports=false
"""Peers of ``bench.trajectories``, each between two producers and one consumer in processes of their own.

    python -m bench.trajectories_peers NAME --seconds 5        one JSON line

The module imports no part of the product: it runs in any environment that has psutil and the peer. Every peer carries
the same bytes, 16 trajectories a put, and is bounded the same way: the consumer returns a permit for each put it has
taken.
"""

import argparse
import multiprocessing
import os
import queue
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any, Protocol

from bench.trajectories_measure import IN_FLIGHT, PRODUCERS, PUT, TAKE, TRAJECTORY_BYTES, Row, watch

_Context = multiprocessing.get_context("spawn")


class Connection(Protocol):
    """One process's end of a peer."""

    def put(self, trajectories: list[bytes]) -> None:
        """Put one batch of trajectories."""
        ...

    def take(self, count: int) -> list[bytes]:
        """Return at least one trajectory, about ``count`` if they have arrived."""
        ...


class Queue:
    """``multiprocessing.Queue``: one pickled list of 16 a put, or one trajectory after the other."""

    def __init__(self, *, together: bool) -> None:
        self._queue: Any = _Context.Queue()
        self._together = together

    def connect(self) -> "Queue":
        return self

    def put(self, trajectories: list[bytes]) -> None:
        for one in [trajectories] if self._together else trajectories:
            self._queue.put(one)

    def take(self, count: int) -> list[bytes]:
        result = self._next(block=True)
        while len(result) < count:
            try:
                result += self._next(block=count == PUT)
            except queue.Empty:
                break
        return result

    def _next(self, *, block: bool) -> list[bytes]:
        got = self._queue.get(block)
        return got if self._together else [got]

    def close(self) -> None:
        """Ends with its processes."""


class Redis:
    """A list of a Redis server without persistence; the client has hiredis."""

    def __init__(self, *, unix: bool) -> None:
        import hiredis  # a failed import must not leave a running server behind
        import redis

        assert hiredis
        assert redis
        self._folder = tempfile.mkdtemp(prefix="redis-")
        self._address = f"{self._folder}/socket" if unix else ""
        where = ["--port", "0", "--unixsocket", self._address] if unix else ["--port", "16379", "--bind", "127.0.0.1"]
        command = ["redis-server", *where, "--save", "", "--appendonly", "no", "--dir", self._folder]
        self._server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self._client: Any = None
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                self._opened().ping()
                break
            except Exception:
                time.sleep(0.05)

    def _opened(self) -> Any:
        import redis

        return redis.Redis(unix_socket_path=self._address) if self._address else redis.Redis(port=16379)

    def __getstate__(self) -> str:
        return self._address

    def __setstate__(self, address: str) -> None:
        self._address = address
        self._client = None

    def connect(self) -> "Redis":
        self._client = self._opened()
        return self

    def put(self, trajectories: list[bytes]) -> None:
        self._client.rpush("trajectories", *trajectories)

    def take(self, count: int) -> list[bytes]:
        _, result = self._client.blmpop(60, 1, "trajectories", direction="LEFT", count=count)
        return list(result)

    def close(self) -> None:
        self._server.terminate()
        self._server.wait(10)


class RayQueue:
    """``ray.util.queue``: lists in an actor, or references to objects stored with ``ray.put``."""

    def __init__(self, *, refs: bool) -> None:
        import ray
        from ray.util.queue import Queue as Remote

        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 30)
        self._refs = refs
        self._queue: Any = Remote()
        self._name = ray.get_runtime_context().gcs_address
        self._local = True

    def __getstate__(self) -> tuple[str, bool, Any]:
        import ray.cloudpickle

        return self._name, self._refs, ray.cloudpickle.dumps(self._queue)

    def __setstate__(self, state: tuple[str, bool, Any]) -> None:
        self._name, self._refs, self._pickled = state

    def connect(self) -> "RayQueue":
        import ray
        import ray.cloudpickle

        ray.init(address=self._name, log_to_driver=False, namespace="bench")
        self._queue = ray.cloudpickle.loads(self._pickled)
        return self

    def put(self, trajectories: list[bytes]) -> None:
        import ray

        self._queue.put([ray.put(trajectories)] if self._refs else trajectories)

    def take(self, count: int) -> list[bytes]:
        import ray

        puts = [self._queue.get()]
        if count > PUT and (more := self._queue.size()):
            puts += self._queue.get_nowait_batch(min(more, count // PUT - 1))
        if self._refs:
            puts = ray.get([ref for refs in puts for ref in refs])
        return [trajectory for put in puts for trajectory in put]

    def close(self) -> None:
        import ray

        ray.shutdown()


class TransferQueue:
    """``TransferQueue`` with its storage in memory: rows of one field, ``together`` rows a put, each taken once.

    It is polled: a controller that waits for rows sleeps five seconds, and accepts no put in that time.
    """

    def __init__(self, *, together: int) -> None:
        import ray
        import transfer_queue

        ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 30)
        transfer_queue.init({"controller": {"polling_mode": True}})
        self._together = together
        self._address = ray.get_runtime_context().gcs_address
        self._kept: list[bytes] = []

    def __getstate__(self) -> tuple[str, int]:
        return self._address, self._together

    def __setstate__(self, state: tuple[str, int]) -> None:
        self._address, self._together = state
        self._kept = []

    def connect(self) -> "TransferQueue":
        import ray
        import transfer_queue

        ray.init(address=self._address, log_to_driver=False)
        transfer_queue.init()
        self._client: Any = transfer_queue.get_client()
        return self

    def put(self, trajectories: list[bytes]) -> None:
        import torch
        from tensordict import TensorDict

        self._kept += trajectories
        while len(self._kept) >= self._together:
            rows, self._kept = self._kept[: self._together], self._kept[self._together :]
            data = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).reshape(len(rows), -1)
            self._client.put(TensorDict({"trajectory": data}, batch_size=len(rows)), partition_id="train")

    def take(self, count: int) -> list[bytes]:
        while not (result := self._client.get_meta(["trajectory"], count, "train", task_name="train")).size:
            time.sleep(0.001)
        rows = self._client.get_data(result)["trajectory"]
        self._client.clear_samples(result)
        return [row.numpy().data for row in rows]

    def close(self) -> None:
        import ray
        import transfer_queue

        transfer_queue.close()
        ray.shutdown()


class Reverb:
    """A FIFO table of a Reverb server, each item one trajectory, sampled once."""

    def __init__(self) -> None:
        import reverb

        first, oldest = reverb.selectors.Fifo(), reverb.selectors.Fifo()
        table = reverb.Table("trajectories", first, oldest, 4 * IN_FLIGHT, reverb.rate_limiters.MinSize(1), 1)
        self._server = reverb.Server([table])
        self._address = f"localhost:{self._server.port}"

    def __getstate__(self) -> str:
        return self._address

    def __setstate__(self, address: str) -> None:
        self._address = address

    def connect(self) -> "Reverb":
        import reverb

        self._client: Any = reverb.Client(self._address)
        self._writer: Any = self._client.trajectory_writer(num_keep_alive_refs=PUT)
        return self

    def put(self, trajectories: list[bytes]) -> None:
        import numpy as np

        for one in trajectories:
            self._writer.append([np.frombuffer(one, np.uint8)])
            self._writer.create_item("trajectories", 1.0, [self._writer.history[0][-1]])
        self._writer.flush()

    def take(self, count: int) -> list[bytes]:
        result = self._client.sample("trajectories", num_samples=count, emit_timesteps=False)
        return [sample.data[0].data for sample in result]

    def close(self) -> None:
        self._server.stop()


GATHERED = "TransferQueue, 256 a put"
"""It waits for more than one put, so the latency of a single put is undefined."""

PEERS: dict[str, Callable[[], Any]] = {
    "multiprocessing queue, one a put": lambda: Queue(together=False),
    "multiprocessing queue, 16 a put": lambda: Queue(together=True),
    "Redis list, unix": lambda: Redis(unix=True),
    "Redis list, tcp": lambda: Redis(unix=False),
    "Ray queue": lambda: RayQueue(refs=False),
    "Ray queue of references": lambda: RayQueue(refs=True),
    "TransferQueue, 16 a put": lambda: TransferQueue(together=16),
    GATHERED: lambda: TransferQueue(together=256),
    "TransferQueue, one a put": lambda: TransferQueue(together=1),
    "Reverb": Reverb,
}


def produce(peer: Any, permits: Any, seed: int) -> None:
    """Put 16 at a time, each as fresh bytes that begin with the time, as long as permits remain."""
    connection: Connection = peer.connect()
    body = bytes(os.urandom(TRAJECTORY_BYTES - 8))
    while True:
        permits.acquire()
        now = time.monotonic_ns().to_bytes(8, "little")
        connection.put([now + body for _ in range(PUT)])


def consume(peer: Any, permits: Any, count: int, taken: Any, p50_s: Any) -> None:
    """Take endlessly; ``p50_s``: from before a put to here."""
    connection: Connection = peer.connect()
    seconds: list[float] = []
    due = 0
    while True:
        result = connection.take(count)
        if count == PUT:
            seconds.append((time.monotonic_ns() - int.from_bytes(result[0][:8], "little")) / 1e9)
            p50_s.value = sorted(seconds)[len(seconds) // 2]
        taken.value += len(result)
        due += len(result)
        while due >= PUT:
            due -= PUT
            permits.release()


def _watched(name: str, *, producers: int, count: int, permits: int, warm_up_s: float, seconds: float) -> Row:
    row = Row(what=name)
    peer = PEERS[name]()
    taken, p50_s, free = _Context.Value("q", 0), _Context.Value("d", 0.0), _Context.Semaphore(permits)
    workers = [_Context.Process(target=produce, args=(peer, free, number)) for number in range(producers)]
    workers.append(_Context.Process(target=consume, args=(peer, free, count, taken, p50_s)))
    for worker in workers:
        worker.start()
    try:
        watch(row, lambda: int(taken.value), warm_up_s=warm_up_s, seconds=seconds)
        row.p50_ms = 1000 * p50_s.value if count == PUT else -1.0
        return row
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
        peer.close()


def measured(name: str, *, warm_up_s: float, seconds: float) -> Row:
    """Throughput under full load, then latency of one put at a time."""
    try:
        row = _watched(
            name, producers=PRODUCERS, count=TAKE, permits=IN_FLIGHT // PUT, warm_up_s=warm_up_s, seconds=seconds
        )
        if name != GATHERED:
            one = _watched(name, producers=1, count=PUT, permits=1, warm_up_s=0.5, seconds=min(seconds, 2.0))
            row.p50_ms = one.p50_ms
    except (ImportError, FileNotFoundError) as error:
        return Row(what=name, skipped=f"not here: {error}")
    return row


def main() -> None:
    """Measure one peer and print one line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=list(PEERS))
    parser.add_argument("--warm-up", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    asked = parser.parse_args()
    print(measured(asked.name, warm_up_s=asked.warm_up, seconds=asked.seconds).line())


if __name__ == "__main__":
    main()
