"""Columns of a foreign engine reach the trainer bit by bit, also a second trainer after the first was killed."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.clients.rollout.client import AsyncRolloutClient
from staleflow.clients.rollout.samples import Lease, LeaseError, Sample
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.messages import PushGroups, PushItem, Results
from staleflow.protocols.wire.tensors import Array, specs_and_frames
from tests.process.running import END_S, ROOT, audited
from tests.servers.running import Run, StageWorker, payload

pytestmark = pytest.mark.xdist_group("machine")

TRAINER = Path(__file__).parent / "column_trainer.py"
EXAMPLE = ROOT / "staleflow" / "examples" / "columns.py"
COLUMNS: list[dict[str, Any]] = [
    {"name": "experts", "per": "token", "dtype": "int32", "shape": [2, 3]},
    {"name": "image", "per": "sample", "dtype": "bytes", "max_bytes": 100},
]


async def trainer_of(run: Run, end: str) -> "asyncio.subprocess.Process":
    return await asyncio.create_subprocess_exec(
        sys.executable, str(TRAINER), run.where.scheduler, end, stdout=asyncio.subprocess.PIPE, limit=1 << 20
    )


async def line_of(process: "asyncio.subprocess.Process") -> dict[str, Any]:
    assert process.stdout is not None
    async with asyncio.timeout(END_S):
        read: dict[str, Any] = json.loads(await process.stdout.readline())
    return read


def samples_of(seed: int) -> list[Sample]:
    random = np.random.default_rng(seed)
    lengths: list[int] = random.integers(1, 6, 2).tolist()
    return [
        Sample(
            token_ids=random.integers(0, 100, tokens),
            logprobs=np.full(tokens, -1.0),
            finish="interrupted" if sample else "stop",
            columns={
                "experts": random.integers(-(2**31), 2**31, (tokens, 2, 3), dtype=np.int32),
                "image": random.bytes(int(random.integers(0, 100))) if sample else b"",
            },
        )
        for sample, tokens in enumerate(lengths)
    ]


async def test_columns_survive_a_killed_trainer_and_killed_servers(run_dir: Path) -> None:
    run = Run(run_dir, column=COLUMNS, rollout={"engine": "own.py:Engine"})
    pushed: dict[str, list[Any]] = {}
    processes: list[asyncio.subprocess.Process] = []
    try:
        for role in ("scheduler", "parameters"):
            run.process(role)
        run.process("trajectories", 0)
        processes.append(await trainer_of(run, "wait"))
        async with AsyncRolloutClient(run.where.scheduler, lambda _: None, name="foreign", capacity=2) as foreign:
            leases: list[Lease] = []
            async with asyncio.timeout(END_S):
                while len(leases) < 2:
                    leases += await foreign.take(2 - len(leases))
            for lease in leases:
                samples = samples_of(lease.group)
                wrong = Sample(token_ids=[1], logprobs=[-1.0], columns={"image": b""})
                with pytest.raises(
                    LeaseError, match=r"sample 1 lacks the column experts \(int32\[2, 3\], one a token\)"
                ):
                    await foreign.push(lease, [1, 2, 3], [samples[0], wrong])
                assert await foreign.push(lease, [1, 2, 3], samples)
                pushed[str(lease.group)] = [
                    [list(map(int, s.token_ids)), s.columns["experts"].tolist(), s.columns["image"].hex()]
                    for s in samples
                ]
            stage = StageWorker(run)
            items, _ = await stage.take()
            await stage.finish(items)
            assert await line_of(processes[0]) == pushed
        processes[0].kill()
        run.kill("trajectories-0")
        run.process("trajectories", 0)
        processes.append(await trainer_of(run, "commit"))
        assert await line_of(processes[1]) == pushed
        async with asyncio.timeout(END_S):
            assert await processes[1].wait() == 0
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()
        await run.close()
    audited(run_dir, "consume=1")


def test_the_example_prints_the_columns_of_both_steps(run_dir: Path) -> None:
    run_dir.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-W", "error", str(EXAMPLE), str(run_dir)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=END_S, check=False)
    assert done.returncode == 0, done.stderr
    for step in range(2):
        assert re.search(rf"step {step}: experts \(8, \d+, 4, 2\), 8 images, .* -2.30\n", done.stdout), done.stdout
    audited(run_dir, "consume=2")


async def test_a_push_without_the_declared_columns_costs_only_its_own_group(run_dir: Path) -> None:
    run = Run(run_dir, column=COLUMNS, rollout={"engine": "own.py:Engine"})
    try:
        run.scheduler()
        run.trajectories()
        run.parameters()
        trainer = await run.trainer()
        await trainer.publish(0, {"weight": np.zeros(4, np.float32)})
        rollout = await run.rollout()
        assigns = (await rollout.leases(3))[-3:]
        good: dict[str, Array] = {
            "token/experts": np.zeros((10, 2, 3), np.int32),
            "sample/image": np.zeros(3, np.uint8),
            "sample/image:sizes": np.array([1, 2], np.int64),
        }
        items: list[PushItem] = []
        frames: list[memoryview] = []
        flat = good | {"token/experts": np.zeros((10, 6), np.int32)}
        pushed: list[dict[str, Array]] = [{}, good, flat]
        for assign, more in zip(assigns, pushed, strict=True):
            specs, arrays = specs_and_frames(payload(0).to_arrays() | more)
            lease, worker = assign.lease, rollout.worker
            items.append(PushItem(group=assign.group, lease=lease, worker=worker, truncated=False, frames=specs))
            frames += arrays
        results = (await rollout.shards[0].ask(PushGroups(items=items), Results, frames)).results
        assert [result.code for result in results] == [Code.MALFORMED, None, Code.MALFORMED]
        assert results[0].detail == "a push lacks the column experts; it must have token/experts int32[2, 3]"
        wanted = "column experts must be int32[10, 2, 3], one value a completion token; got int32[10, 6]"
        assert results[2].detail == wanted
    finally:
        await run.close()
