"""The sample files show the trained text to a reader."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.clients.texts import ids_as_text
from staleflow.clients.trainer.data.batch import FetchedGroup, TrainBatch, assemble
from staleflow.clients.trainer.samples import Samples
from staleflow.protocols.consistency.ids import GroupId
from tests.clients.trainer.making import header, payload


def trained(rewards: list[float], *, step: int = 7) -> TrainBatch:
    """A group of completions of 2, 3, 4, ... tokens with these rewards, by version 5, followed by another group."""
    first = payload(1, list(range(2, 2 + len(rewards))), version=5)
    first.stages["stage/reward/reward"] = np.array(rewards, np.float32)
    other = payload(2, [9, 9], version=6)
    return assemble(
        header(step), [FetchedGroup(group=GroupId(n), row={}, payload=p) for n, p in ((40, first), (2, other))]
    )


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_step_shows_the_best_and_the_worst_of_its_first_group(tmp_path: Path) -> None:
    path, batch = tmp_path / "samples.jsonl", trained([0.5, 0.0, 1.0])
    Samples(path, ids_as_text).write(batch)
    group = payload(1, [2, 3, 4], version=5)
    prompt, ids = " ".join(map(str, group.prompt_ids)), list(map(str, group.token_ids))
    same = {"step": 7, "lineage": 0, "group": 40, "version": 5, "prompt": prompt}
    assert written(path) == [
        same | {"reward": 1.0, "tokens": 4, "completion": " ".join(ids[5:])},
        same | {"reward": 0.0, "tokens": 3, "completion": " ".join(ids[2:5])},
    ]


@pytest.mark.parametrize(("rewards", "lengths"), [([0.5, 0.5, 0.5], [2, 4]), ([0.5], [2])])
def test_of_equal_rewards_it_shows_two_and_of_one_trajectory_that(
    tmp_path: Path, rewards: list[float], lengths: list[int]
) -> None:
    Samples(tmp_path / "samples.jsonl", ids_as_text).write(trained(rewards))
    assert [line["tokens"] for line in written(tmp_path / "samples.jsonl")] == lengths


def test_steps_are_added_and_a_line_stays_a_line_whatever_was_written(tmp_path: Path) -> None:
    samples = Samples(tmp_path / "samples.jsonl", lambda ids: ["a\n\x1b]0;\u2028é" for _ in ids])
    for step in (7, 8):
        samples.write(trained([0.0, 1.0], step=step))
    text = (tmp_path / "samples.jsonl").read_text()
    assert [line["step"] for line in written(tmp_path / "samples.jsonl")] == [7, 7, 8, 8]
    assert (text.count("\n"), "\x1b" in text, "é" in text) == (4, False, True)


def test_a_file_that_cannot_be_written_costs_the_lines_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Samples(tmp_path / "gone" / "samples.jsonl", ids_as_text).write(trained([0.0, 1.0]))
    assert "samples of step 7 not written: [Errno 2]" in caplog.text
