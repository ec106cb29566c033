# pyright: basic, reportMissingImports=false
"""Two ranks of vLLM, each a process, load their shards of a published version from one file."""

import importlib.util
import mmap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: make test-vllm runs these tests", allow_module_level=True)

from staleflow.clients.rollout.engines.base import Request, Sampling
from staleflow.clients.rollout.engines.load_weights import one_name_each
from staleflow.clients.rollout.engines.vllm.model import open_vllm
from staleflow.configs.schema import Config, Model, Prompts, Reward, Rollout, Vllm
from staleflow.process.host import usable_cores
from staleflow.protocols.consistency.ids import Lineage, Version
from tests.clients.rollout.engines.vllm.test_engine import end
from tests.clients.rollout.fidelity import VOCABULARY, build, published, save, step, trainer_logprobs

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # vLLM itself emits many
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.xdist_group("vllm"),
    pytest.mark.skipif(usable_cores() < 2, reason="each rank needs a core"),
]

PROMPT = list(range(4, 30))
PADDED = 64
"""Rows of the embedding with vLLM's padding."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    directory = save(build(), tmp_path_factory.mktemp("model"))
    options = {"worker_extension_cls": "tests.clients.rollout.engines.vllm.reads.Reads"}
    config = Config(
        model=Model(path=str(directory)),
        prompts=Prompts(path="prompts.jsonl"),
        reward=Reward(run="nothing:here"),
        rollout=Rollout(
            engine="vllm", group_size=2, max_inflight=2, vllm=Vllm(kv_cache_mb=1, tensor_parallel=2, options=options)
        ),
    )
    opened, _ = await open_vllm(config, directory)
    yield opened
    await end(opened)


def write(path: Path, weights: dict[str, Any]) -> dict[str, Any]:
    """Write a version into a file, over the one before, and return the arrays of a shared map of it."""
    path.touch()
    with path.open("r+b") as file:
        file.write(b"".join(array.tobytes() for array in weights.values()))
        file.flush()
        content, start = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), 0
    arrays: dict[str, Any] = {}
    for name, array in weights.items():
        arrays[name] = np.frombuffer(content, array.dtype, array.size, start).reshape(array.shape)
        start += array.nbytes
    return arrays


async def test_each_version_of_a_file_that_is_written_again_is_the_trainers(engine: Any, tmp_path: Path) -> None:
    model = build()
    for version in range(3):
        step(model, version)
        await engine.load(write(tmp_path / "version", published(model)), Lineage(0), Version(version))
        sampling = Sampling(max_new_tokens=20)
        request = Request(id=version, prompt_ids=np.array(PROMPT, np.int32), sampling=sampling, seed=version)
        sample = await engine.generate(request)
        assert [segment.version for segment in sample.segments] == [version]
        expected = trainer_logprobs(model, PROMPT, sample.token_ids)
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)


async def test_a_rank_reads_its_own_shard_of_each_tensor_and_no_other_byte(engine: Any, tmp_path: Path) -> None:
    model = build()
    await engine.load(write(tmp_path / "version", published(model)), Lineage(0), Version(9))
    expected = [0, 0]
    for name, array in one_name_each(model, published(model)).items():
        rows = [PADDED // 2, VOCABULARY - PADDED // 2]  # of the embedding; its padding has no bytes in the file
        for rank in range(2):
            if "norm" in name:
                expected[rank] += array.nbytes
            elif "embed" in name:
                expected[rank] += rows[rank] * array[0].nbytes
            else:
                expected[rank] += array.nbytes // 2
    assert await engine._llm.collective_rpc("read_nbytes") == expected
    assert engine.stats().paused_s > 0
