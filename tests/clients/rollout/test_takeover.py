"""Clients hand over started groups and continue those of others, with real servers, trainers and workers."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import staleflow
from staleflow.clients.attachment import attach_within
from staleflow.clients.rollout.client import AsyncRolloutClient, RolloutClient
from staleflow.clients.rollout.engines.base import Sampling
from staleflow.clients.rollout.engines.simulated import SimulatedEngine
from staleflow.clients.rollout.engines.thread import EngineThread
from staleflow.clients.rollout.groups import PartialGroup, Recipe, payload, trajectories
from staleflow.clients.rollout.main import text_bytes
from staleflow.clients.rollout.samples import Lease, LeaseError, LoadedDuring, Prefix, Sample
from staleflow.clients.rollout.takeover import Takeover
from staleflow.clients.rollout.worker import Worker
from staleflow.clients.trainer.async_client import AsyncTrainerClient
from staleflow.clients.weights import Puller
from staleflow.configs.simulation import Simulated
from staleflow.net.client import worker_id
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code, ReleaseWhy
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Version
from staleflow.protocols.coordination import migration
from staleflow.protocols.coordination.view import Move, Snapshot
from staleflow.protocols.wire.messages import Attach, ModelLimits, Operations, RegisterRelease, Results
from staleflow.protocols.wire.typed_columns import TypedColumn
from tests.clients.rollout.test_client import PROMPT, SAMPLE, client, served, stored, taken
from tests.servers.running import WEIGHTS, Run, StageWorker, eventually

ENDED = replace(SAMPLE, versions=0)
UNFINISHED = Sample(token_ids=[7], logprobs=[-0.75], versions=0, finish="interrupted")
NOT_STARTED = Sample(token_ids=[], logprobs=[], finish="interrupted")
HALF = [ENDED, UNFINISHED]


async def at_version(run: Run, client: AsyncRolloutClient, version: int) -> list[Lease]:
    """Wait until the scheduler knows that the client has a version; return the leases that it took meanwhile."""
    leases: list[Lease] = []

    async def reported() -> bool:
        leases.extend(await client.take(64, timeout_s=0))
        workers = (await run.status(run.where.scheduler))["instances"]
        return any((worker["name"], worker["version"]) == (client.name, version) for worker in workers)

    await eventually(reported)
    return leases


async def arrived(client: AsyncRolloutClient, group: int) -> Lease:
    """Return the lease with which a client gets this group."""
    async with asyncio.timeout(30):
        while True:
            for lease in await client.take(64):
                if lease.group == group:
                    return lease


async def moves(run: Run) -> int:
    return int((await run.status(run.where.scheduler))["totals"]["moves"])


async def test_half_a_group_continues_elsewhere_and_the_trainer_gets_the_version_of_each_token(
    short_dir: Path,
) -> None:
    run = Run(short_dir)
    try:
        run.scheduler()
        run.trajectories()
        run.parameters()
        async with AsyncTrainerClient(run.where.scheduler) as trainer, asyncio.timeout(60):
            await trainer.join(0, 0)  # type: ignore[arg-type]
            await trainer.publish_initial(WEIGHTS)
            async with client(run, "a", capacity=3) as a, client(run, "b", capacity=8) as b:
                first, second, moving = await taken(a, 3)
                others = await taken(b)
                stage = StageWorker(run)
                for lease in (first, second):
                    assert await a.push(lease, PROMPT, [SAMPLE] * 2)
                    await stage.finish((await stage.take())[0])
                batches = trainer.batches(2)
                await anext(batches)
                await trainer.commit(WEIGHTS)
                others += await at_version(run, b, 1)

                assert await a.partial(moving, PROMPT, HALF)
                assert moving.ended
                lease = await arrived(b, moving.group)
                assert lease.id > moving.id
                assert (lease.min_version, lease.max_version) == (0, 2)
                assert lease.seeds == moving.seeds, "the samples continue with the seeds that started them"
                assert np.asarray(lease.prompt_ids).tolist() == PROMPT
                ended, unfinished = lease.samples
                assert (ended.finish, list(ended.token_ids), list(ended.logprobs)) == ("stop", [4, 5], [-0.5, -0.25])
                assert (unfinished.finish, list(unfinished.token_ids)) == ("interrupted", [7])

                finished = replace(unfinished, token_ids=[7, 9], logprobs=[-0.75, -0.5], versions=None, finish="length")
                assert await b.push(lease, PROMPT, [ended, finished])
                assert await b.push(others[0], PROMPT, [ENDED] * 2)
                for _ in range(2):
                    await stage.finish((await stage.take(1))[0])
                batch = await anext(batches)
        rows = batch.group_ids == moving.group
        assert batch.token_versions[rows].tolist() == [[-1, -1, -1, 0, 0], [-1, -1, -1, 0, 1]]
        assert batch.input_ids[rows].tolist() == [[*PROMPT, 4, 5], [*PROMPT, 7, 9]]
        assert batch.behavior_logprobs[rows].tolist() == [[0, 0, 0, -0.5, -0.25], [0, 0, 0, -0.75, -0.5]]
        assert batch.cut[rows].tolist() == [False, True]
    finally:
        await run.close()
    assert staleflow.Trace.open(short_dir).check().ok


MISTAKES: list[tuple[list[Sample], str]] = [
    ([UNFINISHED], "1 samples; it must have 2, as rollout.group_size says"),
    ([ENDED, replace(UNFINISHED, logprobs=[])], "sample 1: 0 logprobs; it must have 1, one a token"),
    ([replace(ENDED, versions=[0]), UNFINISHED], "sample 0: 1 versions; it must have 2, one a token"),
    ([ENDED, replace(UNFINISHED, versions=7)], "sample 1: version 7 was not loaded while the lease was held"),
    (
        [ENDED, replace(UNFINISHED, token_ids=[1] * 9, logprobs=[-1.0] * 9)],
        "sample 1: 9 tokens; rollout.max_new_tokens allows 8",
    ),
    (
        [ENDED, replace(UNFINISHED, token_ids=[1] * 8, logprobs=[-1.0] * 8)],
        'sample 1: 8 tokens and not finished; rollout.max_new_tokens allows 8, so its finish is "length"',
    ),
    ([replace(ENDED, loss_mask=[1, 0]), UNFINISHED], "sample 0: loss_mask has a 0; samples with such tokens do not"),
]


async def test_samples_that_do_not_match_their_lease_are_named_and_can_be_corrected(short_dir: Path) -> None:
    async with served(short_dir, rollout={"max_new_tokens": 8}) as (run, _), client(run, "a") as a:
        (lease,) = await taken(a)
        async with client(run, "b") as b:
            await at_version(run, b, 0)
            for samples, text in MISTAKES:
                with pytest.raises(LeaseError) as caught:
                    await a.partial(lease, PROMPT, samples)
                assert text in str(caught.value)
                assert f"lease {lease.id} of group {lease.group}" in str(caught.value)
            assert not lease.ended
            assert await a.partial(lease, PROMPT, [ENDED, NOT_STARTED])
            assert [len(sample.token_ids) for sample in (await arrived(b, lease.group)).samples] == [2, 0]


async def test_a_partial_group_that_the_run_refuses_costs_its_own_lease_at_most(short_dir: Path) -> None:
    async with (
        served(short_dir, ModelLimits(vocabulary=100)) as (run, _),
        client(run, "a", capacity=2) as a,
        client(run, "b", capacity=8) as b,
    ):
        first, second = await taken(a, 2)
        await at_version(run, b, 0)
        text = f"lease {first.id} of group {first.group}: token_ids holds 100; the model's vocabulary has 100 tokens"
        with pytest.raises(Refused, match=text) as caught:
            await a.partial(first, PROMPT, [ENDED, replace(UNFINISHED, token_ids=[100])])
        assert caught.value.code is Code.MALFORMED
        assert (first.ended, await moves(run)) == (False, 0)
        assert await a.push(second, PROMPT, [ENDED] * 2)
        assert await a.partial(first, PROMPT, HALF), "it is still held and can be corrected"
        assert await moves(run) == 1


async def test_a_lease_that_is_over_or_unknown_moves_nothing(short_dir: Path) -> None:
    async with served(short_dir) as (run, _), client(run, "a", capacity=3) as a, client(run, "b", capacity=8) as b:
        first, second, third = await taken(a, 3)
        await at_version(run, b, 0)
        with pytest.raises(LeaseError, match=f"lease {first.id} of group {first.group} is not held by b"):
            await b.partial(first, PROMPT, HALF)
        release = RegisterRelease(group=first.group, lease=first.id, why=ReleaseWhy.ABORTED, detail="said the test")
        other = run.client(run.where.scheduler, worker_id("shard"))
        assert (await other.ask(Operations(ops=[release]), Results)).results[0].code is None
        assert await a.partial(first, PROMPT, HALF), "the run took the lease back"
        assert (first.ended, await moves(run)) == (True, 0)
        assert await a.partial(second, PROMPT, HALF)
        for call in (a.partial, a.push):
            with pytest.raises(LeaseError, match="each is pushed, handed over or released once"):
                await call(second, PROMPT, HALF)
        assert await moves(run) == 1
        assert await a.push(third, PROMPT, [ENDED] * 2)


async def test_a_group_that_no_other_worker_can_take_stays_and_may_leave_later_with_more_tokens(
    short_dir: Path,
) -> None:
    async with served(short_dir) as (run, _), client(run, "a") as a:
        (lease,) = await taken(a)
        assert not await a.partial(lease, PROMPT, HALF)
        assert not lease.ended
        lease.interrupted = True  # the run wants the tokens so far, so the group stays
        async with client(run, "b", capacity=8) as b:
            await at_version(run, b, 0)
            assert not await a.partial(lease, PROMPT, HALF)
            lease.interrupted = False
            assert await a.partial(lease, PROMPT, [ENDED, replace(UNFINISHED, token_ids=[7, 8], logprobs=[-1, -1])])
            assert list((await arrived(b, lease.group)).samples[1].token_ids) == [7, 8]


async def test_a_group_waits_for_a_place_at_a_worker_that_is_full(short_dir: Path) -> None:
    async with served(short_dir) as (run, _), client(run, "a") as a:
        (lease,) = await taken(a)
        async with client(run, "b", capacity=1) as b:
            (own,) = await at_version(run, b, 0) or await taken(b)
            assert not await a.partial(lease, PROMPT, HALF, timeout_s=0)
            assert not lease.ended
            handing = asyncio.ensure_future(a.partial(lease, PROMPT, HALF, timeout_s=30))
            await asyncio.sleep(0)
            with pytest.raises(LeaseError, match="is not held by a"):
                await a.push(lease, PROMPT, [ENDED] * 2)
            assert await b.push(own, PROMPT, [ENDED] * 2)
            assert await handing
            assert (await arrived(b, lease.group)).samples


def forced(snapshot: Snapshot, gap: float, given: Collection[Any]) -> list[Move]:
    """Move every group to the other worker once it has been in one place for a moment."""
    return [
        Move(group=flight.group, lease=flight.lease, worker=flight.worker, to=instance.worker)
        for flight in snapshot.flights
        for instance in snapshot.instances
        if instance.worker != flight.worker and instance.version >= 0 and flight.age_ms > 100
    ]


async def test_a_client_learns_that_the_run_orders_a_move(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(migration.MIGRATIONS, "idle", forced)
    async with (
        served(short_dir, coordination={"migration": "idle"}) as (run, _),
        client(run, "a", capacity=1) as a,
        client(run, "b", capacity=1) as b,
    ):
        (lease,) = await taken(a)
        ordered = asyncio.Event()
        lease.on_change = ordered.set
        await at_version(run, b, 0)  # its capacity is used up, so only an ordered move brings it another group
        async with asyncio.timeout(30):
            await ordered.wait()
        assert (lease.move_ordered, lease.ended) == (True, False)
        assert await a.partial(lease, PROMPT, HALF)
        assert [list(sample.token_ids) for sample in (await arrived(b, lease.group)).samples] == [[4, 5], [7]]


@asynccontextmanager
async def shipped(run: Run, engine: SimulatedEngine) -> AsyncGenerator[Worker]:
    """The rollout worker that ``staleflow attach rollout`` runs."""
    me = worker_id("rollout-0")
    scheduler = run.client(run.where.scheduler, me)
    attached = await attach_within(30, scheduler, Attach(worker=me, name="rollout-0", role="rollout", capacity=8))
    shards = [run.client(address, me) for address in attached.shards]
    puller, runner = Puller(run.where.parameters, worker=me), EngineThread(engine)
    worker = Worker(me, scheduler, shards, puller, runner, text_bytes, Recipe.of(run.config))
    running = asyncio.ensure_future(worker.run())
    try:
        yield worker
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await worker.leave("the test is over")
        await runner.close()
        puller.close()


REDUNDANT = {"redundancy": {"samples": 1.5}, "max_new_tokens": 100_000}


async def test_the_shipped_worker_continues_what_a_client_hands_over(short_dir: Path) -> None:
    async with (
        served(short_dir, rollout=REDUNDANT) as (run, _),
        client(run, "a", capacity=1) as a,
        shipped(run, SimulatedEngine(Simulated(mean_tokens=20, k2=1e-4))),
    ):
        (lease,) = await taken(a)
        prompt = list(lease.row["prompt"].encode())
        samples = [UNFINISHED, replace(ENDED, token_ids=[4, 5])]
        await eventually(lambda: a.partial(lease, prompt, samples))  # once the worker has loaded the version
        async with asyncio.timeout(30):
            while lease.group not in (payloads := await stored(run)):
                pass
    pushed = payloads[lease.group]
    starts = [0, *np.cumsum(pushed.lengths).tolist()]
    began = [pushed.token_ids[start : start + 2].tolist() for start in starts[:-1]]
    assert [4, 5] in began, "the finished sample is one of the group"
    assert pushed.num_samples == 2
    assert pushed.segment_summary() == [(0, 0, pushed.num_tokens)]


async def test_a_client_continues_what_the_shipped_worker_started(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(migration.MIGRATIONS, "idle", forced)
    endless = SimulatedEngine(Simulated(mean_tokens=10**5, sigma=0.0, k2=2e-3))
    async with (
        served(short_dir, rollout=REDUNDANT, coordination={"migration": "idle"}) as (run, _),
        shipped(run, endless),
        client(run, "b", capacity=1) as b,
    ):
        async with asyncio.timeout(30):
            while not (lease := (await b.take())[0]).samples or not all(len(s.token_ids) for s in lease.samples):
                continue  # a group of its own, or one that the other worker has not started yet
        assert bytes(np.asarray(lease.prompt_ids).tolist()).decode() == lease.row["prompt"]
        assert [sample.finish for sample in lease.samples] == ["interrupted"] * 2
        finished = [
            Sample(token_ids=[*sample.token_ids, 0], logprobs=[*sample.logprobs, -1.0], finish="stop")
            for sample in lease.samples
        ]
        assert await b.push(lease, np.asarray(lease.prompt_ids), finished)
        pushed = (await stored(run))[lease.group]
    assert pushed.token_ids.tolist() == [int(token) for sample in finished for token in sample.token_ids]
    assert pushed.logprobs.tolist() == [float(value) for sample in finished for value in sample.logprobs]


async def test_the_blocking_client_hands_over_and_takes_over(short_dir: Path) -> None:
    def hand_over(address: str) -> Lease:
        with RolloutClient(address, lambda _: None, name="a", capacity=1) as a:
            (lease,) = a.take()
            other_may_come.set()
            assert other_is_ready.wait(30)
            assert a.partial(lease, PROMPT, HALF)
            return lease

    other_may_come, other_is_ready = threading.Event(), threading.Event()
    async with served(short_dir) as (run, _):
        handing = asyncio.create_task(asyncio.to_thread(hand_over, run.where.scheduler))
        await asyncio.to_thread(other_may_come.wait, 30)
        async with client(run, "b", capacity=8) as b:
            await at_version(run, b, 0)
            other_is_ready.set()
            lease = await arrived(b, (await handing).group)
            assert [list(sample.token_ids) for sample in lease.samples] == [[4, 5], [7]]


def test_redundant_samples_and_typed_columns_survive_two_handovers() -> None:
    """Three samples are started for a group of two; the caller works on the finished one and the first other one."""
    experts = TypedColumn(name="experts", per="token", dtype="int32", shape=(2,))
    score = TypedColumn(name="score", per="sample", dtype="float32")
    recipe = Recipe(group_size=2, started=3, sampling=Sampling(max_new_tokens=9), seed=0, columns=(experts, score))
    lease = Lease(
        group=GroupId(1),
        id=LeaseId(5),
        row={},
        lineage=Lineage(0),
        min_version=Version(0),
        max_version=None,
        group_size=2,
        sampling=recipe.sampling,
        seeds=(1, 2),
    )
    begun = replace(UNFINISHED, columns={"experts": [[7, 0]]})
    ended = replace(ENDED, columns={"experts": [[4, 0], [5, 0]], "score": 0.5})
    loaded = LoadedDuring([(Lineage(0), Version(0))])
    group = Takeover.none(lease.id, recipe).partial(lease, PROMPT, [begun, ended], loaded, recipe)
    one, two, three = trajectories(group.payload, recipe.columns)
    moved = payload(group.payload.prompt_ids, [one, three, two], recipe.columns, unfinished=True)
    first = Takeover.of(PartialGroup(origin=group.origin, payload=moved), recipe)
    assert [sample.finish for sample in first.samples()] == ["interrupted", "stop"]
    assert [sorted(sample.columns) for sample in first.samples()] == [["experts"], ["experts", "score"]]

    continued = replace(
        first.samples()[0], token_ids=[7, 8], logprobs=[-0.75, -1], versions=None, columns={"experts": [[7, 0], [8, 1]]}
    )
    loaded = LoadedDuring([(Lineage(0), Version(1))], first.prefixes())
    group = first.partial(lease, PROMPT, [continued, first.samples()[1]], loaded, recipe)
    assert (group.origin, group.payload.lengths.tolist()) == (5, [2, 0, 2])
    assert group.payload.segments.tolist() == [[0, 0, 0, 1], [0, 0, 1, 1], [2, 0, 0, 2]]
    assert group.payload.columns["token/experts"].tolist() == [[7, 0], [8, 1], [4, 0], [5, 0]]
    assert group.payload.columns["sample/score"].tolist() == [0, 0, 0.5]


PREFIXES = [
    Prefix(np.array(tokens, np.int32), np.array(logprobs, np.float32), [(Lineage(0), Version(0), len(tokens))])
    for tokens, logprobs in (([7], [-0.75]), ([7, 8], [-0.75, -0.5]))
]


@pytest.mark.parametrize(
    ("tokens", "logprobs", "segments"),
    [
        pytest.param([7, 9], [-0.75, -1], [(0, 0, 1), (0, 1, 1)], id="continued"),
        pytest.param([7, 8, 9], [-0.75, -0.5, -1], [(0, 0, 2), (0, 1, 1)], id="the longest counts, in any order"),
        pytest.param([7, 8], [-0.75, -0.5], [(0, 0, 2)], id="nothing added"),
        pytest.param([7, 8], [-0.7, -0.5], [(0, 1, 2)], id="generated again with the same first tokens"),
        pytest.param([6, 8], [-0.75, -0.5], [(0, 1, 2)], id="generated again"),
    ],
)
def test_tokens_that_were_taken_over_keep_their_version(
    tokens: list[int], logprobs: list[float], segments: list[tuple[int, int, int]]
) -> None:
    loaded = LoadedDuring([(Lineage(0), Version(1))], PREFIXES)
    written = loaded.implied(np.array(tokens, np.int32), np.array(logprobs, np.float32), "sample 0")
    assert written == segments
