"""The pretraining text has the requested share of noise and never contains held-out problems."""

from itertools import islice

import pytest

from staleflow.examples.quickstart import task, text


def test_every_answer_written_is_right_but_for_the_question_mark() -> None:
    rows = task.prompts(0)
    answers = {row["prompt"]: row["answer"] for row in rows}
    drawn = islice(text.examples(rows, 0), 500)
    assert all(written in (answers[prompt], answers[prompt] + "?") for prompt, written in drawn)


@pytest.mark.parametrize("hedged", [0.0, 0.25, 1.0])
def test_question_marks_come_in_the_share_asked_for(hedged: float) -> None:
    drawn = list(islice(text.examples(task.prompts(0), 0, hedged=hedged), 4_000))
    assert sum(written.endswith("?") for _, written in drawn) / len(drawn) == pytest.approx(hedged, abs=0.03)


def test_the_text_is_the_same_for_one_seed_only() -> None:
    rows = task.prompts(0)
    first, again, other = (list(islice(text.examples(rows, seed), 50)) for seed in (1, 1, 2))
    assert first == again != other


def test_no_held_out_problem_is_read() -> None:
    assert not any(task.is_held_out(prompt) for prompt, _ in islice(text.examples(task.prompts(0), 0), 20_000))


def test_every_character_of_the_text_has_a_token() -> None:
    drawn = islice(text.examples(task.prompts(0, operations="+-"), 0), 5_000)
    assert {c for example in drawn for c in "".join(example)} <= set(text.CHARACTERS)
