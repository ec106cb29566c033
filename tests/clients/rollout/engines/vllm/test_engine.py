# pyright: basic, reportMissingImports=false
"""vLLM's real engine on a CPU matches the trainer's forward passes of the same weights.

One engine core serves most tests: each test builds its own adapter over the core and starts with an empty prefix
cache.
"""

import asyncio
import importlib.util
import mmap
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: make test-vllm runs these tests", allow_module_level=True)

from staleflow.clients.rollout.engines.base import (
    EngineError,
    LoadError,
    Request,
    RequestError,
    Sampling,
    TokenSegment,
    Trajectory,
)
from staleflow.clients.rollout.engines.vllm.model import open_vllm, start_engine
from staleflow.clients.texts import ids_as_text
from staleflow.clients.weights.mmap_cache import KeptMaps
from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config, Model, Prompts, Reward, Rollout, Vllm
from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.trajectory import Finish
from tests.clients.rollout.engines.waiting import until
from tests.clients.rollout.fidelity import (
    STOP,
    VOCABULARY,
    build,
    expected_logprobs,
    over_kept_cache,
    prompts,
    published,
    save,
    step,
    trainer_logprobs,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # vLLM itself emits many
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.xdist_group("vllm"),
]

SLOTS = 4
STEPS = "tests.clients.rollout.engines.vllm.steps.Steps"
OPTIONS = {"max_num_batched_tokens": 4099, "kv_cache_metrics": True, "worker_extension_cls": STEPS}
LONG = list(range(4, 44)) + list(range(10, 50))
"""A prompt of more than two KV blocks, so that the prefix cache has a block to keep."""

Make = Callable[..., Awaitable[Any]]


def configured(directory: Path, **model: Any) -> Config:
    return Config(
        model=Model(path=str(directory), **model),
        prompts=Prompts(path="prompts.jsonl"),
        reward=Reward(run="nothing:here"),
        rollout=Rollout(engine="vllm", group_size=2, max_inflight=SLOTS, vllm=Vllm(kv_cache_mb=1, options=OPTIONS)),
    )


async def end(engine: Any) -> None:
    """Close the engine, and also what a worker leaves to the exit of its process, because vLLM would complain about
    it."""
    llm = engine._llm
    await engine.close()
    await asyncio.sleep(0)  # let this loop close vLLM's sockets
    llm.engine_core.resources.ctx.destroy(0)
    llm.shutdown = lambda timeout=None: None  # the garbage collector calls it again


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def opened(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    """Open the engine of a model directory with ``build()``'s weights."""
    directory = save(build(), tmp_path_factory.mktemp("model"))
    engine, encode = await open_vllm(configured(directory), directory)
    assert encode("ab").tolist() == [4, 5]
    yield engine
    await end(engine)


@pytest_asyncio.fixture(loop_scope="module")
async def make(opened: Any) -> AsyncIterator[Make]:
    """Build an adapter of a given mode and class, with these weights as version 0. No token stops it by default."""
    made: list[Any] = []

    async def one(model: Any, on_update: str = "keep", kind: Any = None, stop_ids: Sequence[int] = ()) -> Any:
        await opened._llm.reset_prefix_cache()
        engine = (kind or type(opened))(
            opened._llm,
            opened._counters,
            opened._model,
            stop_ids,
            opened._decode,
            context=opened.context,
            on_update=on_update,
        )
        made.append(engine)
        await engine.load(published(model), Lineage(0), Version(0))
        return engine

    yield one
    for engine in made:
        for task in engine._tasks:
            task.cancel()
        assert engine._drafts == {}


def ask(id: int, prompt: list[int], tokens: int = 20, seed: int | None = None, **more: Any) -> Request:
    chosen = {name: more.pop(name) for name in Sampling.__dataclass_fields__ if name in more}
    sampling = Sampling(max_new_tokens=tokens, **chosen)
    return Request(
        id=id, prompt_ids=np.array(prompt, np.int32), sampling=sampling, seed=id if seed is None else seed, **more
    )


async def test_options_reach_the_engine_and_wrong_ones_are_refused_by_name(opened: Any, tmp_path: Path) -> None:
    assert opened._llm.vllm_config.scheduler_config.max_num_batched_tokens == 4099
    directory = save(build(), tmp_path)
    for options, line in (
        ({"max_num_batched_token": 1}, r"options\.max_num_batched_token is 1; .* did you mean max_num_batched_tokens"),
        ({"kv_cache_dtype": "fp7"}, r"rollout\.vllm\.options is \{'kv_cache_dtype': 'fp7'\}; vLLM does not start"),
    ):
        config = configured(directory)
        rollout = msgspec.structs.replace(config.rollout, vllm=Vllm(options=options))
        with pytest.raises(ConfigError, match=line):
            start_engine(msgspec.structs.replace(config, rollout=rollout), directory, 64, cpu=True)


def versions(trajectory: Trajectory) -> list[tuple[int, int]]:
    return [(segment.version, len(segment.token_ids)) for segment in trajectory.segments]


def running(engine: Any, tasks: list[Any], tokens: int = 5) -> Awaitable[None]:
    """Wait until the requests have generated some tokens, and each that has a place at least one."""
    before, places = engine.stats().generated_tokens, min(len(tasks), SLOTS)

    def begun() -> int:
        return sum(draft.written_here > 0 for draft in engine._drafts.values())

    async def wait() -> None:
        while engine.stats().generated_tokens < before + tokens or begun() < places:
            assert not any(task.done() for task in tasks)
            await asyncio.sleep(0.002)

    return asyncio.wait_for(wait(), 60)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_engine_and_trainer_agree_after_no_one_and_twenty_updates(
    opened: Any, make: Make, temperature: float
) -> None:
    learner = build()
    engine = await make(learner, stop_ids=[STOP])
    for version in range(21):
        if version:
            step(learner, version)
            await engine.load(published(learner), Lineage(0), Version(version))
        if version in (0, 1, 20):
            given = prompts(8, seed=version)
            asked = [ask(id, prompt, 40, temperature=temperature) for id, prompt in enumerate(given)]
            samples = await asyncio.gather(*map(engine.generate, asked))
            delta = np.concatenate(
                [
                    np.abs(sample.logprobs - trainer_logprobs(learner, prompt, sample.token_ids, temperature))
                    for prompt, sample in zip(given, samples, strict=True)
                ]
            )
            assert (delta.mean() <= 1e-4, delta.max() <= 1e-2) == (True, True), (version, delta.mean(), delta.max())
            assert {segment.version for sample in samples for segment in sample.segments} == {version}
            assert all(
                sample.finish == (Finish.STOP if sample.token_ids[-1] == STOP else Finish.LENGTH) for sample in samples
            )


async def test_a_mixture_of_experts_agrees_with_the_trainer_before_and_after_updates(tmp_path: Path) -> None:
    learner = build("qwen3_moe")
    directory = save(learner, tmp_path)
    engine, _ = await open_vllm(configured(directory), directory)
    try:
        for version in range(3):
            if version:
                step(learner, version)
            await engine.load(published(learner), Lineage(0), Version(version))
            given = prompts(4, seed=version)
            samples = await asyncio.gather(*(engine.generate(ask(id, prompt, 30)) for id, prompt in enumerate(given)))
            for prompt, sample in zip(given, samples, strict=True):
                expected = trainer_logprobs(learner, prompt, sample.token_ids)
                np.testing.assert_allclose(sample.logprobs, expected, atol=1e-3, err_msg=f"version {version}")
    finally:
        await end(engine)


async def test_the_same_seed_gives_the_same_tokens_whoever_else_is_in_the_batch(make: Make) -> None:
    engine = await make(build())
    wanted = [ask(id, prompt, 15) for id, prompt in enumerate(prompts(3))]
    alone = [await engine.generate(request) for request in wanted]
    others = [ask(100 + id, [5, 6, id + 7], 9) for id in range(5)]
    crowded = await asyncio.gather(*map(engine.generate, [*wanted, *others]))
    assert [a.token_ids.tolist() for a in alone] == [c.token_ids.tolist() for c in crowded[:3]]
    again = await asyncio.gather(*(engine.generate(ask(id, [7, 8], 12, seed=id)) for id in range(6)))
    assert len({tuple(sample.token_ids.tolist()) for sample in again}) > 3


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_p": 0.6},
        {"top_k": 4, "temperature": 1.4},
        {"min_p": 0.2},
        {"repetition_penalty": 1.6},
        {"frequency_penalty": 1.1, "presence_penalty": -0.7, "repetition_penalty": 1.2},
        {"top_p": 0.9, "top_k": 12, "min_p": 0.05, "repetition_penalty": 1.2, "temperature": 1.2},
    ],
)
async def test_log_probabilities_are_those_of_the_truncated_and_penalised_distribution(
    make: Make, sampling: dict[str, Any]
) -> None:
    """The transformers engine samples from the same distribution, so both engines can serve one run."""
    model = build()
    engine = await make(model)
    asked = [ask(id, prompt, 20, **sampling) for id, prompt in enumerate(prompts(6))]
    for request, sample in zip(asked, await asyncio.gather(*map(engine.generate, asked)), strict=True):
        prompt, ids = request.prompt_ids.tolist(), sample.token_ids.tolist()
        expected = expected_logprobs(model, prompt, ids, request.sampling)
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-2)


async def test_a_penalty_also_covers_tokens_of_before_an_update(make: Make) -> None:
    """A request that moves, or that is submitted again, has its earlier tokens in vLLM's prompt."""
    model = build()
    engine = await make(model)
    first = await engine.generate(ask(0, [5, 6], 8, repetition_penalty=2.0))
    request = ask(1, [5, 6], 20, repetition_penalty=2.0, prefix=first.segments)
    sample = await engine.generate(request)
    assert sample.token_ids[:8].tolist() == first.token_ids.tolist()
    expected = expected_logprobs(model, [5, 6], sample.token_ids.tolist(), request.sampling)
    np.testing.assert_allclose(sample.logprobs, expected, atol=1e-2)


async def test_a_sample_with_a_penalty_of_its_own_tokens_starts_over_elsewhere(make: Make) -> None:
    """vLLM counts the tokens of its output only, and those of another worker are part of its prompt."""
    model = build()
    engine = await make(model)
    penalty: dict[str, Any] = {"frequency_penalty": 1.5, "presence_penalty": 0.5}
    first = await engine.generate(ask(0, [5, 6], 8, **penalty))
    request = ask(1, [5, 6], 20, **penalty, prefix=first.segments, seed=7)
    sample = await engine.generate(request)
    assert sample.token_ids[:8].tolist() != first.token_ids.tolist()
    assert len(sample.token_ids) == 20
    expected = expected_logprobs(model, [5, 6], sample.token_ids.tolist(), request.sampling)
    np.testing.assert_allclose(sample.logprobs, expected, atol=1e-2)


async def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it(opened: Any, make: Make) -> None:
    """Tokens that the engine core wrote behind it are discarded, and the other requests continue."""
    engine = await make(build())
    whole = await asyncio.gather(*(engine.generate(ask(id, [5, 6, id + 7], 60)) for id in range(4)))
    texts = opened._decode([sample.token_ids for sample in whole])
    stops = [text[n : n + 3] for text, n in zip(texts, (0, 4, 20, 30), strict=True)]
    cut = await asyncio.gather(
        *(engine.generate(ask(id, [5, 6, id + 7], 60, stop=("??", stop))) for id, stop in enumerate(stops))
    )
    for sample, text, stop, ended in zip(whole, texts, stops, cut, strict=True):
        written = [opened._decode([sample.token_ids[:count]])[0] for count in range(1, 61)]
        end = 1 + next(count for count, start in enumerate(written) if stop in start)
        assert stop in text
        assert ended.token_ids.tolist() == sample.token_ids[:end].tolist()
        assert ended.finish is Finish.STOP
        assert versions(ended) == [(0, end)]
        np.testing.assert_allclose(ended.logprobs, sample.logprobs[:end], atol=1e-3)


async def test_greedy_decoding_takes_the_most_likely_token_and_reports_temperature_one(make: Make) -> None:
    model = build()
    engine = await make(model)
    sample = await engine.generate(ask(0, [9, 10], 10, temperature=0.0))
    np.testing.assert_allclose(sample.logprobs, trainer_logprobs(model, [9, 10], sample.token_ids), atol=1e-4)
    again = await engine.generate(ask(1, [9, 10], 10, temperature=0.0))
    assert sample.token_ids.tolist() == again.token_ids.tolist()


@pytest.mark.usefixtures("paced")
async def test_keep_goes_on_over_the_kept_cache_and_every_token_has_the_version_that_drew_it(make: Make) -> None:
    old, new = build(seed=0), build(seed=1)
    engine = await make(old, "keep")
    given = prompts(SLOTS, seed=4)
    tasks = [asyncio.ensure_future(engine.generate(ask(id, prompt, 150))) for id, prompt in enumerate(given)]
    await running(engine, tasks, 5 * SLOTS)
    await engine.load(published(new), Lineage(0), Version(1))
    for prompt, sample in zip(given, await asyncio.gather(*tasks), strict=True):
        first, second = sample.segments
        assert (first.version, second.version, len(sample.token_ids)) == (0, 1, 150)
        np.testing.assert_allclose(first.logprobs, trainer_logprobs(old, prompt, first.token_ids), atol=1e-3)
        kept = over_kept_cache(old, new, prompt, first.token_ids, second.token_ids)
        np.testing.assert_allclose(second.logprobs, kept, atol=1e-3)


@pytest.mark.usefixtures("paced")
async def test_recompute_reads_what_runs_anew_and_keeps_its_tokens_as_first_sampled(make: Make) -> None:
    old, new = build(seed=0), build(seed=1)
    engine = await make(old, "recompute")
    given = prompts(SLOTS, seed=4)
    tasks = [asyncio.ensure_future(engine.generate(ask(id, prompt, 150))) for id, prompt in enumerate(given)]
    await running(engine, tasks, 5 * SLOTS)
    await engine.load(published(new), Lineage(1), Version(1))
    for prompt, sample in zip(given, await asyncio.gather(*tasks), strict=True):
        first, second = sample.segments
        assert [(s.lineage, s.version) for s in sample.segments] == [(0, 0), (1, 1)]
        np.testing.assert_allclose(first.logprobs, trainer_logprobs(old, prompt, first.token_ids), atol=1e-3)
        anew = trainer_logprobs(new, prompt, sample.token_ids)[len(first.token_ids) :]
        np.testing.assert_allclose(second.logprobs, anew, atol=1e-3)


@pytest.mark.usefixtures("paced")
async def test_drain_lets_what_runs_end_and_holds_what_comes(make: Make) -> None:
    old, new = build(seed=0), build(seed=1)
    engine = await make(old, "drain")
    tasks = [asyncio.ensure_future(engine.generate(ask(id, [7, 8, id + 9], 60))) for id in range(SLOTS + 2)]
    await running(engine, tasks)
    load = asyncio.ensure_future(engine.load(published(new), Lineage(0), Version(1)))
    await asyncio.sleep(0)
    late = asyncio.ensure_future(engine.generate(ask(20, [7, 8, 9], 5)))
    done = [versions(sample) for sample in await asyncio.gather(*tasks)]
    await load
    assert done == [[(0, 60)]] * SLOTS + [[(1, 60)]] * 2
    assert versions(await late) == [(1, 5)]


@pytest.mark.usefixtures("paced")
async def test_requests_that_wait_while_weights_change_are_written_by_the_new_ones_alone(make: Make) -> None:
    old, new = build(seed=0), build(seed=1)
    engine = await make(old, "keep")
    tasks = [asyncio.ensure_future(engine.generate(ask(id, LONG, 60))) for id in range(SLOTS + 2)]
    await running(engine, tasks)
    await until(lambda: (engine.stats().running, engine.stats().waiting) == (SLOTS, 2))
    await engine.load(published(new), Lineage(0), Version(1))
    samples = await asyncio.gather(*tasks)
    assert [versions(sample)[0][0] for sample in samples] == [0] * SLOTS + [1] * 2
    for sample in samples[SLOTS:]:
        assert versions(sample) == [(1, 60)]
        np.testing.assert_allclose(sample.logprobs, trainer_logprobs(new, LONG, sample.token_ids), atol=1e-3)


async def stale_prefix_delta(engine: Any, new: Any) -> float:
    """Mean distance from the new weights' log-probabilities for a prompt whose prefix the old weights have cached."""
    await engine.generate(ask(0, LONG, 5))
    hits = engine._counters.prefix_hits
    await engine.generate(ask(1, LONG, 5))
    assert engine._counters.prefix_hits > hits  # the prefix cache is in use
    kept = asyncio.ensure_future(engine.generate(ask(2, [5, 6], 150)))
    await running(engine, [kept])
    await engine.load(published(new), Lineage(0), Version(1))
    sample = await engine.generate(ask(3, LONG, 20))
    await kept
    return float(np.abs(sample.logprobs - trainer_logprobs(new, LONG, sample.token_ids)).max())


@pytest.mark.usefixtures("paced")
@pytest.mark.parametrize("on_update", ["keep", "recompute", "drain"])
async def test_the_prefix_cache_never_serves_a_prefix_of_another_version(make: Make, on_update: str) -> None:
    engine = await make(build(seed=0), on_update)
    assert await stale_prefix_delta(engine, build(seed=1)) < 1e-3


@pytest.mark.usefixtures("paced")
async def test_a_prefix_cache_that_knew_no_versions_would_show(opened: Any, make: Make) -> None:
    """Prove that the test above can fail: with one salt for all versions, vLLM serves the old keys and values."""

    class Unsalted(type(opened)):  # type: ignore[misc]
        _salt = property(lambda self: "one for all", lambda self, value: None)

    engine = await make(build(seed=0), "keep", Unsalted)
    assert await stale_prefix_delta(engine, build(seed=1)) > 1e-2


async def test_a_prefix_goes_on_where_it_was_left_and_stays_as_first_sampled(make: Make) -> None:
    model = build()
    engine = await make(model)
    whole = await engine.generate(ask(0, [14, 15], 12))
    written = TokenSegment(
        lineage=Lineage(0), version=Version(-1), token_ids=whole.token_ids[:5], logprobs=whole.logprobs[:5] - 1
    )
    again = await engine.generate(ask(1, [14, 15], 12, prefix=(written,)))
    assert versions(again) == [(-1, 5), (0, 7)]
    assert again.token_ids[:5].tolist() == whole.token_ids[:5].tolist()
    np.testing.assert_array_equal(again.segments[0].logprobs, written.logprobs)
    expected = trainer_logprobs(model, [14, 15], again.token_ids)[5:]
    np.testing.assert_allclose(again.segments[1].logprobs, expected, atol=1e-4)


@pytest.mark.usefixtures("paced")
async def test_what_is_to_go_on_elsewhere_ends_at_once_and_what_has_no_token_without_one(make: Make) -> None:
    """Four requests run; the fifth and the sixth wait, one of them with a prefix. Each continues elsewhere as if it had
    stayed."""
    model = build()
    engine = await make(model)
    alone = [await engine.generate(ask(10 + n, [4, 5], 30)) for n in range(SLOTS)]
    tasks = [asyncio.ensure_future(engine.generate(ask(10 + n, [4, 5], 30))) for n in range(SLOTS)]
    await running(engine, tasks)
    prefix = alone[0].segments
    short = TokenSegment(
        lineage=Lineage(0), version=Version(0), token_ids=prefix[0].token_ids[:3], logprobs=prefix[0].logprobs[:3]
    )
    waiting = [asyncio.ensure_future(engine.generate(ask(20 + n, [4, 5], 30, prefix=(short,) * n))) for n in range(2)]
    await asyncio.sleep(0)
    for id in (*range(10, 10 + SLOTS), 20, 21):
        engine.interrupt(id, least=0)
    left, (empty, begun) = await asyncio.gather(*tasks), await asyncio.gather(*waiting)
    assert (empty.segments, empty.finish, begun.finish) == ((), Finish.INTERRUPTED, Finish.INTERRUPTED)
    assert begun.token_ids.tolist()[:3] == short.token_ids.tolist()
    assert all(trajectory.finish is Finish.INTERRUPTED and 0 < len(trajectory.token_ids) < 30 for trajectory in left)
    for n, trajectory in enumerate(left):
        again = await engine.generate(ask(30 + n, [4, 5], 30, prefix=trajectory.segments))
        count = len(trajectory.token_ids)
        np.testing.assert_array_equal(again.token_ids[:count], trajectory.token_ids)
        np.testing.assert_array_equal(again.logprobs[:count], trajectory.logprobs)
        assert len(again.token_ids) == 30


@pytest.mark.usefixtures("paced")
async def test_an_interrupt_ends_a_trajectory_with_the_tokens_so_far_and_at_least_one(make: Make) -> None:
    model = build()
    engine = await make(model)
    tasks = [asyncio.ensure_future(engine.generate(ask(id, [11, 12, id + 4], 150))) for id in range(SLOTS + 1)]
    await running(engine, tasks, 10 * SLOTS)
    for id in (0, SLOTS, 99):
        engine.interrupt(id)
    samples = await asyncio.gather(*tasks)
    assert [sample.finish for sample in samples] == [
        Finish.INTERRUPTED,
        *[Finish.LENGTH] * (SLOTS - 1),
        Finish.INTERRUPTED,
    ]
    assert 1 <= len(samples[0].token_ids) < 150
    assert 1 <= len(samples[SLOTS].token_ids) < 150
    for id in (0, SLOTS):
        expected = trainer_logprobs(model, [11, 12, id + 4], samples[id].token_ids)
        np.testing.assert_allclose(samples[id].logprobs, expected, atol=1e-3)


@pytest.mark.usefixtures("paced")
async def test_an_abort_forgets_a_trajectory_and_frees_its_place(make: Make) -> None:
    engine = await make(build())
    tasks = [asyncio.ensure_future(engine.generate(ask(id, [11, 12, id + 4], 40))) for id in range(SLOTS + 2)]
    await running(engine, tasks)
    for id in (0, SLOTS, 99):
        engine.abort(id)
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(end, asyncio.CancelledError) for end in done] == [id in (0, SLOTS) for id in range(SLOTS + 2)]
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)


async def test_weights_that_do_not_fit_are_refused_by_name_and_change_nothing(make: Make) -> None:
    model = build()
    engine = await make(model)
    weights = published(model)
    name = "model.norm.weight"
    for wrong, message in (
        ({name: np.zeros(5, np.float32)}, r"model\.norm\.weight is float32 \[5\]"),
        ({name: np.zeros(32, np.float16)}, r"model\.norm\.weight is float16"),
        ({"model.other": np.zeros(1, np.float32)}, r"model\.other is not one"),
    ):
        with pytest.raises(LoadError, match=message):
            await engine.load(weights | wrong, Lineage(0), Version(4))
    with pytest.raises(LoadError, match=r"model\.norm\.weight is missing"):
        await engine.load({n: array for n, array in weights.items() if n != name}, Lineage(0), Version(4))
    sample = await engine.generate(ask(0, [7, 8], 10))
    assert versions(sample)[0][0] == 0
    np.testing.assert_allclose(sample.logprobs, trainer_logprobs(model, [7, 8], sample.token_ids), atol=1e-4)


@pytest.mark.parametrize("saying", [True, False])
async def test_weights_that_vllms_own_loader_leaves_aside_are_named(saying: bool, tmp_path: Path) -> None:
    """vLLM would generate with its old tensors under the new version's label. The first and last of three layers are
    tied."""
    import torch
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    from staleflow.clients.rollout.engines.vllm.receiver import FileWeights, ParcelInfo

    class Model(torch.nn.Sequential):
        def load_weights(self, weights: Any) -> Any:
            own = dict(self.named_parameters())
            taken = {name: tensor for name, tensor in weights if name in own}
            for name, tensor in taken.items():
                getattr(own[name], "weight_loader", default_weight_loader)(own[name], tensor)
            return set(taken) if saying else None

    np.ones(4, np.float32).tofile(tmp_path / "ones")

    def updated(*names: str) -> list[float]:
        model = Model(*(torch.nn.Linear(2, 2, bias=False) for _ in range(3)))
        model[2].weight = model[0].weight
        record_metadata_for_reloading(model)
        receiver: Any = object.__new__(FileWeights)
        receiver._maps = KeptMaps(mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE)
        receiver.model, receiver.model_config = model, SimpleNamespace(quantization=None, dtype=torch.float32)
        receiver.start_weight_update()
        for name in names:
            receiver.receive_weights(ParcelInfo(str(tmp_path / "ones"), [[name, "<f4", [2, 2], 0]]))
        receiver.finish_weight_update()
        return [float(parameter.sum()) for parameter in model.parameters()]

    assert updated("0.weight", "1.weight") == updated("2.weight", "1.weight") == [4, 4]
    with pytest.raises(ValueError, match=r"no weights came for 1\.weight: vLLM uses other names"):
        updated("0.weight", "other")
    with pytest.raises(ValueError, match=r"no weights came for 0\.weight, 2\.weight: vLLM uses other names"):
        updated("1.weight")


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
async def test_tied_weights_may_come_under_either_name(make: Make, name: str) -> None:
    model = build(seed=5)
    engine = await make(build(seed=6))
    weights = published(model)
    del weights["lm_head.weight" if name.startswith("model") else "model.embed_tokens.weight"]
    await engine.load(weights, Lineage(0), Version(1))
    sample = await engine.generate(ask(0, [7, 8], 10))
    np.testing.assert_allclose(sample.logprobs, trainer_logprobs(model, [7, 8], sample.token_ids), atol=1e-4)


async def test_a_map_of_a_file_is_read_by_the_engine_itself(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from staleflow.clients.rollout.engines.vllm import weights as vllm_weights

    def never(tensors: Any) -> Any:
        raise AssertionError(f"{list(tensors)} were copied")

    model = build(seed=7)
    engine = await make(build(seed=6))
    weights: dict[str, Any] = {}
    for name, array in published(model).items():
        array.tofile(tmp_path / "tensor")
        (tmp_path / "tensor").rename(tmp_path / name)
        weights[name] = np.memmap(tmp_path / name, array.dtype, "r", shape=array.shape)
    monkeypatch.setattr(vllm_weights, "_spool", never)
    await engine.load(weights, Lineage(0), Version(1))
    sample = await engine.generate(ask(0, [7, 8], 10))
    np.testing.assert_allclose(sample.logprobs, trainer_logprobs(model, [7, 8], sample.token_ids), atol=1e-4)


async def test_a_file_that_vllms_process_cannot_open_is_told_with_what_is_needed() -> None:
    from staleflow.clients.rollout.engines.vllm.receiver import ParcelInfo, mapped

    with pytest.raises(
        OSError, match=r"cannot read the rollout worker's weights: .*/proc/0/fd/9.* as one user, in one"
    ):
        list(mapped(ParcelInfo("/proc/0/fd/9", []), KeptMaps(mmap.PROT_READ)))


async def test_a_load_shows_as_stuck_while_a_parcel_hangs_and_not_while_it_gets_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each call of the engine core appears to take 100 s, and the third parcel never returns."""
    from staleflow.clients.rollout.engines.vllm import weights as vllm_weights
    from staleflow.clients.rollout.engines.vllm.counters import Counters
    from staleflow.clients.rollout.engines.vllm.engine import VllmEngine

    model, counters, begun = build(), Counters(), list[float]()
    hangs = asyncio.Event()

    async def call(*_: Any, **__: Any) -> None:
        begun.append(engine.stuck_s())
        engine._busy_since = counters.stepped_at = time.monotonic() - 100
        if len(begun) == 4:
            hangs.set()
            await asyncio.Event().wait()

    async def at_once(*_: Any, **__: Any) -> None: ...

    core = SimpleNamespace(
        errored=False,
        pause_generation=at_once,
        start_weight_update=call,
        update_weights=call,
        shutdown=lambda timeout: None,
    )
    llm: Any = core
    engine: Any = VllmEngine(llm, counters, model, [], ids_as_text, context=512)
    engine._drafts[0] = SimpleNamespace(attempt_id="", task=None)
    engine._busy()
    monkeypatch.setattr(vllm_weights, "MAX_SPOOL_BYTES", 1)
    load = asyncio.ensure_future(engine.load(published(model), Lineage(0), Version(1)))
    await asyncio.wait_for(hangs.wait(), 60)
    assert max(begun) < 50, begun
    assert engine.stuck_s() >= 100
    load.cancel()
    await asyncio.gather(load, return_exceptions=True)
    await engine.close()


async def test_a_request_that_cannot_be_served_is_refused_with_the_reason(make: Make) -> None:
    engine = await make(build())
    written = TokenSegment(
        lineage=Lineage(0), version=Version(0), token_ids=np.ones(20, np.int32), logprobs=np.zeros(20, np.float32)
    )
    for request, message in (
        (ask(0, []), "the prompt is empty"),
        (ask(0, [5] * 512), "the prompt has 512 tokens; the model's context is 512"),
        (ask(0, [VOCABULARY]), "the prompt has token 61; the vocabulary has 61"),
        (ask(0, [5], 20, prefix=(written,)), "20 tokens are written; max_new_tokens is 20"),
    ):
        with pytest.raises(RequestError, match=message):
            await engine.generate(request)
    assert not engine.failure.done()


async def test_a_trajectory_ends_where_the_context_ends(make: Make) -> None:
    engine = await make(build())
    sample = await engine.generate(ask(0, [5] * 500, 40))
    assert (len(sample.token_ids), sample.finish) == (12, Finish.LENGTH)


@pytest.mark.usefixtures("paced")
async def test_stats_are_the_engines_own_and_a_full_cache_preempts_without_harm(make: Make) -> None:
    model = build()
    engine = await make(model)
    before = engine.stats()
    given = [[7, 8, id + 9] for id in range(SLOTS)]
    tasks = [asyncio.ensure_future(engine.generate(ask(id, prompt, 400))) for id, prompt in enumerate(given)]
    await running(engine, tasks, 400)
    await until(lambda: engine.stats().running == SLOTS)
    now = engine.stats()
    assert 0 < now.kv_used <= 1
    assert now.slots == SLOTS
    assert 0 < now.kv_tokens <= now.kv_capacity < 1600
    assert engine.stuck_s() < 60
    samples = await asyncio.gather(*tasks)
    after = engine.stats()
    assert (after.running, after.waiting, after.kv_used) == (0, 0, 0)
    assert after.generated_tokens - before.generated_tokens == 400 * SLOTS
    assert 400 <= after.steps - before.steps <= 400 * SLOTS
    assert after.preemptions > before.preemptions  # a cache of 1 MiB is too small for 1,600 tokens
    assert engine.tokens_per_s() > 0
    assert engine.busy_s() > 0
    assert engine.stuck_s() == 0
    for prompt, sample in zip(given, samples, strict=True):
        np.testing.assert_allclose(sample.logprobs, trainer_logprobs(model, prompt, sample.token_ids), atol=2e-3)


@pytest.mark.usefixtures("paced")
async def test_bfloat16_untied_and_fused_weights_load_and_what_breaks_is_told(tmp_path: Path) -> None:
    """This test opens its own engine core, because it kills the core at the end."""
    learner = build("llama", dtype="bfloat16")
    directory = save(learner, tmp_path)
    engine, _ = await open_vllm(configured(directory, dtype="bfloat16"), directory)
    try:
        for version in (1, 2):
            step(learner, version)
            await engine.load(published(learner), Lineage(0), Version(version))
            given = prompts(6, seed=version)
            samples = await asyncio.gather(*(engine.generate(ask(id, p, 30)) for id, p in enumerate(given)))
            delta = np.concatenate(
                [
                    np.abs(s.logprobs - trainer_logprobs(learner, p, s.token_ids))
                    for p, s in zip(given, samples, strict=True)
                ]
            )
            assert delta.mean() < 0.05, delta.mean()
            assert {versions(sample)[0][0] for sample in samples} == {version}
        broken = published(learner)
        broken["model.norm.weight"][:] = 0x7FC0  # NaN
        await engine.load(broken, Lineage(0), Version(3))
        with pytest.raises(EngineError, match="scores are not finite"):
            await engine.generate(ask(0, [5, 6], 3))
        with pytest.raises(EngineError, match="scores are not finite"):
            await engine.failure
        with pytest.raises(EngineError, match="has failed"):
            await engine.generate(ask(1, [5, 6], 3))
        again = type(engine)(engine._llm, engine._counters, engine._model, [], engine._decode, context=engine.context)
        await again.load(published(learner), Lineage(0), Version(4))
        (core,) = engine._llm.engine_core.resources.engine_manager.processes
        assert os.getpgid(core.pid) == core.pid  # Ctrl-C in a terminal must not reach it
        writing = asyncio.ensure_future(again.generate(ask(3, [5, 6], 400)))
        await running(again, [writing])
        os.kill(core.pid, signal.SIGKILL)
        for told in (writing, again.failure):
            with pytest.raises(EngineError, match="the engine failed"):
                await asyncio.wait_for(told, 30)
    finally:
        await end(engine)
