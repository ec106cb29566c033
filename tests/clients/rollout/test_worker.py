"""The worker serves a scheduler, a shard and an engine over real sockets."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from staleflow.clients.rollout.engines.base import EngineError, LoadError, Request, RequestError, Sampling, Trajectory
from staleflow.clients.rollout.engines.simulated import SimulatedEngine
from staleflow.clients.rollout.engines.thread import EngineThread
from staleflow.clients.rollout.groups import Recipe
from staleflow.clients.rollout.main import text_bytes
from staleflow.clients.rollout.session import STUCK_TIMEOUT_S
from staleflow.clients.rollout.worker import Worker
from staleflow.configs.errors import ConfigError
from staleflow.configs.simulation import Simulated
from staleflow.net.errors import Refused
from staleflow.net.limits import TransportLimits
from staleflow.protocols.consistency.effects import Code, ReleaseWhy
from staleflow.protocols.consistency.ids import LeaseId, Version
from staleflow.protocols.wire.messages import Abort, Interrupt
from staleflow.protocols.wire.trajectory import Finish
from tests.clients.rollout.engines.waiting import until
from tests.clients.rollout.peers import ME, ONCE, Stage, assign, pull


class Paced(SimulatedEngine):
    """A fast engine, unless the test closes the gate or makes a step fail; rejects prompts of more than 20 tokens."""

    def __init__(self, tokens: float = 8, sigma: float = 0.3, step_s: float = 1e-4) -> None:
        super().__init__(Simulated(mean_tokens=tokens, sigma=sigma, k2=step_s), slots=16)
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def submit(self, request: Request) -> None:
        if len(request.prompt_ids) > 20:
            raise RequestError(f"the prompt has {len(request.prompt_ids)} tokens; the model's context is 20")
        super().submit(request)

    def step(self) -> list[Trajectory]:
        if self.error is not None:
            raise self.error
        assert self.gate.wait(timeout=30)
        return super().step()


class Play:
    """A worker that runs among its peers."""

    def __init__(self, stage: Stage, worker: Worker, engine: Paced, runner: EngineThread) -> None:
        self.scheduler, self.shard, self.weights = stage.scheduler, stage.shard, stage.weights
        self.worker, self.engine, self.runner = worker, engine, runner
        self._stage = stage
        self._serving = [asyncio.ensure_future(endpoint.serve()) for endpoint in stage.endpoints]
        self.running = asyncio.ensure_future(worker.run())

    async def stop_scheduler(self) -> None:
        self._stage.endpoints[0].close()
        await self._serving[0]

    def start_scheduler(self) -> None:
        self._stage.open_scheduler()
        self._serving[0] = asyncio.ensure_future(self._stage.endpoints[0].serve())

    async def end(self) -> None:
        self._stage.close()
        await asyncio.gather(*self._serving)


@asynccontextmanager
async def playing(
    folder: Path,
    engine: Paced | None = None,
    *,
    started: int = 4,
    drain: bool = False,
    limits: TransportLimits = ONCE,
) -> AsyncGenerator[Play]:
    stage = Stage(folder, limits)
    engine = engine or Paced()
    runner = EngineThread(engine, drain=drain)
    recipe = Recipe(group_size=4, started=started, sampling=Sampling(max_new_tokens=10**6), seed=3)
    worker = Worker(stage.me, stage.clients[0], [stage.clients[1]], stage.weights, runner, text_bytes, recipe)
    play = Play(stage, worker, engine, runner)
    stage.scheduler.order(pull(0))
    try:
        yield play
    finally:
        play.running.cancel()
        with suppress(asyncio.CancelledError, EngineError, ConfigError, Refused):
            await play.running
        engine.error = None
        engine.gate.set()
        await worker.leave("the test is over")
        await runner.close()
        await play.end()


async def loaded(play: Play, version: int = 0) -> None:
    await until(lambda: play.scheduler.reports and play.scheduler.reports[-1].stats.version == version)


async def test_groups_go_from_command_to_shard(short_dir: Path) -> None:
    async with playing(short_dir) as play:
        await loaded(play)
        play.scheduler.order(*(assign(group) for group in range(1, 6)))
        await until(lambda: len(play.shard.payloads) == 5)
        await until(lambda: play.scheduler.held == [])
        for group, payload in play.shard.payloads.items():
            assert bytes(payload.prompt_ids.tolist()) == f"{group}=".encode()
            assert payload.num_samples == 4
            assert payload.finish.tolist() == [Finish.STOP] * 4
            assert payload.segment_summary() == [(0, 0, payload.num_tokens)]
            assert payload.loss_mask.all()
        assert play.shard.truncated == dict.fromkeys(range(1, 6), False)
        stats = play.scheduler.reports[-1].stats
        assert stats.generated_tokens == sum(payload.num_tokens for payload in play.shard.payloads.values())
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.busy_s > 0
        assert play.worker.counts["pushed"] == 5


async def test_a_command_that_comes_twice_is_obeyed_once(short_dir: Path) -> None:
    async with playing(short_dir) as play:  # this scheduler repeats the last command in every reply
        await loaded(play)
        for group in range(1, 4):
            play.scheduler.order(assign(group))
            await until(partial(play.shard.payloads.__contains__, group))
        await until(lambda: play.scheduler.held == [])
        assert play.shard.offered == [1, 2, 3]
        assert play.weights.given == [0]


async def test_redundant_samples_are_aborted_once_enough_are_done(short_dir: Path) -> None:
    async with playing(short_dir, Paced(tokens=200, sigma=1.0), started=8) as play:
        await loaded(play)
        play.engine.gate.clear()  # until all samples are there, so that they start together
        play.scheduler.order(assign(1))
        await until(lambda: len(play.runner._futures) == 8)  # pyright: ignore[reportPrivateUsage]
        play.engine.gate.set()
        await until(lambda: 1 in play.shard.payloads)
        assert play.shard.payloads[1].num_samples == 4
        await until(lambda: play.engine.stats().running == 0)
        written = play.engine.stats().generated_tokens
        assert written >= play.shard.payloads[1].num_tokens + 4 * int(play.shard.payloads[1].lengths.max() - 1)
        await until(lambda: play.scheduler.held == [])


async def test_an_interrupt_pushes_the_tokens_so_far_as_truncated(short_dir: Path) -> None:
    async with playing(short_dir, Paced(tokens=10**6)) as play:
        await loaded(play)
        play.scheduler.order(assign(1))
        await until(lambda: play.engine.stats().generated_tokens > 40)
        play.scheduler.order(Interrupt(lease=LeaseId(1)), Interrupt(lease=LeaseId(77)))
        await until(lambda: 1 in play.shard.payloads)
        assert play.shard.payloads[1].finish.tolist() == [Finish.INTERRUPTED] * 4
        assert play.shard.payloads[1].lengths.min() >= 1
        assert play.shard.truncated == {1: True}


async def test_an_interrupt_that_comes_with_the_assignment_leaves_one_token_at_least(short_dir: Path) -> None:
    async with playing(short_dir, Paced(tokens=10**6)) as play:
        await loaded(play)
        play.scheduler.order(assign(1), Interrupt(lease=LeaseId(1)))
        await until(lambda: 1 in play.shard.payloads)
        assert play.shard.payloads[1].lengths.min() >= 1
        assert play.shard.truncated == {1: True}


async def test_an_aborted_lease_is_forgotten_and_nothing_is_pushed(short_dir: Path) -> None:
    async with playing(short_dir, Paced(tokens=10**6)) as play:
        await loaded(play)
        play.scheduler.order(assign(1), assign(2))
        await until(lambda: play.scheduler.held == [1, 2])
        await until(lambda: play.scheduler.reports[-1].stats.running == 8)
        play.scheduler.order(Abort(lease=LeaseId(1)), Interrupt(lease=LeaseId(2)))
        await until(lambda: 2 in play.shard.payloads)
        await until(lambda: play.scheduler.held == [])
        assert list(play.shard.payloads) == [2]
        await until(lambda: play.scheduler.reports[-1].stats.running == 0)


async def test_a_group_is_held_until_its_push_is_answered_and_an_abort_does_not_undo_it(short_dir: Path) -> None:
    async with playing(short_dir) as play:
        play.shard.hold = True
        await loaded(play)
        play.scheduler.order(assign(1))
        await until(lambda: play.shard.pushes)
        play.scheduler.order(Abort(lease=LeaseId(1)), assign(2))
        await until(lambda: play.scheduler.held == [1, 2])
        play.shard.hold = False
        play.shard.answer(play.shard.pushes[0])
        await until(lambda: play.scheduler.held == [])
        assert sorted(play.shard.payloads) == [1, 2]


async def test_what_a_shard_calls_stale_is_thrown_away_and_counted(short_dir: Path) -> None:
    async with playing(short_dir) as play:
        play.shard.codes = {1: [Code.STALE_LEASE], 2: [Code.STALE], 3: [Code.DUPLICATE], 4: [Code.BUSY, Code.BUSY]}
        await loaded(play)
        play.scheduler.order(*(assign(group) for group in range(1, 5)))
        await until(lambda: 4 in play.shard.payloads)  # the worker retries until the shard has room
        await until(lambda: play.scheduler.held == [])
        assert list(play.shard.payloads) == [4]
        assert play.worker.counts == {"pushed": 2, "moved": 0, "discarded": 2, "released": 0, "loaded": 1}
        assert play.scheduler.released == []


async def test_a_group_that_the_shard_puts_off_keeps_no_other_waiting_and_can_be_aborted(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("staleflow.clients.rollout.pushes.BUSY_RETRY_INTERVAL_S", 1e6)
    async with playing(short_dir) as play:
        play.shard.codes = {1: [Code.BUSY] * 10}
        await loaded(play)
        play.scheduler.order(assign(1))
        await until(lambda: play.shard.offered == [1])
        for group in (2, 3):
            play.scheduler.order(assign(group))
            await until(partial(play.shard.payloads.__contains__, group))
        await until(lambda: play.scheduler.held == [1])
        play.scheduler.order(Abort(lease=LeaseId(1)))
        await until(lambda: play.scheduler.held == [])
        assert play.shard.offered == [1, 2, 3]


async def test_what_goes_wrong_with_a_group_costs_that_group_alone(short_dir: Path) -> None:
    async with playing(short_dir) as play:
        play.shard.rows = {1: {"prompt": "x" * 21}, 2: {"question": "?"}, 3: {"prompt": ""}}
        play.shard.codes = {4: [Code.MALFORMED]}
        await loaded(play)
        play.scheduler.order(*(assign(group, lease=10 + group) for group in range(1, 7)))
        await until(lambda: len(play.scheduler.released) == 4 and 5 in play.shard.payloads and 6 in play.shard.payloads)
        assert {(op.group, op.lease, op.why, op.detail) for op in play.scheduler.released} == {
            (1, 11, ReleaseWhy.ABORTED, "group 1: the prompt has 21 tokens; the model's context is 20"),
            (2, 12, ReleaseWhy.ABORTED, "group 2: its prompt is NoneType, not text"),
            (3, 13, ReleaseWhy.ABORTED, "group 3: the prompt is empty"),
            (4, 14, ReleaseWhy.ABORTED, "group 4: its push was rejected: malformed said the test"),
        }
        assert {op.group for op in play.scheduler.released if op.hopeless} == {1, 2, 3}, "no engine can serve them"
        await until(lambda: play.scheduler.held == [])


async def test_a_new_version_is_loaded_while_samples_run_and_reported_at_once(short_dir: Path) -> None:
    async with playing(short_dir, Paced(tokens=10**6)) as play:
        await loaded(play)
        play.scheduler.order(assign(1))
        await until(lambda: play.engine.stats().generated_tokens > 20)
        play.scheduler.order(pull(1))
        await loaded(play, 1)
        written = play.engine.stats().generated_tokens
        await until(lambda: play.engine.stats().generated_tokens > written + 20)
        play.scheduler.order(Interrupt(lease=LeaseId(1)))
        await until(lambda: 1 in play.shard.payloads)
        assert [version for _, version, _ in play.shard.payloads[1].segment_summary()] == [0, 1]
        assert [(pulled.version, pulled.ok) for pulled in play.scheduler.pulled] == [(0, True), (1, True)]


async def test_a_group_under_way_when_a_rollback_takes_the_weights_back_is_released_and_the_worker_continues(
    short_dir: Path,
) -> None:
    async with playing(short_dir, Paced(tokens=10**6)) as play:
        await loaded(play)
        play.scheduler.order(pull(1))
        await loaded(play, 1)
        play.scheduler.order(assign(1))
        await until(lambda: play.engine.stats().generated_tokens > 20)
        play.scheduler.order(pull(0))  # the newest version that survives a rollback
        await loaded(play)
        written = play.engine.stats().generated_tokens
        await until(lambda: play.engine.stats().generated_tokens > written + 20)
        play.scheduler.order(Interrupt(lease=LeaseId(1)), assign(2))
        await until(lambda: len(play.scheduler.released) == 1)
        assert "segments goes back" in play.scheduler.released[0].detail
        assert play.scheduler.released[0].why is ReleaseWhy.ABORTED
        play.scheduler.order(Interrupt(lease=LeaseId(2)))
        await until(lambda: 2 in play.shard.payloads)
        await until(lambda: play.scheduler.held == [])


async def test_a_version_that_cannot_be_had_is_reported_and_the_old_one_stays(short_dir: Path) -> None:
    async with playing(short_dir) as play:
        await loaded(play)
        play.weights.refused = Version(5)
        play.scheduler.order(pull(5), assign(1))
        await until(lambda: 1 in play.shard.payloads)
        await until(lambda: len(play.scheduler.pulled) == 2)
        assert [(pulled.version, pulled.ok) for pulled in play.scheduler.pulled] == [(0, True), (5, False)]
        assert play.scheduler.reports[-1].stats.version == 0


async def test_weights_that_do_not_fit_the_model_are_named_and_reported_and_the_old_ones_go_on(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*_: object) -> None:
        raise LoadError("tensor lm_head.weight is missing")

    async with playing(short_dir) as play:
        await loaded(play)
        monkeypatch.setattr(play.engine, "load", refuses)
        play.scheduler.order(pull(1), assign(1), assign(2, version=1))
        await until(lambda: 1 in play.shard.payloads and play.scheduler.released)
        assert [(pulled.version, pulled.ok) for pulled in play.scheduler.pulled] == [(0, True), (1, False)]
        assert [op.detail for op in play.scheduler.released] == ["group 2: version 1 is not loaded here"]
        assert "version 1 of lineage 0 not loaded: tensor lm_head.weight is missing" in caplog.text
        await until(lambda: play.scheduler.held == [])


async def test_no_group_is_written_with_weights_older_than_its_lease_names(short_dir: Path) -> None:
    async with playing(short_dir) as play:
        await loaded(play)
        play.scheduler.order(assign(1, version=3))
        await until(lambda: play.scheduler.released)
        assert play.scheduler.released[0].detail == "group 1: version 3 is not loaded here"
        assert play.shard.payloads == {}


async def test_a_group_leased_at_weights_that_are_on_their_way_waits_for_them(short_dir: Path) -> None:
    async with playing(short_dir, Paced(tokens=10**6), drain=True) as play:
        await loaded(play)
        play.scheduler.order(assign(1))
        await until(lambda: play.engine.stats().generated_tokens > 20)
        play.scheduler.order(assign(2, version=1), assign(3, version=2), pull(1))  # 1 is loaded once group 1 has ended
        await until(lambda: play.scheduler.released)
        assert [op.group for op in play.scheduler.released] == [3]
        play.scheduler.order(Interrupt(lease=LeaseId(1)))
        await loaded(play, 1)
        play.scheduler.order(Interrupt(lease=LeaseId(2)))
        await until(lambda: 2 in play.shard.payloads)
        assert [version for _, version, _ in play.shard.payloads[2].segment_summary()] == [1]


async def test_an_engine_that_hangs_stops_the_renewals_and_goes_on_when_it_returns(short_dir: Path) -> None:
    async with playing(short_dir) as play:
        await loaded(play)
        play.engine.gate.clear()
        play.scheduler.order(assign(1))
        await until(lambda: play.scheduler.held == [1])
        await until(lambda: play.runner.stuck_s() > STUCK_TIMEOUT_S)
        count = len(play.scheduler.reports)
        await asyncio.sleep(1.0)
        assert len(play.scheduler.reports) <= count + 1  # this scheduler replies twenty times a second
        play.engine.gate.set()
        await until(lambda: 1 in play.shard.payloads and play.scheduler.held == [])


async def test_an_engine_that_fails_ends_the_worker_and_its_groups_are_named(
    short_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with playing(short_dir) as play:
        await loaded(play)
        play.engine.error = RuntimeError("out of memory")
        play.scheduler.order(assign(1), assign(4))
        with pytest.raises(EngineError, match="out of memory"):
            await asyncio.wait_for(play.running, 60)
        assert f"engine of {ME} failed, releasing the leases of its groups: 1, 4" in caplog.text


@pytest.mark.parametrize(("code", "error"), [(Code.FENCED, ConfigError), (Code.DENIED, Refused)])
async def test_a_worker_that_the_run_does_not_know_any_more_ends(
    short_dir: Path, code: Code, error: type[Exception]
) -> None:
    async with playing(short_dir) as play:
        await loaded(play)
        play.scheduler.refuse = code
        with pytest.raises(error, match="said the test"):
            await asyncio.wait_for(play.running, 60)


async def test_a_drained_run_lets_the_worker_finish_what_it_holds(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("staleflow.clients.rollout.session.DRAIN_TIMEOUT_S", 60.0)
    async with playing(short_dir) as play:
        await loaded(play)
        play.scheduler.order(assign(1), assign(2), drain=True)
        await asyncio.wait_for(play.running, 60)
        assert sorted(play.shard.payloads) == [1, 2]


async def test_a_drained_run_does_not_keep_a_worker_whose_groups_never_end(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("staleflow.clients.rollout.session.DRAIN_TIMEOUT_S", 0.2)
    async with playing(short_dir, Paced(tokens=10**6)) as play:
        await loaded(play)
        play.scheduler.order(assign(1), drain=True)
        await asyncio.wait_for(play.running, 60)
        assert play.shard.payloads == {}


async def test_a_worker_that_leaves_delivers_what_is_done_and_says_goodbye(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("staleflow.clients.rollout.session.LEAVE_TIMEOUT_S", 60.0)
    async with playing(short_dir, Paced(tokens=10**6)) as play:
        await loaded(play)
        play.scheduler.order(assign(1), assign(2))
        await until(lambda: play.engine.stats().generated_tokens > 20)
        play.shard.hold = True
        play.scheduler.order(Interrupt(lease=LeaseId(1)))
        await until(lambda: play.shard.pushes)
        play.running.cancel()
        leaving = asyncio.ensure_future(play.worker.leave("SIGTERM"))
        await asyncio.sleep(0.05)
        assert play.scheduler.detached == []
        play.shard.answer(play.shard.pushes[0])
        await asyncio.wait_for(leaving, 60)
        assert play.scheduler.detached == ["SIGTERM"]
        assert list(play.shard.payloads) == [1]


async def test_a_scheduler_that_is_away_is_waited_for_while_the_engine_goes_on(short_dir: Path) -> None:
    async with playing(short_dir, Paced(tokens=3000), limits=TransportLimits()) as play:
        await loaded(play)
        play.scheduler.order(assign(1))
        await until(lambda: play.scheduler.held == [1])
        await play.stop_scheduler()
        await until(lambda: 1 in play.shard.payloads)
        play.start_scheduler()
        play.scheduler.order(assign(2))
        await until(lambda: 2 in play.shard.payloads)
        await until(lambda: play.scheduler.held == [])
