# pyright: basic, reportMissingImports=false
"""vLLM's real engine on a CPU with an adapter matches the trainer's forward passes of the same base and adapter."""

import asyncio
import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: make test-vllm runs these tests", allow_module_level=True)

from staleflow.clients.models.lora import BASE, adapt
from staleflow.clients.models.lora import published as version_of
from staleflow.clients.rollout.engines.base import LoadError
from staleflow.clients.rollout.engines.vllm.adapter import engine_arguments
from staleflow.clients.rollout.engines.vllm.model import open_vllm
from staleflow.configs.lora import Lora
from staleflow.protocols.consistency.ids import Lineage, Version
from tests.clients.rollout.engines.vllm.test_engine import LONG, ask, configured, end, running, versions
from tests.clients.rollout.fidelity import build, over_kept_cache, prompts, save, trainer_logprobs

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # vLLM itself emits many
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.xdist_group("vllm"),
]

LORA = Lora(rank=5, alpha=10.0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build(), tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(directory: Path) -> AsyncIterator[Any]:
    engine, _ = await open_vllm(configured(directory, lora=LORA), directory)
    engine._stop_ids = []
    yield engine
    await end(engine)


def learner(directory: Path, seed: int) -> Any:
    """Return the base with an adapter that changes its policy; the first has no effect."""
    model = build()
    adapt(model, LORA, directory)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, tensor in version_of(model).items():
            if seed and name != BASE:
                tensor.add_(0.3 * torch.randn_like(tensor))
    return model


def arrays(model: Any) -> dict[str, Any]:
    return {name: tensor.detach().numpy().copy() for name, tensor in version_of(model).items()}


async def test_each_version_of_the_adapter_is_the_policy_of_the_trainer(engine: Any, directory: Path) -> None:
    for version in range(3):
        model = learner(directory, version)
        await engine.load(arrays(model), Lineage(0), Version(version))
        given = [LONG, *prompts(5, seed=version)]  # the first one's keys are cached, by version
        samples = await asyncio.gather(*(engine.generate(ask(id, prompt)) for id, prompt in enumerate(given)))
        for prompt, sample in zip(given, samples, strict=True):
            np.testing.assert_allclose(
                sample.logprobs, trainer_logprobs(model, prompt, sample.token_ids), rtol=0, atol=1e-3
            )
            assert versions(sample) == [(version, 20)]
    base = trainer_logprobs(build(), LONG, samples[0].token_ids)
    assert np.abs(samples[0].logprobs - base).max() > 0.1, "the adapter matters"


@pytest.mark.usefixtures("paced")
async def test_a_running_request_continues_with_the_new_adapter(engine: Any, directory: Path) -> None:
    old, new = learner(directory, 1), learner(directory, 2)
    await engine.load(arrays(old), Lineage(0), Version(10))
    task = asyncio.ensure_future(engine.generate(ask(0, [5, 6, 7], 300)))
    await running(engine, [task])
    await engine.load(arrays(new), Lineage(0), Version(11))
    sample = await task
    (_, before), (_, after) = versions(sample)
    assert [version for version, _ in versions(sample)] == [10, 11]
    assert before > 0 < after
    first, second = sample.token_ids[:before], sample.token_ids[before:]
    np.testing.assert_allclose(sample.logprobs[:before], trainer_logprobs(old, [5, 6, 7], first), rtol=0, atol=1e-3)
    expected = over_kept_cache(old, new, [5, 6, 7], first, second)
    np.testing.assert_allclose(sample.logprobs[before:], expected, rtol=0, atol=1e-2)


async def test_an_adapter_of_another_base_leaves_the_old_one_loaded(engine: Any, directory: Path) -> None:
    model, other = learner(directory, 1), learner(directory, 2)
    await engine.load(arrays(model), Lineage(0), Version(20))
    other.base_digest = other.base_digest + 1
    with pytest.raises(LoadError, match="over a base model with digest"):
        await engine.load(arrays(other), Lineage(0), Version(21))
    sample = await engine.generate(ask(0, LONG))
    assert versions(sample) == [(20, 20)]
    np.testing.assert_allclose(sample.logprobs, trainer_logprobs(model, LONG, sample.token_ids), rtol=0, atol=1e-3)


def test_the_engine_reserves_the_next_rank_that_vllm_has() -> None:
    assert [engine_arguments(rank)["max_lora_rank"] for rank in (1, 8, 9, 300, 512)] == [8, 8, 16, 320, 512]
