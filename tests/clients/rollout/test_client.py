"""A client generates groups for real servers, in both of its forms, and its mistakes cost only its own leases."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import staleflow
from staleflow.clients.rollout.client import AsyncRolloutClient, RolloutClient
from staleflow.clients.rollout.samples import Lease, LeaseError, Sample
from staleflow.clients.weights import PulledVersion
from staleflow.configs.errors import ConfigError
from staleflow.net.client import worker_id
from staleflow.net.errors import Refused, Unavailable
from staleflow.protocols.consistency.effects import Code, ReleaseWhy
from staleflow.protocols.consistency.ids import LeaseId, Version
from staleflow.protocols.wire.messages import (
    Done,
    Drain,
    InstanceStats,
    ModelLimits,
    Operations,
    RegisterRelease,
    Results,
)
from staleflow.protocols.wire.tensors import unpack
from staleflow.protocols.wire.trajectory import GroupPayload
from tests.servers.running import WEIGHTS, Run, StageWorker, Trainer, eventually

PROMPT = [1, 2, 3]
SAMPLE = Sample(token_ids=[4, 5], logprobs=[-0.5, -0.25], finish="stop")
GROUP = [SAMPLE, replace(SAMPLE, token_ids=[6], logprobs=[-1.0], finish="length")]


@asynccontextmanager
async def served(
    folder: Path, model: ModelLimits | None = None, **sections: Any
) -> AsyncGenerator[tuple[Run, Trainer]]:
    """Real servers, and a trainer that has published version 0."""
    run = Run(folder, **sections)
    try:
        run.scheduler()
        run.trajectories()
        run.parameters()
        trainer = await run.trainer(model=model or ModelLimits())
        await trainer.publish(0, WEIGHTS)
        yield run, trainer
    finally:
        await run.close()


def ignore(_: PulledVersion) -> None:
    """Load nothing."""


def client(run: Run, name: str = "foreign", **options: Any) -> AsyncRolloutClient:
    return AsyncRolloutClient(run.where.scheduler, options.pop("load", ignore), name=name, **options)


async def taken(client: AsyncRolloutClient, count: int = 1) -> list[Lease]:
    leases: list[Lease] = []
    async with asyncio.timeout(30):
        while len(leases) < count:
            leases += await client.take(count - len(leases))
    return leases


async def stored(run: Run) -> dict[int, GroupPayload]:
    """Return the payloads that a stage worker gets, by group."""
    items, frames = await StageWorker(run).take()
    return {item.group: GroupPayload.from_arrays(unpack(frame)) for item, frame in zip(items, frames, strict=True)}


async def test_a_lease_names_all_that_an_engine_needs_and_its_group_is_stored_as_pushed(short_dir: Path) -> None:
    loaded: list[tuple[int, dict[str, Any]]] = []

    async def load(weights: PulledVersion) -> None:
        loaded.append((weights.version, {name: np.array(array) for name, array in weights.arrays().items()}))

    async with served(short_dir) as (run, _), client(run, load=load, capacity=2) as foreign:
        (lease,) = await taken(foreign)
        assert lease.row == {"prompt": f"{lease.group} + 1", "answer": lease.group + 1}
        assert (lease.min_version, lease.max_version, lease.deadline, lease.group_size) == (0, 2, 2, 2)
        assert (lease.sampling.max_new_tokens, lease.sampling.temperature) == (100_000, 1.0)
        assert len(set(lease.seeds)) == lease.group_size
        assert foreign.config == run.config
        ((version, tensors),) = loaded
        assert (version, foreign.version) == (0, 0)
        assert {name: array.tolist() for name, array in tensors.items()} == {n: a.tolist() for n, a in WEIGHTS.items()}
        assert await foreign.push(lease, PROMPT, GROUP)
        assert lease.ended
        payload = (await stored(run))[lease.group]
    assert payload.prompt_ids.tolist() == PROMPT
    assert payload.lengths.tolist() == [2, 1]
    assert payload.token_ids.tolist() == [4, 5, 6]
    assert payload.logprobs.tolist() == [-0.5, -0.25, -1.0]
    assert payload.loss_mask.tolist() == [1, 1, 1]
    assert payload.segments.tolist() == [[0, 0, 0, 2], [1, 0, 0, 1]]
    assert payload.finish.tolist() == [0, 1]


async def test_the_groups_of_a_client_are_trained_and_its_next_leases_have_the_next_version(short_dir: Path) -> None:
    async with served(short_dir) as (run, trainer), client(run) as foreign:
        pushed = await taken(foreign, 2)
        for lease in pushed:
            assert await foreign.push(lease, PROMPT, GROUP)
        stage = StageWorker(run)
        items, _ = await stage.take()
        await stage.finish(items)
        batch = await trainer.next_batch(0)
        assert sorted(member.lease for member in batch.members) == sorted(lease.id for lease in pushed)
        await trainer.publish(1, WEIGHTS, batch.batch)
        async with asyncio.timeout(30):
            while (lease := (await foreign.take())[0]).min_version == 0:
                await foreign.release(lease, "it was leased before the step")
        assert foreign.version == 1


async def test_the_blocking_client_loads_in_the_thread_that_takes(short_dir: Path) -> None:
    threads: list[threading.Thread] = []

    def load(_: PulledVersion) -> None:
        threads.append(threading.current_thread())

    def work(address: str) -> LeaseId:
        with RolloutClient(address, name="foreign") as foreign:
            foreign.load = load
            lease = next(foreign.leases())
            assert foreign.push(lease, PROMPT, GROUP)
            assert threads == [threading.current_thread()]
            foreign.release(foreign.take()[0], "the test needs no more")
            return lease.id

    async with served(short_dir) as (run, _):
        lease = await asyncio.to_thread(work, run.where.scheduler)
        items, _ = await StageWorker(run).take()
        assert [item.lease for item in items] == [lease]
        status = await run.status(run.where.scheduler)
        assert [worker["name"] for worker in status["workers"] if worker["role"] == "rollout"] == []


MISTAKES: list[tuple[list[Sample], str]] = [
    ([SAMPLE], "1 samples; it must have 2, as rollout.group_size says"),
    ([SAMPLE, replace(SAMPLE, logprobs=[-0.5])], "sample 1: 1 logprobs; it must have 2, one a token"),
    (
        [replace(SAMPLE, versions=7), SAMPLE],
        "sample 0: version 7 was not loaded while the lease was held; it must be 0",
    ),
    ([replace(SAMPLE, versions=[0, 7]), SAMPLE], "sample 0: version 7 was not loaded"),
    ([replace(SAMPLE, versions=[0]), SAMPLE], "sample 0: 1 versions; it must have 2, one a token"),
    ([replace(SAMPLE, finish="eos"), SAMPLE], "finish is 'eos'; it must be one of stop, length, interrupted"),  # type: ignore[arg-type]
    ([replace(SAMPLE, token_ids=[1.5, 2]), SAMPLE], "token_ids is not a list of int32 numbers"),  # type: ignore[list-item]
    ([replace(SAMPLE, token_ids=[1 << 40, 2]), SAMPLE], "a number that int32 cannot hold"),
    ([replace(SAMPLE, token_ids=[-1, 2]), SAMPLE], "token_ids holds -1; a token id is at least 0"),
    ([replace(SAMPLE, logprobs=[0.5, -1.0]), SAMPLE], "logprobs holds 0.5; a log-probability is at most 0"),
    ([replace(SAMPLE, token_ids=[1] * 9, logprobs=[-1.0] * 9), SAMPLE], "9 tokens; rollout.max_new_tokens allows 8"),
]


async def test_a_group_that_does_not_match_its_lease_is_named_and_can_be_corrected(short_dir: Path) -> None:
    async with served(short_dir, rollout={"max_new_tokens": 8}) as (run, _), client(run) as foreign:
        (lease,) = await taken(foreign)
        for samples, text in MISTAKES:
            with pytest.raises(LeaseError) as caught:
                await foreign.push(lease, PROMPT, samples)
            assert text in str(caught.value)
            assert f"lease {lease.id} of group {lease.group}" in str(caught.value)
        with pytest.raises(LeaseError, match="prompt_ids is not a list of int32 numbers"):
            await foreign.push(lease, "text", GROUP)  # type: ignore[arg-type]
        assert await foreign.push(lease, PROMPT, GROUP)


async def test_a_lease_that_the_client_does_not_have_is_refused_by_name(short_dir: Path) -> None:
    async with served(short_dir) as (run, _), client(run, capacity=2) as foreign, client(run, "other") as other:
        first, second = await taken(foreign, 2)
        assert await foreign.push(first, PROMPT, GROUP)
        with pytest.raises(LeaseError, match=rf"lease {first.id} .* not held by foreign: it has .*{second.id}"):
            await foreign.push(first, PROMPT, GROUP)
        with pytest.raises(LeaseError, match="is not held by other: it has"):
            await other.push(second, PROMPT, GROUP)
        await foreign.release(second, "no reason")
        with pytest.raises(LeaseError, match="each is pushed, handed over or released once"):
            await foreign.release(second, "no reason")


async def test_a_group_that_the_run_rejects_costs_its_own_lease_only(short_dir: Path) -> None:
    async with served(short_dir, ModelLimits(vocabulary=100)) as (run, _), client(run, capacity=2) as foreign:
        first, second = await taken(foreign, 2)
        with pytest.raises(Refused, match="token_ids holds 100; the model's vocabulary has 100 tokens") as caught:
            await foreign.push(first, PROMPT, [replace(SAMPLE, token_ids=[100, 1]), SAMPLE])
        assert caught.value.code is Code.MALFORMED
        assert await foreign.push(second, PROMPT, GROUP)
        (third,) = await taken(foreign)
        assert await foreign.push(third, PROMPT, GROUP)


async def test_a_released_group_is_leased_again(short_dir: Path) -> None:
    async with served(short_dir, prompts={"epochs": 1}) as (run, _), client(run, capacity=1) as foreign:
        (lease,) = await taken(foreign)
        await foreign.release(lease, "the engine is busy")
        assert lease.ended
        async with asyncio.timeout(30):
            while (again := (await taken(foreign))[0]).group != lease.group:
                assert await foreign.push(again, PROMPT, GROUP)
                items, _ = await (stage := StageWorker(run)).take()
                await stage.finish(items)
        assert again.id > lease.id


async def test_a_lease_that_is_held_for_too_long_is_released(short_dir: Path) -> None:
    async with served(short_dir) as (run, _), client(run, capacity=1, max_lease_s=2.0) as foreign:
        (lease,) = await taken(foreign)
        changes: list[bool] = []
        late = lease.ended  # if this process stood still after the lease was taken
        lease.on_change = lambda: changes.append(lease.ended)
        await eventually(lambda: _true(lease.ended))
        assert changes == ([] if late else [True])
        assert not await foreign.push(lease, PROMPT, GROUP), "its tokens are discarded"


async def test_a_group_whose_lease_the_run_took_back_is_discarded(short_dir: Path) -> None:
    async with served(short_dir) as (run, _), client(run, capacity=2) as foreign:
        first, second = await taken(foreign, 2)
        why = ReleaseWhy.ABORTED
        release = RegisterRelease(group=first.group, lease=first.id, why=why, detail="said the test")
        other = run.client(run.where.scheduler, worker_id("shard"))
        assert (await other.ask(Operations(ops=[release]), Results)).results[0].code is None
        assert not await foreign.push(first, PROMPT, GROUP)
        await eventually(lambda: _true(first.ended))
        assert await foreign.push(second, PROMPT, GROUP)


async def test_a_client_whose_name_another_process_takes_learns_it(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STALEFLOW_SLOT", "the same place")
    async with served(short_dir) as (run, _), client(run) as foreign:
        (lease,) = await taken(foreign)
        async with client(run):
            await eventually(lambda: _true(foreign.ended))
            with pytest.raises(ConfigError, match="a newer process has taken the name"):
                await taken(foreign, 100)
            with suppress(ConfigError):
                assert not await foreign.push(lease, PROMPT, GROUP)


async def _true(value: object) -> bool:
    return bool(value)


async def test_an_interrupted_lease_shows_it_and_its_tokens_so_far_are_trained(short_dir: Path) -> None:
    staleness = {"max_staleness": 1, "on_overdue": "truncate"}
    async with served(short_dir, staleness=staleness) as (run, trainer), client(run, capacity=4) as foreign:
        slow, *others, last = await taken(foreign, 4)
        stage = StageWorker(run)
        for lease in others:
            assert await foreign.push(lease, PROMPT, GROUP)
            await stage.finish((await stage.take())[0])
        await trainer.publish(1, WEIGHTS, (await trainer.next_batch(0)).batch)
        interrupted = asyncio.Event()
        slow.on_change = interrupted.set
        for lease in (last, *await taken(foreign)):  # enough for the batch, but no later step may train the slow one
            assert await foreign.push(lease, PROMPT, [replace(SAMPLE, versions=1)] * 2)
            await stage.finish((await stage.take())[0])
        batch = asyncio.ensure_future(trainer.next_batch(1))
        async with asyncio.timeout(30):
            await interrupted.wait()
        assert slow.interrupted
        assert not slow.ended
        assert await foreign.push(slow, PROMPT, [replace(SAMPLE, versions=[0, 1], finish="interrupted")] * 2)
        await stage.finish((await stage.take())[0])
        assert slow.id in [member.lease for member in (await batch).members]


async def test_versions_that_were_loaded_in_between_need_one_version_a_token(short_dir: Path) -> None:
    async with served(short_dir) as (run, trainer), client(run, capacity=3) as foreign:
        first, second, third = await taken(foreign, 3)
        stage = StageWorker(run)
        for lease in (first, second):
            assert await foreign.push(lease, PROMPT, GROUP)
        await stage.finish((await stage.take())[0])
        batch = await trainer.next_batch(0)
        await trainer.publish(1, WEIGHTS, batch.batch)
        await eventually(lambda: _loads(foreign, 1))
        with pytest.raises(LeaseError, match="versions is None, but 0, 1 were loaded"):
            await foreign.push(third, PROMPT, GROUP)
        assert await foreign.push(third, PROMPT, [replace(SAMPLE, versions=[0, 1]), replace(SAMPLE, versions=1)])
        assert (await stored(run))[third.group].segments.tolist() == [[0, 0, 0, 1], [0, 0, 1, 1], [1, 0, 1, 2]]


async def _loads(foreign: AsyncRolloutClient, version: int) -> bool:
    await foreign.take(timeout_s=0)
    return foreign.version == Version(version)


async def test_a_version_that_cannot_be_loaded_raises_and_is_not_reported_as_loaded(short_dir: Path) -> None:
    def fails(_: PulledVersion) -> None:
        raise ZeroDivisionError("planted")

    async with served(short_dir) as (run, _), client(run, load=fails) as foreign:
        with pytest.raises(ZeroDivisionError, match="planted"):
            await taken(foreign)
        assert foreign.version == -1
        foreign.load = ignore
        assert await taken(foreign)
        assert foreign.version == 0


async def test_the_numbers_that_a_client_reports_are_shown(short_dir: Path) -> None:
    async with served(short_dir) as (run, _), client(run) as foreign:
        foreign.report(InstanceStats(running=3, kv_capacity=77))
        await taken(foreign)

        async def shown() -> bool:
            (instance,) = (await run.status(run.where.scheduler))["instances"]
            return (instance["running"], instance["version"]) == (3, 0)

        await eventually(shown)


async def test_leases_end_when_the_run_drains(short_dir: Path) -> None:
    async with served(short_dir) as (run, _), client(run) as foreign:
        (lease,) = await taken(foreign)
        admin = run.client(run.where.scheduler, worker_id("admin"))
        await admin.ask(Drain(why="test"), Done)
        await foreign.release(lease, "the run drains")
        async with asyncio.timeout(50):
            async for lease in foreign.leases():
                await foreign.release(lease, "the run drains")
        assert foreign.ended


async def test_arguments_that_cannot_work_are_named(short_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"capacity is 0; it must be at least 1"):
        AsyncRolloutClient("ipc:///nowhere", name="x", capacity=0)
    with pytest.raises(ConfigError, match=r"it has no config\.json, so no run was started there"):
        AsyncRolloutClient(short_dir, name="x")
    nowhere = AsyncRolloutClient(f"ipc://{short_dir}/nothing", name="x", timeout_s=0.1)
    with pytest.raises(Unavailable, match="x waited for the run's servers to attach"):
        async with nowhere:
            pass
    async with served(short_dir) as (run, _):
        async with client(run, load=None) as foreign:
            with pytest.raises(ConfigError, match="load is missing; it must be a function that loads a version"):
                await taken(foreign)
        with pytest.raises(RuntimeError, match="use it with `with`"):
            RolloutClient(run.where.scheduler, name="x").take()
        with pytest.raises(ConfigError, match="reward"):
            async with client(run, name="reward-0"):
                pass
    assert staleflow.RolloutClient is RolloutClient
