"""One way to bring the weights of a trainer into several readers on the same host, timed; for ``bench.weights``.

    python -m bench.weights_ways WAY --mb 1024 --readers 4 --rounds 5

Prints one JSON object a round: seconds from the beginning of the publish until the last reader can read the bytes
(``mapped``), and until the last has them in tensors of its own (``loaded``); and the longest time from a reader's first
tensor to its last (``paused``). The module imports the product only for
the product's own way, so that a peer may run in an environment of its own.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]
TENSOR_BYTES = 16 << 20
SHARED_MEMORY = "/dev/shm"
FRAME_BYTES = 16 << 20
FRESH = 6
"""Versions that do not count: until each of three files has been written twice, as in a run of hundreds."""


class Publisher(Protocol):
    """The trainer's side."""

    def publish(self, arrays: Arrays) -> Any:
        """Publish the arrays; return the token that readers need, which travels to them."""
        ...

    def close(self) -> None: ...


class Reader(Protocol):
    """An engine's side."""

    def reach(self, token: Any) -> None:
        """Return when every byte of the version can be read from here."""
        ...

    def views(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Each tensor of the version, to be copied before the next is requested."""
        ...

    def close(self) -> None: ...


def tensors(nbytes: int) -> Arrays:
    """That many bytes in float32 tensors of 16 MiB, every page touched."""
    count = max(1, nbytes // TENSOR_BYTES)
    return {f"layer{number}": np.full(TENSOR_BYTES // 4, number, np.float32) for number in range(count)}


# Ways ----------------------------------------------------------------------------------------------------------------


class SafetensorsPublisher:
    """A file in shared memory, renamed when it is complete; the readers map it."""

    def __init__(self, place: str) -> None:
        self._save = importlib.import_module("safetensors.numpy").save_file
        self._path = Path(place, "weights.safetensors")

    def publish(self, arrays: Arrays) -> Any:
        part = self._path.with_suffix(".part")
        self._save(arrays, part)
        part.replace(self._path)
        return str(self._path)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)


class SafetensorsReader:
    def __init__(self, _place: str) -> None:
        self._open = importlib.import_module("safetensors").safe_open

    def reach(self, token: Any) -> None:
        self._file = self._open(token, framework="np")

    def views(self) -> Iterator[tuple[str, NDArray[Any]]]:
        for name in self._file.keys():  # noqa: SIM118 (it is no mapping)
            yield name, self._file.get_tensor(name)
        del self._file

    def close(self) -> None: ...


class TorchSavePublisher:
    """``torch.save`` into shared memory, ``torch.load`` from it."""

    def __init__(self, place: str) -> None:
        self._torch = importlib.import_module("torch")
        self._path = Path(place, "weights.pt")

    def publish(self, arrays: Arrays) -> Any:
        part = self._path.with_suffix(".part")
        self._torch.save({name: self._torch.from_numpy(array) for name, array in arrays.items()}, part)
        part.replace(self._path)
        return str(self._path)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)


class TorchSaveReader:
    def __init__(self, _place: str) -> None:
        self._torch = importlib.import_module("torch")

    def reach(self, token: Any) -> None:
        self._found = self._torch.load(token)

    def views(self) -> Iterator[tuple[str, NDArray[Any]]]:
        for name, tensor in self._found.items():
            yield name, tensor.numpy()
        del self._found

    def close(self) -> None: ...


class ZmqPublisher:
    """Frames of 16 MiB through a Unix socket to each reader, as fast as the readers receive them."""

    def __init__(self, place: str) -> None:
        self._zmq = importlib.import_module("zmq")
        self._sockets = [self._zmq.Context.instance().socket(self._zmq.PUSH) for _ in range(_readers_of(place))]
        for number, socket in enumerate(self._sockets):
            socket.set_hwm(4)
            socket.bind(f"ipc://{place}/{number}")

    def publish(self, arrays: Arrays) -> Any:
        for array in arrays.values():
            for start in range(0, array.nbytes, FRAME_BYTES):
                data = array.reshape(-1).view(np.uint8).data[start : start + FRAME_BYTES]
                for socket in self._sockets:
                    socket.send(data, copy=False)
        return [(name, array.nbytes) for name, array in arrays.items()]

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(0)


class ZmqReader:
    def __init__(self, place: str, number: int) -> None:
        zmq = importlib.import_module("zmq")
        self._socket = zmq.Context.instance().socket(zmq.PULL)
        self._socket.set_hwm(4)
        self._socket.connect(f"ipc://{place}/{number}")

    def reach(self, token: Any) -> None:
        self._coming = token

    def views(self) -> Iterator[tuple[str, NDArray[Any]]]:
        for name, nbytes in self._coming:
            parts = [self._socket.recv(copy=False).buffer for _ in range(-(-nbytes // FRAME_BYTES))]
            assert len(parts) == 1
            yield name, np.frombuffer(parts[0], np.float32)

    def close(self) -> None:
        self._socket.close(0)


def _readers_of(place: str) -> int:
    return int(Path(place, "readers").read_text())


def _own_publisher(place: str) -> Publisher:
    built: Publisher = importlib.import_module("bench.weights_own").OwnPublisher(place)
    return built


def _publisher_on_disk(place: str) -> Publisher:
    built: Publisher = importlib.import_module("bench.weights_own").OwnPublisher(place, "disk")
    return built


def _publisher_of_ranks(place: str) -> Publisher:
    built: Publisher = importlib.import_module("bench.weights_ranks").RanksPublisher(place)
    return built


def _own_reader(place: str, number: int) -> Reader:
    built: Reader = importlib.import_module("bench.weights_own").OwnReader(place, number)
    return built


def _trusting_reader(place: str, number: int) -> Reader:
    built: Reader = importlib.import_module("bench.weights_own").OwnReader(place, number, verified=False)
    return built


WAYS: dict[str, tuple[Callable[[str], Publisher], Callable[[str, int], Reader]]] = {
    "staleflow": (_own_publisher, _own_reader),
    "staleflow, on disk": (_publisher_on_disk, _own_reader),
    "staleflow, two ranks": (_publisher_of_ranks, _own_reader),
    "staleflow, not verified": (_own_publisher, _trusting_reader),
    "safetensors": (SafetensorsPublisher, lambda place, _: SafetensorsReader(place)),
    "zmq": (ZmqPublisher, ZmqReader),
    "torch.save": (TorchSavePublisher, lambda place, _: TorchSaveReader(place)),
}
EARLY = ("zmq",)
"""Ways whose readers begin with the publish, not after it."""


# The harness ---------------------------------------------------------------------------------------------------------


def read(way: str, place: str, number: int, nbytes: int, pipe: "Connection[Any, Any]") -> None:
    """A reader process: copies a version into its own tensors for each token that arrives."""
    own, reader = tensors(nbytes), WAYS[way][1](place, number)
    pipe.send(os.getpid())
    while (sent := pipe.recv()) is not None:
        token, value = sent
        reader.reach(token)
        mapped = time.monotonic()
        views = reader.views()
        coming = next(views, None)  # everything before the first tensor happens while an engine decodes
        ready = loaded = time.monotonic()
        while coming is not None:
            np.copyto(own[coming[0]], coming[1])
            loaded = time.monotonic()  # the last one: a version is released once the engine decodes again
            coming = next(views, None)
        assert all(array[0] == value and array[-1] == value for array in own.values())
        pipe.send((mapped, ready, loaded))
    reader.close()


def rounds(way: str, nbytes: int, readers: int, count: int) -> Iterator[dict[str, float]]:
    """Publish ``count`` versions after the warm-up versions."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(
        prefix="sf-w-", dir=None if way.startswith("staleflow") else SHARED_MEMORY
    ) as place:
        Path(place, "readers").write_text(str(readers))
        publisher, arrays = WAYS[way][0](place), tensors(nbytes)
        pipes: list[Any] = []
        processes: list[Any] = []
        for number in range(readers):
            here, remote = context.Pipe()
            process = context.Process(target=read, args=(way, place, number, nbytes, remote), daemon=True)
            process.start()
            pipes.append(here)
            processes.append(process)
        for pipe in pipes:
            pipe.recv()
        for turn in range(FRESH + count):
            for array in arrays.values():
                array[[0, -1]] = turn + 1000
            result = _turn(publisher, arrays, pipes, turn + 1000, early=way in EARLY)
            if turn >= FRESH:
                yield {**result, "memcpy": memcpy(arrays)}
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send(None)
            process.join()
        publisher.close()


def cpu_s() -> float:
    """CPU seconds that this process and all its descendants have used so far."""
    ticks, pids = 0, [os.getpid()]
    while pids:
        process = Path("/proc", str(pids.pop()))
        try:
            ticks += sum(map(int, Path(process, "stat").read_text().rpartition(")")[2].split()[11:13]))
            pids += [
                int(pid)
                for task in Path(process, "task").iterdir()
                for pid in Path(task, "children").read_text().split()
            ]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


def _turn(publisher: Publisher, arrays: Arrays, pipes: list[Any], value: int, *, early: bool) -> dict[str, float]:
    began, before = time.monotonic(), cpu_s()
    if early:
        for pipe in pipes:
            pipe.send(([(name, array.nbytes) for name, array in arrays.items()], value))
    token = publisher.publish(arrays)
    published = time.monotonic()
    if not early:
        for pipe in pipes:
            pipe.send((token, value))
    times = [pipe.recv() for pipe in pipes]
    return {
        "published": published - began,
        "mapped": -1.0 if early else max(mapped for mapped, *_ in times) - began,
        "paused": max(loaded - ready for _, ready, loaded in times),
        "loaded": max(loaded for *_, loaded in times) - began,
        "cpu": cpu_s() - before,
    }


_TARGETS: list[NDArray[Any]] = []
MAX_TARGETS = 32
"""Number of tensors that copies are written to in turn: more than caches hold, and little beside a large version."""


def memcpy(arrays: Arrays) -> float:
    """Seconds that one thread takes to copy the bytes into memory that is touched already."""
    if not _TARGETS:
        _TARGETS.extend(np.array(array) for _, array in zip(range(MAX_TARGETS), arrays.values(), strict=False))
    began = time.monotonic()
    for number, array in enumerate(arrays.values()):
        np.copyto(_TARGETS[number % len(_TARGETS)], array)
    return time.monotonic() - began


# Ray has processes of its own ----------------------------------------------------------------------------------------


def ray_rounds(nbytes: int, readers: int, count: int, *, torch: bool) -> Iterator[dict[str, float]]:
    """``ray.put`` of a dictionary of NumPy views, or of torch tensors; one actor per reader fetches it."""
    ray = importlib.import_module("ray")
    ray.init(
        num_cpus=readers, object_store_memory=2 * nbytes + (256 << 20), log_to_driver=False, include_dashboard=False
    )
    wrap = importlib.import_module("torch").from_numpy if torch else np.asarray

    class Actor:
        def __init__(self, nbytes: int) -> None:
            self._own = tensors(nbytes)

        def ready(self) -> bool:
            return True

        def load(self, refs: list[Any], value: int) -> tuple[float, float]:
            result = ray.get(refs[0])
            mapped = time.monotonic()
            for name, view in result.items():
                np.copyto(self._own[name], np.asarray(view))
            loaded = time.monotonic()
            assert all(array[0] == value for array in self._own.values())
            return mapped, loaded

    built: Any = ray.remote(num_cpus=1)(Actor)
    actors = [built.remote(nbytes) for _ in range(readers)]
    ray.get([actor.ready.remote() for actor in actors])
    arrays = tensors(nbytes)
    for turn in range(FRESH + count):
        for array in arrays.values():
            array[[0, -1]] = turn + 1000
        began, before = time.monotonic(), cpu_s()
        ref = ray.put({name: wrap(array) for name, array in arrays.items()})
        published = time.monotonic()
        times = ray.get([actor.load.remote([ref], turn + 1000) for actor in actors])
        del ref
        if turn >= FRESH:
            yield {
                "published": published - began,
                "mapped": max(mapped for mapped, _ in times) - began,
                "paused": max(loaded - mapped for mapped, loaded in times),
                "loaded": max(loaded for _, loaded in times) - began,
                "cpu": cpu_s() - before,
                "memcpy": memcpy(arrays),
            }
    ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=[*WAYS, "ray", "ray, torch tensors"])
    parser.add_argument("--mb", type=int, default=1024)
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    nbytes = options.mb << 20
    if options.way.startswith("ray"):
        result = ray_rounds(nbytes, options.readers, options.rounds, torch=options.way != "ray")
    else:
        result = rounds(options.way, nbytes, options.readers, options.rounds)
    for one in result:
        print(json.dumps(one), flush=True)


if __name__ == "__main__":
    main()
