# pyright: basic, reportMissingImports=false
"""The reference model's log-probabilities stand at the tokens that they belong to."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from staleflow.clients.stage.main import open_judge
from staleflow.clients.stage.model_stage import Ended
from staleflow.clients.stage.reference import Reference
from staleflow.clients.stage.worker import Failed
from staleflow.clients.trainer.data.batch import FetchedGroup, assemble
from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config
from tests.clients.stage.judged import asked_to_end, column, going_on, group, ragged, sequences
from tests.clients.trainer.making import header

TEMPERATURE = 0.7


def reference(directory: Path, micro_tokens: int = 24) -> Reference:
    return Reference(directory, dtype="float32", temperature=TEMPERATURE, micro_tokens=micro_tokens)


def literally(directory: Path, sequence: list[int], prompt: int) -> list[float]:
    """Compute one token after another, each from a forward pass over only the tokens before it."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    model.eval()
    found: list[float] = []
    with torch.no_grad():
        for place in range(prompt, len(sequence)):
            logits = model(input_ids=torch.tensor([sequence[:place]])).logits[0, -1].double() / TEMPERATURE
            found.append(float(torch.log_softmax(logits, -1)[sequence[place]]))
    return found


def test_each_token_has_the_log_probability_that_a_direct_pass_gives_it(model_directory: Path) -> None:
    groups = ragged()
    made = reference(model_directory).judge(groups, going_on)
    for one, columns in zip(groups, made, strict=True):
        prompt = len(one.payload.prompt_ids)
        expected = [p for s in sequences(one.payload) for p in literally(model_directory, s, prompt)]
        assert column(columns, "logprobs").tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("dtype", ["", "bfloat16"])
def test_a_reference_has_the_dtype_of_the_policy_or_its_own(model_directory: Path, tmp_path: Path, dtype: str) -> None:
    table = {
        "model": {"path": str(model_directory)},
        "prompts": {"source": "somewhere:prompts"},
        "reward": {"run": "somewhere:reward"},
        "reference": {"dtype": dtype},
        "trainer": {"algorithm": {"kl_coef": 0.1}},
    }
    judge = open_judge(msgspec.convert(table, Config), tmp_path, "reference")
    assert isinstance(judge, Reference)
    assert judge._model.dtype == (torch.bfloat16 if dtype else torch.float32)


def test_how_groups_are_cut_into_passes_does_not_matter(model_directory: Path) -> None:
    groups = ragged()
    one_pass = reference(model_directory, micro_tokens=10_000).judge(groups, going_on)
    many = reference(model_directory, micro_tokens=1).judge(groups, going_on)
    for left, right in zip(one_pass, many, strict=True):
        assert column(left, "logprobs") == pytest.approx(column(right, "logprobs"), abs=1e-5)


def test_in_a_batch_the_column_stands_where_the_engines_log_probabilities_do(model_directory: Path) -> None:
    """With the engine's model and temperature, the reference returns the engine's values at the same positions."""
    groups = ragged()
    made = reference(model_directory).judge(groups, going_on)
    fetched: list[FetchedGroup] = []
    for one, columns in zip(groups, made, strict=True):
        one.payload.logprobs = column(columns, "logprobs")
        one.payload.stages["stage/reference/logprobs"] = column(columns, "logprobs")
        fetched.append(FetchedGroup(group=one.group, row={}, payload=one.payload))
    batch = assemble(header(3), fetched)
    assert set(batch.token_stages) == {"reference/logprobs"}
    assert np.array_equal(batch.token_stages["reference/logprobs"], batch.behavior_logprobs)
    assert np.count_nonzero(batch.token_stages["reference/logprobs"]) == batch.completions.sum()


def test_a_group_with_tokens_of_another_vocabulary_fails_alone(model_directory: Path) -> None:
    strange = group(1)
    strange.payload.token_ids = strange.payload.token_ids.copy()
    strange.payload.token_ids[2] = 20
    good, bad = reference(model_directory).judge([group(2), strange], going_on)
    assert bad == Failed("it has token 20; the vocabulary of this stage's model has 20 tokens")
    assert len(column(good, "logprobs")) == 10


def test_a_group_longer_than_the_models_context_fails_alone(model_directory: Path) -> None:
    long, fits = group(1, prompt=100, lengths=(4, 29)), group(2, prompt=100, lengths=(28,))
    bad, good = reference(model_directory).judge([long, fits], going_on)
    assert bad == Failed("it has a sequence of 129 tokens; the context of this stage's model is 128")
    assert len(column(good, "logprobs")) == 28


@pytest.mark.parametrize("stage", ["reference", "critic"])
def test_a_stage_whose_model_reads_other_tokens_than_the_policy_is_the_operators_error(
    model_directory: Path, tmp_path: Path, stage: str
) -> None:
    other = tmp_path / "other"
    shutil.copytree(model_directory, other)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"+":', '"?":'))
    table = {"prompts": {"source": "a:b"}, "reward": {"run": "a:b"}, "model": {"path": str(model_directory)}}
    config = msgspec.convert(table | {stage: {"path": str(other)}}, Config)
    with pytest.raises(ConfigError, match=rf"^{stage}\.path is .*, of which 1 tokens differ: '\+' is missing, not 10$"):
        open_judge(config, tmp_path, stage)


def test_a_model_that_is_broken_fails_the_group_by_name(model_directory: Path) -> None:
    broken = reference(model_directory)
    with torch.no_grad():
        broken._model.get_input_embeddings().weight.fill_(float("nan"))
    assert broken.judge([group(1)], going_on) == [Failed("the model's logprobs hold a value that is not finite")]


def test_a_worker_that_is_asked_to_end_does_not_finish_its_passes(model_directory: Path) -> None:
    with pytest.raises(Ended):
        reference(model_directory).judge(ragged(), asked_to_end)
