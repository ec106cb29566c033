"""Two ranks for ``bench.weights``, each with half of every tensor, as FSDP shards them: both upload their halves."""

import asyncio
import multiprocessing
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from numpy.typing import NDArray

from bench.weights_own import OwnPublisher, config_of
from bench.weights_ways import tensors
from staleflow.clients.weights import Publisher
from staleflow.clients.weights.sharded import RankUpload, Span
from staleflow.clients.weights.tensors import layout, tensor_of
from staleflow.configs.loading.load import addresses
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import BeginPublishReply, Manifest

Arrays = dict[str, NDArray[Any]]


class Half:
    """One rank's half of every tensor: the elements before the middle, or those from there on."""

    def __init__(self, arrays: Arrays, manifest: Manifest, rank: int) -> None:
        self._arrays = arrays
        self._manifest = manifest
        self._rank = rank

    def layout(self) -> Manifest:
        return self._manifest

    def spans(self) -> Iterator[Span]:
        for entry, array in zip(self._manifest.tensors, self._arrays.values(), strict=True):
            middle = array.nbytes // array.itemsize // 2 * array.itemsize
            start, end = (0, middle) if self._rank == 0 else (middle, array.nbytes)
            yield Span(entry.offset + start, tensor_of(entry.name, array).data[start:end])


class LeadingHalf(Half):
    """Rank 0's half (``LedWeights``); rank 1 is at the other end of a pipe."""

    def __init__(self, arrays: Arrays, manifest: Manifest, other: "Connection[Any, Any]") -> None:
        super().__init__(arrays, manifest, 0)
        self._other = other

    def items(self) -> Iterable[tuple[str, NDArray[Any]]]:
        raise NotImplementedError("rank 0 has half of the weights")

    def start_uploads(self, *, copy: bool) -> None:
        """The weights do not change meanwhile, so no rank copies its half."""

    def send_destination(self, to: BeginPublishReply) -> None:
        self._other.send(to)

    def collect(self, own: RankUpload) -> list[RankUpload]:
        return [own, self._other.recv()]

    def end_uploads(self) -> None:
        """Rank 1 waits for the next destination anyway."""


class RanksPublisher(OwnPublisher):
    """Publishes version after version from two processes."""

    def __init__(self, place: str) -> None:
        super().__init__(place)
        context = multiprocessing.get_context("spawn")
        self._other, remote = context.Pipe()
        self._rank = context.Process(target=_second_rank, args=(place, remote), daemon=True)
        self._rank.start()
        self._manifest: Manifest | None = None

    def publish(self, arrays: Arrays) -> int:
        if self._manifest is None:
            self._manifest = layout(arrays)
            self._other.send((sum(array.nbytes for array in arrays.values()), self._manifest))
        self._other.send(next(iter(arrays.values()))[-1].item())
        return self.publish_weights(LeadingHalf(arrays, self._manifest, self._other))

    def close(self) -> None:
        self._rank.kill()
        self._rank.join()
        super().close()


def _second_rank(place: str, pipe: "Connection[Any, Any]") -> None:
    """Write the second halves, until killed."""
    nbytes, manifest = pipe.recv()
    arrays = tensors(nbytes)
    half = Half(arrays, manifest, 1)
    address = addresses(config_of(place), Path(place)).parameters

    async def following() -> None:
        publisher = Publisher(address, worker=WorkerId("trainer-rank-1.1"))
        while True:
            value = await asyncio.to_thread(pipe.recv)
            for array in arrays.values():
                array[-1] = np.float32(value)
            pipe.send(await publisher.write_spans(await asyncio.to_thread(pipe.recv), half))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(following())
