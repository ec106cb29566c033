# pyright: basic, reportMissingImports=false
"""Tokens are drawn from the truncated and penalised distribution, and their log-probabilities are those of it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from staleflow.clients.rollout.engines.base import RequestError, Sampling
from staleflow.protocols.wire.trajectory import Finish

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from staleflow.clients.rollout.engines.transformers.engine import TransformersEngine, generate  # noqa: E402
from staleflow.clients.rollout.engines.transformers.sampling import RowSampling, draw, shaped  # noqa: E402
from tests.clients.rollout.engines.transformers.test_engine import (  # noqa: E402
    VOCABULARY,
    ask,
    build,
    prompts,
    run,
)
from tests.clients.rollout.fidelity import by_transformers, expected_logprobs  # noqa: E402

PROBABILITIES = [0.4, 0.05, 0.3, 0.25]
GRID = (np.arange(1000, dtype=np.float32) + 0.5) / 1000
"""Uniform numbers: a token of probability p is drawn for 1000 p of them."""


def rows(*each: Sampling, written: tuple[list[int], ...] = (), prompt: int = 0) -> RowSampling:
    """The columns of these rows. ``prompt``: number of tokens of ``written`` that are the prompt."""
    tokens = [np.array(ids, np.int32) for ids in written or ([],) * len(each)]
    return RowSampling(
        temperature=np.array([row.temperature for row in each], np.float32),
        top_p=np.array([row.top_p for row in each], np.float32),
        top_k=np.array([row.top_k for row in each], np.int64),
        min_p=np.array([row.min_p for row in each], np.float32),
        repetition_penalty=np.array([row.repetition_penalty for row in each], np.float32),
        frequency_penalty=np.array([row.frequency_penalty for row in each], np.float32),
        presence_penalty=np.array([row.presence_penalty for row in each], np.float32),
        prompt=lambda row: tokens[row][:prompt],
        completion=lambda row: tokens[row][prompt:],
    )


def of(**parameters: Any) -> Sampling:
    return Sampling(max_new_tokens=20, **parameters)


EACH = [
    of(),
    of(temperature=0.7),
    of(top_p=0.8),
    of(top_k=3),
    of(min_p=0.1),
    of(repetition_penalty=1.5),
    of(repetition_penalty=0.8, temperature=2.0),
    of(frequency_penalty=0.8),
    of(presence_penalty=-0.6),
    of(frequency_penalty=-0.4, presence_penalty=1.5, repetition_penalty=1.2, temperature=0.8, top_p=0.9),
    of(top_p=0.9, top_k=10, min_p=0.02, repetition_penalty=1.3, temperature=1.7),
    of(top_k=1_000, top_p=0.3),
    of(top_p=1e-6),
]


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (of(), [0, 1, 2, 3]),
        (of(top_p=0.7), [0, 2]),
        (of(top_p=0.71), [0, 2, 3]),
        (of(top_k=1), [0]),
        (of(top_k=3), [0, 2, 3]),
        (of(min_p=0.7), [0, 2]),
        (of(min_p=0.1), [0, 1, 2, 3]),
        (of(min_p=0.5, top_p=0.72), [0, 2]),  # min-p first: the nucleus of 0.4, 0.3 and 0.25 of 0.95
        (of(min_p=1.0), [0]),
    ],
)
def test_a_token_is_drawn_with_its_share_of_what_remains_and_others_never(sampling: Sampling, kept: list[int]) -> None:
    logits = torch.tensor(PROBABILITIES).log().repeat(len(GRID), 1)
    token_ids, logprobs = draw(logits, rows(*[sampling] * len(GRID)), GRID)
    whole = sum(PROBABILITIES[token] for token in kept)
    shares = {token: PROBABILITIES[token] / whole for token in kept}
    assert set(token_ids.tolist()) == set(kept)
    for token, share in shares.items():
        assert abs(np.count_nonzero(token_ids == token) - 1000 * share) <= 1
        np.testing.assert_allclose(logprobs[token_ids == token], np.log(share), rtol=1e-5, atol=1e-6)


def test_every_combination_matches_the_processors_of_transformers() -> None:
    torch.manual_seed(0)
    scores = 4 * torch.randn(len(EACH), VOCABULARY)
    written = tuple(torch.randint(0, VOCABULARY // 4, (30,)).tolist() for _ in EACH)  # many appear more than once
    mine = shaped(scores.clone(), rows(*EACH, written=written, prompt=12))
    for row, sampling in enumerate(EACH):
        theirs = by_transformers(scores[row], written[row], sampling, written[row][12:])
        assert torch.equal(torch.isinf(mine[row]), torch.isinf(theirs)), sampling
        torch.testing.assert_close(mine[row].log_softmax(-1), theirs.log_softmax(-1))


def test_a_row_is_drawn_as_if_it_were_alone() -> None:
    torch.manual_seed(1)
    scores, uniform = 3 * torch.randn(len(EACH), VOCABULARY), GRID[:: 1000 // len(EACH)][: len(EACH)]
    written = tuple([row, row + 1] for row in range(len(EACH)))
    together = draw(scores, rows(*EACH, written=written), uniform)
    for row, sampling in enumerate(EACH):
        alone = draw(scores[row : row + 1], rows(sampling, written=written[row : row + 1]), uniform[row : row + 1])
        assert (alone[0][0], alone[1][0]) == (together[0][row], together[1][row]), sampling


def test_tokens_as_likely_as_the_last_of_top_k_stay() -> None:
    mine = shaped(torch.tensor([[2.0, 1.0, 1.0, 0.0]]), rows(of(top_k=2)))
    assert torch.isinf(mine).tolist() == [[False, False, False, True]]


@pytest.mark.parametrize(
    "sampling",
    [
        of(top_p=0.6),
        of(top_k=4, temperature=1.4),
        of(repetition_penalty=1.6),
        of(frequency_penalty=1.1, presence_penalty=-0.7, repetition_penalty=1.2),
        of(top_p=0.9, top_k=12, min_p=0.05, repetition_penalty=1.2, temperature=1.2),
    ],
)
def test_a_completion_has_the_log_probabilities_of_the_distribution_it_was_sampled_from(sampling: Sampling) -> None:
    model = build("qwen3")
    engine = TransformersEngine(model, [3], slots=5)
    for prompt, samples in zip(prompts(3), generate(engine, prompts(3), 2, sampling), strict=True):
        for sample in samples:
            expected = expected_logprobs(model, prompt, sample.token_ids.tolist(), sampling)
            np.testing.assert_allclose(sample.logprobs, expected, atol=1e-3)


def test_requests_of_one_batch_keep_their_own_parameters() -> None:
    """Rows move as others end, so a column that stays behind would show."""
    model = build("qwen3")
    engine = TransformersEngine(model, [3], slots=4)
    mine = [replace(EACH[id % len(EACH)], max_new_tokens=3 + id) for id in range(12)]
    for id, sampling in enumerate(mine):
        engine.submit(replace(ask(id, prompts(12)[id]), sampling=sampling))
    for id, trajectory in run(engine).items():
        expected = expected_logprobs(model, prompts(12)[id], trajectory.token_ids.tolist(), mine[id])
        np.testing.assert_allclose(trajectory.logprobs, expected, atol=1e-3)


def letters(completions: list[Any]) -> list[str]:
    """One letter a token; the stop token 3 writes nothing."""
    return ["".join(chr(ord("0") + token) for token in ids.tolist() if token != 3) for ids in completions]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_stop_string_ends_the_completion_with_the_token_that_completes_it(recompute: bool) -> None:
    model = build("qwen3")
    whole = TransformersEngine(model, [], slots=4)
    free = generate(whole, prompts(4), 1, of())
    for prompt, (sample,) in zip(prompts(4), free, strict=True):
        text = letters([sample.token_ids])[0]
        stop = text[5:8]
        engine = TransformersEngine(model, [], decode=letters, slots=4, recompute=recompute)
        engine.submit(replace(ask(0, prompt, seed=prompts(4).index(prompt)), sampling=of(stop=("zzz", stop))))
        for _ in range(3):
            engine.step()
        engine.load(
            {name: tensor.numpy() for name, tensor in model.state_dict().items()}, engine.lineage, engine.version
        )
        (trajectory,) = run(engine).values()
        end = text.index(stop) + 3
        assert trajectory.token_ids.tolist() == sample.token_ids[:end].tolist()
        assert trajectory.finish is Finish.STOP
        np.testing.assert_allclose(trajectory.logprobs, sample.logprobs[:end], atol=1e-4)


@pytest.mark.parametrize(
    ("parameters", "line"),
    [
        ({"top_p": 0.0}, r"top_p is 0\.0; it must be above 0 and at most 1"),
        ({"top_p": 1.5}, r"top_p is 1\.5; it must be above 0 and at most 1"),
        ({"top_k": -1}, r"top_k is -1; it must be at least 0"),
        ({"min_p": 2.0}, r"min_p is 2\.0; it must be from 0 to 1"),
        ({"temperature": float("nan")}, r"temperature is nan; it must be at least 0"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty is 0\.0; it must be above 0"),
        ({"frequency_penalty": 2.5}, r"frequency_penalty is 2\.5; it must be from -2 to 2"),
        ({"presence_penalty": -3.0}, r"presence_penalty is -3\.0; it must be from -2 to 2"),
        ({"stop": ("",)}, r"stop is \[''\]; it must be without empty strings"),
        ({"stop": ("a",)}, r"stop is \['a'\]; this engine has no tokenizer to read text with"),
    ],
)
def test_a_parameter_out_of_range_is_refused_with_its_name(parameters: dict[str, Any], line: str) -> None:
    engine = TransformersEngine(build("qwen3"), [3], slots=4)
    with pytest.raises(RequestError, match=line):
        engine.submit(replace(ask(0, [5]), sampling=of(**parameters)))
