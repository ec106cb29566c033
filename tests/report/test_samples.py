"""A report shows the samples in ``samples.jsonl``."""

import json
from pathlib import Path
from typing import Any

from staleflow.report.samples import MAX_TEXT, Sample, samples


def line(step: int, reward: float = 1.0, lineage: int = 0, prompt: str = "2 + 2 =", completion: str = " 4") -> str:
    fields: dict[str, Any] = {"version": step - 1, "tokens": 3, "group": 9, "reward": reward}
    return json.dumps({"step": step, "lineage": lineage, **fields, "prompt": prompt, "completion": completion}) + "\n"


def file(folder: Path, text: str) -> Path:
    path = folder / "samples.jsonl"
    path.write_text(text)
    return path


def test_steps_from_the_first_to_the_last_are_shown_with_all_of_their_lines(tmp_path: Path) -> None:
    path = file(tmp_path, "".join(line(step, 1.0) + line(step, 0.0) for step in range(101)))
    shown = [(one.step, one.reward) for one in samples(path)]
    assert shown == [(step, reward) for step in (0, 25, 50, 75, 100) for reward in (1.0, 0.0)]


def test_few_steps_are_all_shown_and_what_was_never_written_is_none(tmp_path: Path) -> None:
    path = file(tmp_path, line(3) + line(4))
    expected = Sample(lineage=0, step=3, version=2, reward=1.0, tokens=3, prompt="2 + 2 =", completion=" 4")
    assert samples(path)[0] == expected
    assert [one.step for one in samples(path)] == [3, 4]
    assert samples(tmp_path / "none.jsonl") == []


def test_of_a_step_that_was_trained_again_the_last_lineage_is_shown(tmp_path: Path) -> None:
    path = file(tmp_path, line(1) + line(1, 0.0) + line(2) + line(1, 0.5, lineage=1))
    assert [(one.step, one.lineage, one.reward) for one in samples(path)] == [(1, 1, 0.5), (2, 0, 1.0)]


def test_torn_and_strange_lines_are_left_out(tmp_path: Path) -> None:
    path = file(tmp_path, "[]\n" + line(1) + '{"step": "two"}\n\n' + line(2) + line(3)[:20])
    assert [one.step for one in samples(path)] == [1, 2]


def test_of_a_long_text_the_part_where_prompt_and_completion_meet_is_shown(tmp_path: Path) -> None:
    long = "a" * MAX_TEXT + "b" * 1_234
    (shown,) = samples(file(tmp_path, line(1, prompt=long[::-1], completion=long)))
    assert shown.prompt == f"(1,234 characters) … {'a' * MAX_TEXT}"
    assert shown.completion == f"{'a' * MAX_TEXT} … (1,234 characters)"
