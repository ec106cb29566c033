"""The engine thread keeps request order, loads weights, aborts requests, and reports failures and hangs."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from staleflow.clients.rollout.engines.base import EngineError, Request, RequestError, Sampling, Trajectory
from staleflow.clients.rollout.engines.simulated import SimulatedEngine
from staleflow.clients.rollout.engines.thread import EngineThread
from staleflow.configs.simulation import Simulated
from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.trajectory import Finish
from tests.clients.rollout.engines.waiting import until


class Gated(SimulatedEngine):
    """An engine whose steps each wait until the test releases them."""

    def __init__(self, slots: int = 4, tokens: float = 5) -> None:
        super().__init__(Simulated(mean_tokens=tokens, sigma=0, k2=1e-4), slots=slots, sleep=lambda seconds: None)
        self.gate = threading.Semaphore(0)
        self.inside = threading.Semaphore(0)

    def step(self) -> list[Trajectory]:
        self.inside.release()
        assert self.gate.acquire(timeout=30)
        return super().step()

    def open(self) -> None:
        self.gate.release(10_000)


@asynccontextmanager
async def threaded(engine: Gated, *, drain: bool = False) -> AsyncGenerator[EngineThread]:
    thread = EngineThread(engine, drain=drain)
    try:
        yield thread
    finally:
        engine.open()
        await thread.close()


def ask(id: int, tokens: int = 100) -> Request:
    return Request(id=id, prompt_ids=np.array([1, 2], np.int32), sampling=Sampling(max_new_tokens=tokens), seed=id)


async def begun(engine: Gated) -> None:
    """Wait until the engine is inside a step, where it stays."""
    await asyncio.to_thread(engine.inside.acquire)


async def test_requests_of_many_callers_share_the_steps() -> None:
    engine = Gated()
    async with threaded(engine) as thread:
        engine.open()
        done = await asyncio.gather(*(thread.generate(ask(id)) for id in range(10)))
        assert [t.id for t in done] == list(range(10))
        assert all(len(t.token_ids) == 5 for t in done)
        assert thread.stats().generated_tokens == 50
        assert thread.busy_s() > 0


async def test_a_request_that_cannot_be_served_fails_alone() -> None:
    engine = Gated()
    async with threaded(engine) as thread:
        engine.open()
        empty = Request(id=0, prompt_ids=np.empty(0, np.int32), sampling=Sampling(max_new_tokens=1))
        bad, good = await asyncio.gather(thread.generate(empty), thread.generate(ask(1)), return_exceptions=True)
        assert isinstance(bad, RequestError)
        assert isinstance(good, Trajectory)


async def test_the_time_of_a_load_and_nothing_else_counts_as_a_pause() -> None:
    class Slow(Gated):
        def load(self, tensors: Any, lineage: Lineage, version: Version) -> None:
            time.sleep(0.05)
            super().load(tensors, lineage, version)

    engine = Slow()
    async with threaded(engine) as thread:
        running = asyncio.ensure_future(thread.generate(ask(0)))
        await begun(engine)
        loading = asyncio.ensure_future(thread.load({}, Lineage(0), Version(1)))
        await asyncio.sleep(0.05)
        assert thread.stats().paused_s == 0, "it waits for the step in progress, which decodes"
        started_s = time.monotonic()
        engine.open()
        await loading
        assert 0.05 <= thread.stats().paused_s <= time.monotonic() - started_s
        await running


async def test_an_abort_ends_the_call_and_frees_the_row() -> None:
    engine = Gated(slots=1)
    async with threaded(engine) as thread:
        first = asyncio.ensure_future(thread.generate(ask(0)))
        second = asyncio.ensure_future(thread.generate(ask(1)))
        await begun(engine)
        thread.abort(0)
        with pytest.raises(asyncio.CancelledError):
            await first
        engine.open()
        assert (await second).id == 1


async def test_cancelling_the_caller_aborts_the_request() -> None:
    engine = Gated()
    async with threaded(engine) as thread:
        call = asyncio.ensure_future(thread.generate(ask(0, 10**6)))
        await begun(engine)
        call.cancel()
        engine.gate.release(5)
        await until(lambda: thread.stats().running + thread.stats().waiting == 0)


async def test_an_interrupt_returns_the_tokens_so_far() -> None:
    engine = Gated(tokens=1000)
    async with threaded(engine) as thread:
        call = asyncio.ensure_future(thread.generate(ask(0, 2000)))
        await begun(engine)
        engine.gate.release()
        await begun(engine)
        thread.interrupt(0)
        engine.gate.release(5)
        trajectory = await call
        assert (trajectory.finish, len(trajectory.token_ids)) == (Finish.INTERRUPTED, 3)


async def test_a_load_comes_between_two_steps_and_running_samples_go_on() -> None:
    engine = Gated()
    async with threaded(engine) as thread:
        await thread.load({}, Lineage(0), Version(1))
        call = asyncio.ensure_future(thread.generate(ask(0)))
        await begun(engine)
        load = asyncio.ensure_future(thread.load({}, Lineage(0), Version(2)))
        await asyncio.sleep(0)
        assert not load.done()
        engine.open()
        await load
        assert [(s.version, len(s.token_ids)) for s in (await call).segments] == [(1, 1), (2, 4)]


async def test_draining_ends_what_runs_before_the_load_and_starts_what_waits_after_it() -> None:
    engine = Gated(slots=1)
    async with threaded(engine, drain=True) as thread:
        await thread.load({}, Lineage(0), Version(1))
        first, second = (asyncio.ensure_future(thread.generate(ask(id))) for id in range(2))
        await begun(engine)
        load = asyncio.ensure_future(thread.load({}, Lineage(0), Version(2)))
        await asyncio.sleep(0)
        engine.open()
        await load
        assert [s.version for s in (await first).segments] == [1]
        assert [s.version for s in (await second).segments] == [2]


async def test_what_is_to_go_on_elsewhere_ends_with_what_it_has_and_what_waits_with_nothing() -> None:
    engine = Gated(slots=1, tokens=50)
    async with threaded(engine) as thread:
        calls = [asyncio.ensure_future(thread.generate(ask(id))) for id in range(3)]
        await begun(engine)
        for id in (0, 2):
            thread.interrupt(id, least=0)
        engine.open()
        first, second, third = await asyncio.gather(*calls)
        assert (first.finish, first.token_ids.size) == (Finish.INTERRUPTED, 2)
        assert second.finish is Finish.STOP
        assert (third.finish, third.segments) == (Finish.INTERRUPTED, ())
        thread.interrupt(99, least=0)


async def test_a_step_that_does_not_return_shows_and_closing_leaves_it_behind() -> None:
    engine = Gated()
    async with threaded(engine) as thread:
        assert thread.stuck_s() == 0.0
        call = asyncio.ensure_future(thread.generate(ask(0)))
        await begun(engine)
        await until(lambda: thread.stuck_s() > 0.05)
        engine.open()
        await call
        await until(lambda: thread.stuck_s() == 0.0)


async def test_closing_without_a_limit_waits_for_the_step_under_way() -> None:
    engine, others = Gated(), set(threading.enumerate())  # another test may have left its engine behind
    async with threaded(engine) as thread:
        call = asyncio.ensure_future(thread.generate(ask(0)))
        await begun(engine)
        await thread.close(limit_s=0)
        assert thread.stuck_s() > 0, "left behind"
        closing = asyncio.ensure_future(thread.close(limit_s=None))
        engine.open()
        await closing
        assert thread.stuck_s() == 0
        assert all(running.name != "engine" for running in set(threading.enumerate()) - others)
        assert call.cancelled()


@pytest.mark.parametrize(
    ("error", "advised"),
    [
        (MemoryError("Unable to allocate 8 GiB"), True),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."), True),
        (RuntimeError("shapes do not match"), False),
    ],
)
async def test_an_engine_out_of_memory_says_what_to_change(error: Exception, advised: bool) -> None:
    class Broken(Gated):
        def step(self) -> list[Trajectory]:
            raise error

    async with threaded(Broken()) as thread:
        with pytest.raises(EngineError) as failed:
            await thread.generate(ask(0))
        told = "; lower rollout.max_inflight, or rollout.max_new_tokens" if advised else ""
        assert str(failed.value) == f"the engine failed: {error!r}{told}"


async def test_an_engine_that_raises_fails_every_caller_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Gated):
        def step(self) -> list[Trajectory]:
            raise RuntimeError("out of memory")

    async with threaded(Broken()) as thread:
        failed = await asyncio.gather(thread.generate(ask(0)), thread.generate(ask(1)), return_exceptions=True)
        assert all(isinstance(error, EngineError) for error in failed)
        with pytest.raises(EngineError, match="out of memory") as failure:
            await thread.failure
        assert isinstance(failure.value.__cause__, RuntimeError)
        with pytest.raises(EngineError):
            await thread.generate(ask(2))
