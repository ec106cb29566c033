"""Tasks of reasoning-gym become rows, and its own score is the reward."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("reasoning_gym")

from staleflow.examples import reasoning

SUMS: dict[str, Any] = {"dataset": "chain_sum", "size": 200, "max_terms": 3, "max_digits": 1}


def asked(rows: list[dict[str, str]]) -> list[str]:
    return [json.loads(row["entry"])["question"] for row in rows]


def test_every_question_is_either_trained_on_or_held_out() -> None:
    trained, held_out = asked(list(reasoning.prompts(0, **SUMS))), asked(list(reasoning.held_out(0, **SUMS)))
    assert len(trained) + len(held_out) == SUMS["size"]
    assert len(held_out) > 10
    others = asked(list(reasoning.prompts(1, **SUMS)))
    assert not set(held_out) & {*trained, *others}
    assert trained != others


def test_equal_arguments_give_equal_rows() -> None:
    assert list(reasoning.prompts(3, **SUMS)) == list(reasoning.prompts(3, **SUMS))


def test_the_template_has_the_question_or_its_metadata() -> None:
    (plain, *_), (short, *_) = (
        reasoning.prompts(0, **SUMS),
        reasoning.prompts(0, **SUMS, template="{{1}} {expression} ="),
    )
    entry = json.loads(plain["entry"])
    assert plain["prompt"] == entry["question"]
    assert short["prompt"] == f"{{1}} {entry['metadata']['expression']} ="


@pytest.mark.parametrize("template", ["{expresion} =", "{", "{}"])
def test_a_template_that_cannot_be_filled_is_named_with_what_there_is(template: str) -> None:
    with pytest.raises(ValueError, match=r"template=.*; this dataset has .*\{expression\}, .*\{question\}") as raised:
        next(reasoning.prompts(0, **SUMS, template=template))
    assert repr(template) in str(raised.value)


def test_the_reward_is_the_score_of_reasoning_gym() -> None:
    row = next(reasoning.prompts(0, **SUMS))
    answer = json.loads(row["entry"])["answer"]
    assert reasoning.reward(row["prompt"], f" {answer}\n", row["entry"]) == 1.0
    assert reasoning.reward(row["prompt"], f"{answer}.0", row["entry"]) == 1.0
    assert reasoning.reward(row["prompt"], f"It is {answer}", row["entry"]) == len(answer) / len(f"It is {answer}")
    assert reasoning.reward(row["prompt"], "x", row["entry"]) == 0.0


def test_a_score_that_needs_the_metadata_gets_it() -> None:
    row = next(reasoning.prompts(0, dataset="countdown", size=8))
    solution = json.loads(row["entry"])["metadata"]["expression"]
    assert reasoning.reward(row["prompt"], solution, row["entry"]) == 1.0
    assert reasoning.reward(row["prompt"], "1 + 1", row["entry"]) < 1.0


def test_without_the_package_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "reasoning_gym.py").write_text("raise ImportError('No module named reasoning_gym')")
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import staleflow.examples.reasoning",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("install the extra: pip install -e '.[reasoning-gym]'")
