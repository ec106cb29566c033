"""The simulated engine fulfils the contract of ``AsyncEngine``, and its tokens identify their samples."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from staleflow.clients.rollout.engines.base import Request, RequestError, Sampling, Trajectory
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Version
from staleflow.protocols.wire.messages import Assign
from staleflow.protocols.wire.trajectory import Finish
from staleflow.sim.async_engine import REFUSAL_DELAY_S, SimAsyncEngine
from staleflow.sim.book import Book
from staleflow.sim.cost import StepCost
from staleflow.sim.engine import SimEngine
from staleflow.sim.virtual import Conductor
from staleflow.sim.workload import Workload
from tests.sim.configs import config

LONGEST = 100
PROMPT = np.ones(1, np.int32)


class Bench:
    """Engines that write one token a second, in samples of 10 tokens."""

    def __init__(self) -> None:
        of = config(longest=LONGEST, lengths={"lengths": "uniform", "min_tokens": 10, "max_tokens": 10})
        self.conductor = Conductor(0.0)
        self.book = Book(Workload(of))

    def run(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        process = self.conductor.spawn("test", main)
        self.conductor.run(lambda: not process.alive)
        self.conductor.close()
        if process.error is not None:
            raise process.error

    def engine(self, *, slots: int = 8, kv: int = 0, load_s: float = 0.0) -> tuple[SimEngine, SimAsyncEngine]:
        engine = SimEngine(self.conductor, StepCost(k1=0.0, k2=1.0, k3=0.0, k4=0.0), slots=slots, kv_capacity=kv)
        return engine, SimAsyncEngine(engine, self.book, load_s=load_s, longest=LONGEST)

    def request(self, id: int, *, lease: int = 1, place: int = 0) -> Request:
        assign = Assign(group=GroupId(7), lease=LeaseId(lease), lineage=Lineage(0), version=Version(0), shard=0)
        seed = self.book.number(assign, LeaseId(1), place)
        return Request(id=id, prompt_ids=PROMPT, sampling=Sampling(max_new_tokens=LONGEST), seed=seed)


def story(trajectory: Trajectory) -> tuple[list[tuple[int, int]], Finish]:
    """(version, tokens) of each segment, and the reason for the end."""
    return [(segment.version, len(segment.token_ids)) for segment in trajectory.segments], trajectory.finish


def test_every_token_is_the_number_of_its_sample_and_has_its_version() -> None:
    bench = Bench()

    async def main() -> None:
        _, engine = bench.engine()
        await engine.load({}, Lineage(0), Version(0))
        first, second = bench.request(5), bench.request(6, place=1)
        writing = [asyncio.ensure_future(engine.generate(one)) for one in (first, second)]
        await asyncio.sleep(3.5)
        await engine.load({}, Lineage(0), Version(1))
        for request, ended in zip((first, second), await asyncio.gather(*writing), strict=True):
            assert (ended.id, set(ended.token_ids.tolist())) == (request.id, {request.seed})
            assert story(ended) == ([(0, 4), (1, 6)], Finish.STOP)

    bench.run(main)


def test_a_sample_that_is_taken_back_goes_on_at_another_engine_from_its_tokens() -> None:
    bench = Bench()

    async def main() -> None:
        (_, old), (_, new) = bench.engine(), bench.engine()
        await old.load({}, Lineage(0), Version(0))
        await new.load({}, Lineage(0), Version(2))
        writing = asyncio.ensure_future(old.generate(bench.request(5)))
        await asyncio.sleep(2.5)
        old.interrupt(5, least=0)
        assert story(await writing) == ([(0, 3)], Finish.INTERRUPTED)
        ended = await new.generate(bench.request(8, lease=2))
        assert story(ended) == ([(0, 3), (2, 7)], Finish.STOP)
        assert asyncio.get_running_loop().time() == 10.0

    bench.run(main)


def test_an_interrupt_leaves_a_sample_that_waits_one_token_and_taking_it_back_none() -> None:
    bench = Bench()

    async def main() -> None:
        _, engine = bench.engine(slots=1)
        await engine.load({}, Lineage(0), Version(0))
        running = asyncio.ensure_future(engine.generate(bench.request(1)))
        await asyncio.sleep(0.5)
        waiting = asyncio.ensure_future(engine.generate(bench.request(2, place=1)))
        await asyncio.sleep(0)
        engine.interrupt(2, least=0)
        assert story(await waiting) == ([], Finish.INTERRUPTED)
        waiting = asyncio.ensure_future(engine.generate(bench.request(3, place=1)))
        await asyncio.sleep(0)
        engine.interrupt(3)
        assert story(await waiting) == ([(0, 1)], Finish.INTERRUPTED)
        assert story(await running) == ([(0, 10)], Finish.STOP)

    bench.run(main)


@pytest.mark.parametrize("by", ["abort", "cancel"])
def test_an_aborted_request_leaves_the_engine_and_its_tokens_are_thrown_away(by: str) -> None:
    bench = Bench()

    async def main() -> None:
        simulated, engine = bench.engine()
        await engine.load({}, Lineage(0), Version(0))
        writing = asyncio.ensure_future(engine.generate(bench.request(5)))
        await asyncio.sleep(2.5)
        if by == "abort":
            engine.abort(5)
        else:
            writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        await asyncio.sleep(1.0)
        assert simulated.state().running == 0
        assert bench.book.discarded_tokens({}, set()) == 0  # the lease may still push the group
        assert bench.book.discarded_tokens({}, {LeaseId(1)}) == 3

    bench.run(main)


def test_a_request_that_never_fits_is_refused_after_a_while() -> None:
    bench = Bench()

    async def main() -> None:
        _, engine = bench.engine(kv=5)
        with pytest.raises(RequestError, match="a sample of 10 tokens does not fit into a KV cache of 5"):
            await engine.generate(bench.request(5))
        assert asyncio.get_running_loop().time() == REFUSAL_DELAY_S

    bench.run(main)


def test_a_hung_engine_is_stuck_until_it_returns() -> None:
    bench = Bench()

    async def main() -> None:
        simulated, engine = bench.engine()
        await engine.load({}, Lineage(0), Version(0))
        writing = asyncio.ensure_future(engine.generate(bench.request(5)))
        await asyncio.sleep(2.5)
        simulated.hang()
        await asyncio.sleep(4.0)
        assert (engine.stuck_s(), engine.stats().generated_tokens) == (4.0, 2)
        simulated.resume()
        assert engine.stuck_s() == 0.0
        await writing
        assert asyncio.get_running_loop().time() == 14.0

    bench.run(main)


def test_spare_samples_of_a_pushed_group_are_thrown_away_and_no_others() -> None:
    bench = Bench()

    async def main() -> None:
        _, engine = bench.engine()
        await engine.load({}, Lineage(0), Version(0))
        await asyncio.gather(engine.generate(bench.request(5)), engine.generate(bench.request(6, place=1)))
        pushed = {LeaseId(1): [bench.book.samples[0]]}
        assert bench.book.discarded_tokens(pushed, set()) == 10
        assert bench.book.discarded_tokens({LeaseId(1): bench.book.samples}, set()) == 0

    bench.run(main)
