# pyright: basic, reportMissingImports=false
"""The embedded engine matches plain forward passes and ``model.generate`` of the same model."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from staleflow.clients.rollout.engines.base import (
    EngineError,
    LoadError,
    Request,
    RequestError,
    Sampling,
    TokenSegment,
    Trajectory,
)
from staleflow.configs.errors import ConfigError
from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.trajectory import Finish

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from staleflow.clients.rollout.engines.transformers.engine import TransformersEngine, generate  # noqa: E402

VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 96,
    "initializer_range": 0.3,  # far from uniform, so that a wrong mask or position shows
}


def build(kind: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    match kind:
        case "llama":
            config = transformers.LlamaConfig(**SIZES)
        case "qwen3":
            config = transformers.Qwen3Config(**SIZES, tie_word_embeddings=True)
        case "sliding":
            config = transformers.Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=7, max_window_layers=1)
        case "mistral":
            config = transformers.MistralConfig(**SIZES, sliding_window=7)
        case "qwen3_moe":
            experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
            config = transformers.Qwen3MoeConfig(**SIZES, **experts)
        case _:
            raise ValueError(kind)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["qwen3", "sliding", "mistral"])
def model(request: pytest.FixtureRequest) -> Any:
    return build(request.param)


def prompts(number: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, rng.integers(1, 20)).tolist() for _ in range(number)]


def ask(id: int, prompt: list[int], tokens: int = 20, seed: int | None = None, **sampling: Any) -> Request:
    return Request(
        id=id,
        prompt_ids=np.array(prompt, np.int32),
        sampling=Sampling(max_new_tokens=tokens, **sampling),
        seed=id if seed is None else seed,
    )


def run(engine: TransformersEngine) -> dict[int, Trajectory]:
    done: dict[int, Trajectory] = {}
    while engine.stats().running or engine.stats().waiting:
        done.update((trajectory.id, trajectory) for trajectory in engine.step())
    return done


def forward_logprobs(model: Any, prompt: list[int], token_ids: list[int], temperature: float = 1.0) -> Any:
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*prompt, *token_ids]])).logits[0].float() / temperature
    logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return logprobs.gather(-1, torch.tensor(token_ids, dtype=torch.int64)[:, None])[:, 0].numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_full_forward_pass(model: Any, temperature: float) -> None:
    engine = TransformersEngine(model, [3], slots=5)
    for prompt, samples in zip(
        prompts(9), generate(engine, prompts(9), 3, Sampling(max_new_tokens=30, temperature=temperature)), strict=True
    ):
        for sample in samples:
            expected = forward_logprobs(model, prompt, sample.token_ids.tolist(), temperature)
            np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)


def test_a_mixture_of_experts_agrees_with_the_trainer_before_and_after_an_update() -> None:
    from tests.clients.rollout.fidelity import published, step

    learner = build("qwen3_moe")
    engine = TransformersEngine(build("qwen3_moe"), [3], slots=5)
    for version in range(2):
        if version:
            step(learner, version)
            engine.load(published(learner), Lineage(0), Version(version))
        sampled = generate(engine, prompts(4, seed=version), 2, Sampling(max_new_tokens=20))
        for prompt, samples in zip(prompts(4, seed=version), sampled, strict=True):
            for sample in samples:
                expected = forward_logprobs(learner, prompt, sample.token_ids.tolist())
                np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4, err_msg=f"version {version}")


def test_logprobs_hold_when_requests_join_and_leave_at_odd_moments(model: Any) -> None:
    engine = TransformersEngine(model, [3], slots=6)
    rng = np.random.default_rng(1)
    given = prompts(40, seed=2)
    lengths = rng.integers(1, 40, 40)
    done: dict[int, Trajectory] = {}
    next_one = 0
    while len(done) < 40:
        for _ in range(int(rng.integers(0, 3))):
            if next_one < 40:
                engine.submit(ask(next_one, given[next_one], int(lengths[next_one])))
                next_one += 1
        if rng.random() < 0.1 and engine.stats().running:
            engine.interrupt(int(rng.integers(0, next_one)))
        done.update((trajectory.id, trajectory) for trajectory in engine.step())
        assert engine.stats().running <= 6
    for id, trajectory in done.items():
        assert 1 <= len(trajectory.token_ids) <= lengths[id]
        expected = forward_logprobs(model, given[id], trajectory.token_ids.tolist())
        np.testing.assert_allclose(trajectory.logprobs, expected, atol=1e-4)


def test_greedy_decoding_is_model_generate(model: Any) -> None:
    given = prompts(7, seed=5)
    engine = TransformersEngine(model, [3], slots=3)
    for prompt, (sample,) in zip(
        given, generate(engine, given, 1, Sampling(max_new_tokens=25, temperature=0)), strict=True
    ):
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=25,
            do_sample=False,
            eos_token_id=3,
            pad_token_id=0,
        )[0, len(prompt) :]
        assert sample.token_ids.tolist() == expected.tolist()
        assert sample.finish == (Finish.STOP if sample.token_ids[-1] == 3 else Finish.LENGTH)


@pytest.mark.parametrize("kind", ["FalconConfig", "GPTNeoConfig", "RecurrentGemmaConfig"])
def test_a_model_whose_steps_are_not_its_whole_pass_is_refused(kind: str) -> None:
    model = SimpleNamespace(config=getattr(transformers, kind)(), _is_stateful=kind == "RecurrentGemmaConfig")
    with pytest.raises(ConfigError, match=f'the type of model.path is "{model.config.model_type}"; another model, or'):
        TransformersEngine(model, [])


def test_the_same_seed_gives_the_same_tokens_whoever_else_is_in_the_batch() -> None:
    model = build("qwen3")
    alone, crowded = TransformersEngine(model, [3], slots=1), TransformersEngine(model, [3], slots=8)
    wanted = [ask(id, prompt, 15) for id, prompt in enumerate(prompts(6))]
    for request in wanted:
        alone.submit(request)
        crowded.submit(request)
        crowded.submit(ask(100 + request.id, [1, 2, 3], 9))
    first, second = run(alone), run(crowded)
    for request in wanted:
        assert first[request.id].token_ids.tolist() == second[request.id].token_ids.tolist()


def test_other_seeds_give_other_tokens_and_the_right_frequencies() -> None:
    model = build("llama")
    prompt = [5, 9, 11]
    (samples,) = generate(TransformersEngine(model, [], slots=64), [prompt], 4096, Sampling(max_new_tokens=1), seed=7)
    seen = np.bincount([int(sample.token_ids[0]) for sample in samples], minlength=VOCABULARY) / 4096
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([prompt])).logits[0, -1].softmax(-1).numpy()
    assert np.abs(seen - expected).sum() < 0.12  # total variation of a fair draw of this size is about 0.03


def test_a_new_version_goes_on_over_the_kept_cache_in_a_new_segment() -> None:
    old, new = build("qwen3", seed=0), build("qwen3", seed=1)
    weights = {name: tensor.detach().numpy().copy() for name, tensor in new.state_dict().items()}
    engine = TransformersEngine(build("qwen3", seed=0), [], slots=4, version=4)
    prompt = [7, 8, 9]
    engine.submit(ask(0, prompt, 12))
    for _ in range(5):
        assert engine.step() == []
    engine.load(weights, Lineage(0), Version(5))
    trajectory = run(engine)[0]
    first, second = trajectory.segments
    assert (first.version, second.version, len(first.token_ids) + len(second.token_ids)) == (4, 5, 12)
    written = first.token_ids.tolist()
    np.testing.assert_allclose(first.logprobs, forward_logprobs(old, prompt, written), atol=1e-4)
    np.testing.assert_allclose(second.logprobs, over_kept_cache(old, new, prompt, written, second.token_ids), atol=1e-4)


def test_recompute_reads_what_runs_anew_and_keeps_its_tokens_as_first_sampled() -> None:
    old, new = build("qwen3", seed=0), build("qwen3", seed=1)
    weights = {name: tensor.detach().numpy().copy() for name, tensor in new.state_dict().items()}
    engine = TransformersEngine(build("qwen3", seed=0), [], slots=4, version=4, recompute=True)
    for id in range(6):
        engine.submit(ask(id, [7, 8, 9, id], 12))
    for _ in range(5):
        assert engine.step() == []
    engine.load(weights, Lineage(0), Version(5))
    engine.interrupt(3)
    done = run(engine)
    assert done[3].finish == Finish.INTERRUPTED
    assert [(s.version, len(s.token_ids)) for s in done[3].segments] == [(4, 6), (5, 1)]
    for id in (0, 1, 2):
        first, second = done[id].segments
        assert (first.version, second.version, len(first.token_ids), len(second.token_ids)) == (4, 5, 6, 6)
        prompt, token_ids = [7, 8, 9, id], done[id].token_ids.tolist()
        np.testing.assert_allclose(first.logprobs, forward_logprobs(old, prompt, token_ids[:6]), atol=1e-4)
        np.testing.assert_allclose(second.logprobs, forward_logprobs(new, prompt, token_ids)[6:], atol=1e-4)
    assert [[s.version for s in done[id].segments] for id in (4, 5)] == [[5], [5]]
    engine.load(weights, Lineage(0), Version(6))  # with no running sequence to recompute


def over_kept_cache(old: Any, new: Any, prompt: list[int], written: list[int], token_ids: Any) -> Any:
    """Log-probabilities of ``token_ids`` by the new weights over the old weights' cache."""
    cache = transformers.DynamicCache()
    sequence = torch.tensor([[*prompt, *written, *token_ids.tolist()]])
    seen = len(prompt) + len(written) - 1  # the old weights drew the last token and the new weights read it
    with torch.inference_mode():
        old(input_ids=sequence[:, :seen], past_key_values=cache, use_cache=True)
        logits = new(input_ids=sequence[:, seen:-1], past_key_values=cache, use_cache=True).logits[0]
    chosen = torch.tensor(token_ids, dtype=torch.int64)[:, None]
    return logits.float().log_softmax(-1).gather(-1, chosen)[:, 0].numpy()


def test_loading_twice_between_two_tokens_makes_one_segment() -> None:
    model = build("llama")
    weights = {name: tensor.detach().numpy().copy() for name, tensor in model.state_dict().items()}
    engine = TransformersEngine(model, [], slots=4, version=0)
    engine.submit(ask(0, [1], 4))
    engine.step()
    engine.load(weights, Lineage(0), Version(1))
    engine.load(weights, Lineage(0), Version(2))
    engine.submit(ask(1, [2], 2))
    done = run(engine)
    assert [(s.version, len(s.token_ids)) for s in done[0].segments] == [(0, 2), (2, 2)]
    assert [(s.version, len(s.token_ids)) for s in done[1].segments] == [(2, 2)]


def test_weights_that_do_not_fit_change_nothing() -> None:
    engine = TransformersEngine(build("llama"), [], version=3)
    before = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    weights = {name: np.zeros(tensor.shape, np.float32) for name, tensor in before.items()}
    name = "model.norm.weight"
    for wrong, message in (
        ({name: np.zeros(5, np.float32)}, r"model\.norm\.weight is float32 \[5\]"),
        ({name: np.zeros(32, np.float16)}, r"model\.norm\.weight is float16"),
        ({"model.other": np.zeros(1, np.float32)}, r"model\.other is not one"),
    ):
        with pytest.raises(LoadError, match=message):
            engine.load(weights | wrong, Lineage(0), Version(4))
    del weights[name]
    with pytest.raises(LoadError, match=r"model\.norm\.weight is missing"):
        engine.load(weights, Lineage(0), Version(4))
    assert engine.version == 3
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.model.state_dict().items())


def test_weights_may_be_a_read_only_map_and_bfloat16_comes_as_bits() -> None:
    model, other = build("qwen3").bfloat16(), build("qwen3", seed=1).bfloat16()
    weights = {name: tensor.view(torch.uint16).numpy() for name, tensor in other.state_dict().items()}
    del weights["lm_head.weight"]  # the tensor is tied, so one copy is enough
    for array in weights.values():
        array.setflags(write=False)
    engine = TransformersEngine(model, [])
    engine.load(weights, Lineage(0), Version(1))
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert len(generate(engine, [[1, 2]], 2, Sampling(max_new_tokens=5))[0][0].token_ids) == 5


def test_an_interrupt_ends_a_trajectory_with_the_tokens_so_far_and_at_least_one() -> None:
    engine = TransformersEngine(build("qwen3"), [], slots=2)
    for id in range(4):
        engine.submit(ask(id, [1, 2, id], 50))
    for _ in range(3):
        engine.step()
    for id in (0, 3):
        engine.interrupt(id)
    engine.interrupt(99)
    done = {trajectory.id: trajectory for _ in range(3) for trajectory in engine.step()}
    assert {id: (t.finish, len(t.token_ids)) for id, t in done.items()} == {
        0: (Finish.INTERRUPTED, 5),
        3: (Finish.INTERRUPTED, 1),
    }


def test_its_counters_tell_what_a_step_costs() -> None:
    """The difference of two readings (tokens, decode steps, seconds) gives the number of running requests and the step
    time."""
    engine = TransformersEngine(build("qwen3"), [], slots=2)
    for id in range(3):
        engine.submit(ask(id, [1, 2, id], 6))
    engine.step()
    before = engine.stats()
    engine.step()
    engine.step()
    seen = engine.stats()
    assert (seen.running, seen.waiting, seen.slots) == (2, 1, 2)
    assert (seen.steps - before.steps, seen.generated_tokens - before.generated_tokens) == (2, 4)
    assert seen.kv_tokens - before.kv_tokens == 4
    assert seen.kv_used == pytest.approx(seen.kv_tokens / seen.kv_capacity)


def test_an_abort_forgets_a_trajectory_and_frees_its_row() -> None:
    engine = TransformersEngine(build("qwen3"), [], slots=2)
    for id in range(4):
        engine.submit(ask(id, [1, 2, id], 6))
    engine.step()
    for id in (0, 3, 99):
        engine.abort(id)
    assert sorted(run(engine)) == [1, 2]
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)


def test_a_prefix_goes_on_where_it_was_left() -> None:
    model = build("qwen3")
    whole = run_one(TransformersEngine(model, [], slots=2, version=2), ask(0, [4, 5], 12))
    written = TokenSegment(
        lineage=Lineage(0), version=Version(1), token_ids=whole.token_ids[:5], logprobs=whole.logprobs[:5]
    )
    request = Request(
        id=0, prompt_ids=np.array([4, 5], np.int32), sampling=Sampling(max_new_tokens=12), prefix=(written,)
    )
    again = run_one(TransformersEngine(model, [], slots=2, version=2), request)
    assert [(s.version, len(s.token_ids)) for s in again.segments] == [(1, 5), (2, 7)]
    assert again.token_ids.tolist() == whole.token_ids.tolist()


def run_one(engine: TransformersEngine, request: Request) -> Trajectory:
    engine.submit(request)
    return run(engine)[request.id]


def test_a_request_that_cannot_be_served_is_refused_with_the_reason() -> None:
    engine = TransformersEngine(build("llama"), [])
    for prompt, message in (
        ([], "the prompt is empty"),
        ([1] * 96, "the prompt has 96 tokens; the model's context is 96"),
        ([VOCABULARY], "the prompt has token 61; the vocabulary has 61"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.submit(ask(0, prompt))
    for token, message in ((61, "the prefix has token 61; the vocabulary has 61"), (-1, "the prefix has token -1")):
        ids = np.array([3, token], np.int32)
        written = TokenSegment(lineage=Lineage(0), version=Version(0), token_ids=ids, logprobs=np.zeros(2, np.float32))
        with pytest.raises(RequestError, match=message):
            engine.submit(replace(ask(0, [1]), prefix=(written,)))
    assert engine.stats().waiting == 0


def test_a_trajectory_ends_where_the_context_ends() -> None:
    trajectory = run_one(TransformersEngine(build("llama"), []), ask(0, [1] * 90, 20))
    assert (len(trajectory.token_ids), trajectory.finish) == (6, Finish.LENGTH)


def test_generate_leaves_the_callers_model_as_it_was() -> None:
    model = build("qwen3").train()
    generate(TransformersEngine(model, []), [[1, 2]], 2, Sampling(max_new_tokens=3))
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    loss = model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_joining_can_be_held_while_those_that_run_go_on() -> None:
    engine = TransformersEngine(build("llama"), [], slots=4)
    engine.submit(ask(0, [1], 3))
    engine.step()
    engine.joining = False
    engine.submit(ask(1, [2], 3))
    assert [t.id for _ in range(3) for t in engine.step()] == [0]
    assert (engine.stats().running, engine.stats().waiting) == (0, 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_weights_are_named(temperature: float) -> None:
    model = build("llama")
    with torch.no_grad():
        model.lm_head.weight[4] = float("nan")
    with pytest.raises(EngineError, match="scores are not finite"):
        generate(TransformersEngine(model, []), [[1, 2]], 1, Sampling(max_new_tokens=3, temperature=temperature))


def test_few_free_rows_wait_for_more_unless_they_hold_all_that_waits() -> None:
    engine = TransformersEngine(build("llama"), [], slots=16)
    for id in range(20):
        engine.submit(ask(id, [1], 3 if id == 0 else 6))
    seen = []
    for _ in range(7):
        engine.step()
        seen.append((engine.stats().running, engine.stats().waiting))
    assert seen[1] == (15, 4)  # one row is free; the next group needs two
    assert seen[-1] == (4, 0)
