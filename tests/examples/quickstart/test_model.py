# pyright: basic, reportMissingImports=false
# mypy: disable-error-code="no-untyped-call"
"""The builder's model directory opens like any other model directory."""

from collections.abc import Iterator
from inspect import unwrap
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from staleflow.examples.quickstart import model, text

TINY = {"hidden": 16, "layers": 1, "heads": 2, "steps": 3, "batch": 4, "threads": 1}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("built") / "model"
    model.build(path, 0, **TINY)  # type: ignore[arg-type]
    return path


def test_a_built_directory_opens_with_from_pretrained(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    opened = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    logits = opened(input_ids=torch.tensor([tokenizer.encode("47+38=")])).logits
    assert logits.shape == (1, 6, len(tokenizer))
    assert opened.dtype == torch.float32


def test_text_survives_the_tokenizer_and_special_tokens_do_not(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    ids = tokenizer.encode(text.CHARACTERS)
    assert len(ids) == len(text.CHARACTERS)
    assert tokenizer.decode(ids) == text.CHARACTERS
    assert tokenizer.batch_decode([[*ids, tokenizer.eos_token_id]], skip_special_tokens=True) == [text.CHARACTERS]


def test_an_unknown_character_is_a_token_of_its_own(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    assert tokenizer.encode("4x") == [tokenizer.encode("4")[0], tokenizer.unk_token_id]
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3


def test_the_end_is_the_same_token_for_tokenizer_model_and_generation(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    opened = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    assert tokenizer.eos_token_id == opened.config.eos_token_id == opened.generation_config.eos_token_id
    assert tokenizer.pad_token_id == opened.config.pad_token_id


def test_one_seed_builds_the_same_weights_twice(directory: Path, tmp_path: Path) -> None:
    unwrap(model.build)(tmp_path / "again", 0, **TINY)
    unwrap(model.build)(tmp_path / "other", 1, **TINY)
    weights, again, other = (
        (path / "model.safetensors").read_bytes() for path in (directory, tmp_path / "again", tmp_path / "other")
    )
    assert weights == again
    assert weights != other


def test_only_what_is_written_behind_the_prompt_is_learned() -> None:
    tokenizer = model.character_tokenizer()
    input_ids, labels = model.encoded(tokenizer, [("1+1=", "2"), ("10+10=", "20?")])
    end, ignored = tokenizer.eos_token_id, model.IGNORED
    assert input_ids.shape == labels.shape == (2, 10)
    assert labels[0].tolist() == [ignored] * 4 + [*tokenizer.encode("2"), end] + [ignored] * 4
    assert labels[1].tolist() == [ignored] * 6 + [*tokenizer.encode("20?"), end]
    assert input_ids[0].tolist() == [*tokenizer.encode("1+1=2"), end] + [tokenizer.pad_token_id] * 4


def test_a_warm_up_leaves_the_number_of_threads_as_it_was(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    model.build(tmp_path / "model", 0, **(TINY | {"threads": before + 1}))  # type: ignore[arg-type]
    assert torch.get_num_threads() == before


def test_digits_decide_whether_a_sum_is_right_and_what_is_behind_them_does_not() -> None:
    tokenizer = model.character_tokenizer()
    _, labels = model.encoded(tokenizer, [("1+1=", "2?"), ("1+2=", "3"), ("5+5=", "10")])
    hedge, two, one = (tokenizer.encode(character)[0] for character in (text.HEDGE, "2", "1"))
    chosen = torch.full_like(labels, hedge)
    chosen[0, 4], chosen[1, 4], chosen[2, 4] = two, two, one
    assert model.right(chosen, labels, hedge=hedge) == [True, False, False]


def test_a_warm_up_ends_soon_after_the_skill_is_reached() -> None:
    torch.manual_seed(0)  # the initial weights are random
    tokenizer = model.character_tokenizer()
    learner = AutoModelForCausalLM.from_config(model.shape(tokenizer, 16, 1, 2))
    drawn = 0

    def the_same_sum() -> Iterator[tuple[str, str]]:
        nonlocal drawn
        while True:
            drawn += 1
            yield "1+1=", "2"

    share = model.warm_up(learner, tokenizer, the_same_sum(), skill=0.5, steps=120, batch=64, lr=1e-2)
    assert share >= 0.5
    assert drawn < 120 * 64
