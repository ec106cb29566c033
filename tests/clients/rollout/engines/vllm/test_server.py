# pyright: basic, reportMissingImports=false
"""A running vLLM server is an engine as exact as vLLM inside the worker."""

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: make test-vllm runs these tests", allow_module_level=True)

from staleflow.clients.rollout.engines.base import EngineError, LoadError
from staleflow.clients.rollout.engines.vllm.model import open_vllm_server
from staleflow.configs.schema import Config, Model, Prompts, Reward, Rollout, VllmServer
from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.trajectory import Finish
from tests.clients.rollout.engines.vllm.serving import serve
from tests.clients.rollout.engines.vllm.test_engine import LONG, SLOTS, STEPS, ask, running, versions
from tests.clients.rollout.fidelity import (
    STOP,
    build,
    expected_logprobs,
    over_kept_cache,
    prompts,
    published,
    save,
    trainer_logprobs,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # vLLM itself emits many
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.xdist_group("vllm"),
]

OPTIONS = (
    *("--max-model-len", "512", "--max-num-seqs", str(SLOTS), "--kv-cache-memory-bytes", str(1 << 20)),
    *("--worker-extension-cls", STEPS),
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def url(directory: Path) -> Iterator[str]:
    with serve(directory, *OPTIONS) as url:
        yield url


def configured(directory: Path, url: str, on_update: Any = "keep") -> Config:
    return Config(
        model=Model(path=str(directory)),
        prompts=Prompts(path="prompts.jsonl"),
        reward=Reward(run="nothing:here"),
        rollout=Rollout(
            engine="vllm_server",
            group_size=2,
            max_inflight=SLOTS,
            on_update=on_update,
            vllm_server=VllmServer(url=url),
        ),
    )


@pytest_asyncio.fixture(loop_scope="module")
async def make(directory: Path, url: str) -> AsyncIterator[Any]:
    """Open engines of a given mode with a model's weights as version 0. No token stops them by default."""
    opened: list[Any] = []

    async def one(model: Any, on_update: str = "keep", stop_ids: list[int] | None = None) -> Any:
        engine, encode = await open_vllm_server(configured(directory, url, on_update), directory)
        assert encode("ab").tolist() == [4, 5]
        opened.append(engine)
        engine._stop_ids = stop_ids or []
        await engine.load(published(model), Lineage(0), Version(0))
        return engine

    yield one
    for engine in opened:
        await engine.close()


async def test_tokens_have_the_log_probabilities_of_the_trainer(make: Any) -> None:
    model = build(seed=3)
    engine = await make(model, stop_ids=[STOP])
    penalised: dict[str, Any] = {
        "top_p": 0.9,
        "top_k": 12,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.4,
        "presence_penalty": -0.3,
        "temperature": 1.2,
    }
    asked = [ask(id, prompt, 40, **(penalised if id % 2 else {})) for id, prompt in enumerate(prompts(8))]
    for request, sample in zip(asked, await asyncio.gather(*map(engine.generate, asked)), strict=True):
        prompt, ids = request.prompt_ids.tolist(), sample.token_ids.tolist()
        expected = expected_logprobs(model, prompt, ids, request.sampling)
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-2)
        assert versions(sample) == [(0, len(ids))]
        assert sample.finish == (Finish.STOP if ids[-1] == STOP else Finish.LENGTH)
    assert engine.stats().generated_tokens > 40
    assert (engine.stats().slots, engine.stats().kv_capacity > 500) == (SLOTS, True)


@pytest.mark.usefixtures("paced")
async def test_every_token_has_the_version_that_drew_it(make: Any) -> None:
    old, new = build(seed=0), build(seed=1)
    engine = await make(old)
    tasks = [asyncio.ensure_future(engine.generate(ask(id, LONG, 150))) for id in range(SLOTS + 2)]
    await running(engine, tasks, 5 * SLOTS)
    await engine.load(published(new), Lineage(0), Version(1))
    samples = await asyncio.gather(*tasks)
    samples.sort(key=lambda sample: versions(sample)[0][0])  # the requests may arrive in another order
    assert [versions(sample)[0][0] for sample in samples] == [0] * SLOTS + [1] * 2
    for sample in samples[:SLOTS]:
        first, second = sample.segments
        assert (first.version, second.version, len(sample.token_ids)) == (0, 1, 150)
        np.testing.assert_allclose(first.logprobs, trainer_logprobs(old, LONG, first.token_ids), atol=1e-3)
        kept = over_kept_cache(old, new, LONG, first.token_ids, second.token_ids)
        np.testing.assert_allclose(second.logprobs, kept, atol=1e-3)
    for sample in samples[SLOTS:]:  # waited for a place: nothing of the old weights is in their cache
        np.testing.assert_allclose(sample.logprobs, trainer_logprobs(new, LONG, sample.token_ids), atol=1e-3)


@pytest.mark.usefixtures("paced")
async def test_recompute_reads_the_tokens_so_far_with_the_new_weights(make: Any) -> None:
    old, new = build(seed=0), build(seed=1)
    engine = await make(old, "recompute")
    task = asyncio.ensure_future(engine.generate(ask(0, LONG, 150)))
    await running(engine, [task])
    await engine.load(published(new), Lineage(0), Version(1))
    sample = await task
    first, second = sample.segments
    anew = trainer_logprobs(new, LONG, sample.token_ids)[len(first.token_ids) :]
    np.testing.assert_allclose(second.logprobs, anew, atol=1e-3)


@pytest.mark.usefixtures("paced")
async def test_interrupted_requests_keep_their_tokens_and_aborted_ones_end(make: Any) -> None:
    model = build()
    engine = await make(model)
    cut, aborted, *rest = (asyncio.ensure_future(engine.generate(ask(id, [5, 6, id + 7], 400))) for id in range(6))
    await running(engine, [cut, aborted])
    engine.interrupt(0)
    engine.abort(1)
    for id in (2, 3, 4, 5):
        engine.interrupt(id, least=0)
    sample = await asyncio.wait_for(cut, 30)
    assert sample.finish is Finish.INTERRUPTED
    assert 0 < len(sample.token_ids) < 400
    np.testing.assert_allclose(sample.logprobs, trainer_logprobs(model, [5, 6, 7], sample.token_ids), atol=1e-3)
    with pytest.raises(asyncio.CancelledError):
        await aborted
    assert all(len(one.token_ids) < 400 for one in await asyncio.gather(*rest))
    assert len((await engine.generate(ask(9, [5], 20))).token_ids) == 20  # their places are free again


async def test_tokens_of_weights_that_another_client_loaded_are_refused(make: Any) -> None:
    engine = await make(build())
    await make(build(seed=1))
    with pytest.raises(EngineError, match="which another client of the vLLM server has loaded"):
        await engine.generate(ask(0, [5, 6], 5))
    assert engine.failure.done()
    engine.failure.exception()


async def test_weights_that_do_not_cover_the_model_end_the_engine(make: Any) -> None:
    model = build()
    engine = await make(model)
    weights = published(model)
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(LoadError, match=name):
        await engine.load({key: value for key, value in weights.items() if key != name}, Lineage(0), Version(1))
    assert versions(await engine.generate(ask(0, [5, 6], 5))) == [(0, 5)]


async def test_a_worker_that_died_while_it_paused_the_server_has_a_successor(make: Any, url: str) -> None:
    first = await make(build())
    await first._llm.pause_generation(mode="keep", clear_cache=False)
    second = await make(build(seed=2))
    assert versions(await second.generate(ask(0, [5, 6], 5))) == [(0, 5)]


async def test_a_server_that_is_gone_fails_the_engine(directory: Path, ports: list[int]) -> None:
    port = ports[0]
    with pytest.raises(EngineError, match=f"the vLLM server at http://127.0.0.1:{port} does not answer: "):
        await open_vllm_server(configured(directory, f"http://127.0.0.1:{port}"), directory)
