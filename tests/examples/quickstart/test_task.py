"""The quickstart's arithmetic, its split and its reward are right."""

import pytest

from staleflow.examples.quickstart import task


def asked(rows: list[dict[str, str]]) -> set[str]:
    return {row["prompt"] for row in rows}


def test_held_out_problems_are_in_no_training_set_of_any_seed() -> None:
    kept = asked(task.held_out(0, operations="+-"))
    assert all(not kept & asked(task.prompts(seed, operations="+-")) for seed in range(3))


def test_training_and_held_out_problems_together_are_all_problems_once() -> None:
    rows = task.prompts(0) + task.held_out(0)
    assert len(rows) == len(asked(rows)) == 100 * 100


def test_one_seed_gives_the_same_rows_and_another_seed_another_order() -> None:
    assert task.prompts(1) == task.prompts(1)
    assert task.prompts(1) != task.prompts(2)
    assert asked(task.prompts(1)) == asked(task.prompts(2))


def test_there_are_enough_held_out_problems_for_an_evaluation() -> None:
    assert len(task.held_out(0)) >= 256


def test_every_answer_is_the_answer() -> None:
    for row in task.prompts(0, limit=20, operations="+-"):
        operation = "+" if "+" in row["prompt"] else "-"
        a, b = row["prompt"].rstrip("=").split(operation)
        assert int(row["answer"]) == (int(a) + int(b) if operation == "+" else int(a) - int(b))


@pytest.mark.parametrize("completion", ["85", " 85", "85\n"])
def test_the_exact_answer_is_worth_one(completion: str) -> None:
    assert task.reward(prompt="47+38=", completion=completion, answer="85", group=3) == 1.0


@pytest.mark.parametrize("completion", ["", "8", "75", "085", "85?", "85.0", "8 5", "+85", "85=85", "-85"])
def test_anything_else_is_worth_nothing(completion: str) -> None:
    assert task.reward(prompt="47+38=", completion=completion, answer="85") == 0.0


@pytest.mark.parametrize(("limit", "operations"), [(1, "+"), (100, ""), (100, "*")])
def test_options_out_of_range_are_named(limit: int, operations: str) -> None:
    with pytest.raises(ValueError, match=f"limit={limit} operations='"):
        task.prompts(0, limit=limit, operations=operations)
