"""A shard detects and reports every record hit by changed bytes in its store, and never serves wrong bytes."""

import asyncio
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import cast

import msgspec
import pytest

from staleflow.configs.loading.prompt_rows import PromptRows
from staleflow.configs.schema import Config, Prompts, Reward, Rollout
from staleflow.configs.trainer import Trainer
from staleflow.net.client import Client
from staleflow.net.endpoint import Call, Peer
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.codec import Data
from staleflow.protocols.wire.messages import (
    Expected,
    GetExpected,
    GetGroups,
    GetModelLimits,
    Groups,
    ModelLimits,
    Op,
    Operations,
    RegisterQuarantine,
    RegisterRelease,
    Reply,
    Request,
    Result,
    Results,
)
from staleflow.protocols.wire.tensors import arrays
from staleflow.servers.runner import Tasks
from staleflow.servers.trajectories.main import make_service
from staleflow.servers.trajectories.prompts import LoadedPrompts
from staleflow.servers.trajectories.records import Key
from staleflow.servers.trajectories.service import TrajectoryService
from staleflow.store.base import StoreCorrupt
from tests.servers.running import GROUP_SIZE, WEIGHTS, Run
from tests.servers.trajectories.damaged import Original, copied, named, opened, original
from tests.store.pages import harm_branches

COPIES = 100
GROUPS = 12
PAGE = 4096
SEED = 11


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Original:
    return original(tmp_path_factory.mktemp("store"), GROUPS)


@pytest.fixture(scope="module")
def mapped(tmp_path_factory: pytest.TempPathFactory) -> Original:
    return original(tmp_path_factory.mktemp("mapped"), GROUPS, mapped=True)


class Ledger:
    """A scheduler for which every group is occupied; records the groups that are given up."""

    def __init__(self) -> None:
        self.quarantined: list[int] = []

    async def ask(self, body: Request, *_: object, **__: object) -> Reply:
        if isinstance(body, GetExpected):
            return Expected(groups=[], shas=[])
        if isinstance(body, GetModelLimits):
            await self._other_model(body)
            return ModelLimits()
        assert isinstance(body, Operations)
        return Results(results=[self._one(op) for op in body.ops])

    async def _other_model(self, body: GetModelLimits) -> None:
        """Wait for a model other than the known one; none ever arrives."""
        if body.known is not None:
            await asyncio.Event().wait()

    def _one(self, op: Op) -> Result:
        if isinstance(op, RegisterQuarantine):
            self.quarantined.append(op.group)
        return Result(code=Code.STALE) if isinstance(op, RegisterRelease) else Result()


class Answer:
    """Takes the reply to one call."""

    def __init__(self) -> None:
        self.came: asyncio.Future[tuple[Reply, list[memoryview]]] = asyncio.get_running_loop().create_future()

    def answer(self, peer: Peer, id: int, body: Reply, frames: Sequence[Data]) -> None:
        self.came.set_result((body, [memoryview(frame) for frame in frames]))


@asynccontextmanager
async def served(folder: Path, ledger: Ledger) -> AsyncGenerator[TrajectoryService]:
    """Run the real service over an existing store, once it has recovered everything."""
    store, trajectories = opened(folder)
    config = Config(
        prompts=Prompts(source="nobody:opens"),
        reward=Reward(run="nobody:calls"),
        rollout=Rollout(engine="simulated", group_size=GROUP_SIZE),
        trainer=Trainer(backend="simulated", batch_size=2, steps=10),
    )
    prompts = LoadedPrompts(PromptRows([msgspec.msgpack.encode({"prompt": "1 + 1"})]))
    async with asyncio.TaskGroup() as group:
        service = make_service(config, 0, trajectories, prompts, cast("Client", ledger), Tasks(group))
        working = group.create_task(service.work())
        for _ in range(8):
            await asyncio.sleep(0)
        yield service
        service.on_drained()
        working.cancel()
    store.close()


async def fetched(service: TrajectoryService, key: Key, sha: str) -> str | None:
    """Digest of the bytes served for a group, or None if the request is refused."""
    answer = Answer()
    service.on_call(Call(answer, Peer(b"trainer/1", 0.0, []), 1, GetGroups(groups=[key.group], shas=[sha]), []))
    reply, frames = await answer.came
    return named(arrays(reply.groups[0].frames, frames)) if isinstance(reply, Groups) else None


def flipped(data: bytes, place: int, bit: int) -> bytes:
    changed = bytearray(data)
    changed[place] ^= 1 << bit
    return bytes(changed)


@pytest.mark.parametrize("layout", ["whole", "mapped"])
async def test_a_byte_inside_a_live_record_is_found_named_and_quarantined_in_each_of_a_hundred_stores(
    request: pytest.FixtureRequest, layout: str, tmp_path: Path
) -> None:
    first: Original = request.getfixturevalue(layout)
    random, hits = Random(SEED), Counter[str]()
    for number in range(COPIES):
        key, value = random.choice(first.values)
        ((file, data),) = [(file, data) for file, data in first.files.items() if value in data]
        assert data.count(value) == 1
        place = data.index(value) + random.randrange(len(value))
        harmed = first.files | {file: flipped(data, place, random.randrange(8))}
        folder, ledger = copied(tmp_path / str(number), harmed), Ledger()
        async with served(folder, ledger) as service:
            for _ in range(2):
                got = {one: await fetched(service, one, sha) for one, sha in first.shas.items()}
                right = {one: named(arrays) if one != key else None for one, arrays in first.groups.items()}
                assert got == right, f"seed {SEED}, store {number}, byte {place} of {file}"
        hits[file.partition("/")[0]] += {*ledger.quarantined} == {key.group}
    assert hits.total() == COPIES
    assert (hits["slabs"] > COPIES // 5) == (layout == "mapped")


async def test_an_untouched_store_serves_everything_and_quarantines_nothing(whole: Original, tmp_path: Path) -> None:
    ledger = Ledger()
    async with served(copied(tmp_path / "copy", whole.files), ledger) as service:
        got = {one: await fetched(service, one, sha) for one, sha in whole.shas.items()}
    assert got == {one: named(arrays) for one, arrays in whole.groups.items()}
    assert ledger.quarantined == []


def outcomes(whole: Original, folder: Path, stores: Sequence[bytes]) -> Counter[str]:
    """Count the outcomes of these damaged stores.

    Fails if any wrong bytes are served, or if a group is missing without a report.
    """
    folders = [copied(folder / str(number), {"data.mdb": data}) for number, data in enumerate(stores)]
    reader = [sys.executable, "-m", "tests.servers.trajectories.damaged"]
    said = subprocess.run(
        reader, input="\n".join(map(str, folders)), text=True, capture_output=True, check=True, timeout=100
    )
    right = {str(key.lease): named(arrays) for key, arrays in whole.groups.items()}
    counts: Counter[str] = Counter()
    for place, line in zip(folders, said.stdout.splitlines(), strict=True):
        found: dict[str, str] | str = json.loads(line)
        if isinstance(found, str):
            stopped = found.startswith("ended by signal")
            assert stopped or "data.mdb" in found or "the trajectory store" in found, found
            counts["ended by a signal" if stopped else "refused"] += 1
            continue
        assert right.keys() <= found.keys(), f"{place}: groups are missing, and nobody says so"
        wrong = {lease for lease, sha in right.items() if found[lease] not in (sha, "damaged")}
        assert not wrong, f"{place}: other bytes than were stored are served of {wrong}"
        counts["quarantined" if "damaged" in found.values() else "no matter"] += 1
    return counts


def test_a_byte_anywhere_is_found_or_does_not_matter(whole: Original, tmp_path: Path) -> None:
    random = Random(SEED)
    heads = [start + random.randrange(24) for start in range(0, len(whole.data), PAGE)]
    places = [*heads, *(random.randrange(len(whole.data)) for _ in range(120))]
    stores = [flipped(whole.data, place, random.randrange(8)) for place in places]
    counts = outcomes(whole, tmp_path, stores)
    assert counts.total() == len(stores)
    assert min(counts["refused"], counts["quarantined"], counts["no matter"]) > 2  # every kind of outcome occurred
    assert counts["ended by a signal"] <= len(stores) // 20


def test_a_torn_tail_is_found(whole: Original, tmp_path: Path) -> None:
    random = Random(SEED)
    stores = [whole.data[: random.randrange(PAGE * 2, len(whole.data))] for _ in range(40)]
    counts = outcomes(whole, tmp_path, stores)
    assert counts["quarantined"] + counts["refused"] == len(stores)


def test_a_store_that_lacks_a_table_is_refused_and_not_begun_anew(whole: Original, tmp_path: Path) -> None:
    folder = copied(tmp_path / "copy", {"data.mdb": whole.data.replace(b"records", b"recordt")})
    with pytest.raises(StoreCorrupt, match=r"data\.mdb has the tables"):
        opened(folder)


async def test_a_page_header_that_ends_a_shard_is_named_when_it_is_started_again(make_run: Callable[..., Run]) -> None:
    run = make_run(rollout={"group_size": GROUP_SIZE, "max_inflight": 64}, trainer={"batch_size": 16})
    run.scheduler()
    run.parameters()
    run.process("trajectories", 0)
    await (await run.trainer()).publish(0, WEIGHTS)
    rollout = await run.rollout(capacity=20)
    await rollout.until_room()
    assert {result.code for result in await rollout.push(*await rollout.leases(20))} == {None}
    assert run.kill("trajectories-0", signal.SIGTERM) == 0
    file = run.run_dir / "trajectories-0" / "data.mdb"
    assert harm_branches(file)
    run.process("trajectories", 0)
    assert (await asyncio.to_thread(run.ended, "trajectories-0"))[0] == -signal.SIGABRT
    run.process("trajectories", 0)
    code, said = await asyncio.to_thread(run.ended, "trajectories-0")
    assert code == 2
    assert f"{file} is damaged: reading all of it raises SIGABRT" in said
