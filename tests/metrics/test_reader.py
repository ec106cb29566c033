"""The reader of ``metrics.jsonl`` returns every number and skips everything else without stopping."""

from pathlib import Path

import pytest

from staleflow.metrics.reader import metric_lines
from staleflow.supervisor.watch import NewLines

GOOD = {"step": 7, "loss": 0.5, "off_policy/mean": None}


@pytest.mark.parametrize(
    "line",
    [
        *('{"step":1,"torn', "[1,2]", '"x"', "null", '{"step":1,"loss":NaN}', '{"step":"x"}', '{"step":1.5}', "\udcff"),
        *(f'{{"step":{10**300}}}', '{"step":1,"a":' + "[" * 100_000 + "]" * 100_000 + "}", ""),
    ],
    ids=lambda line: line[:20],
)
def test_a_line_that_is_torn_or_strange_is_left_out(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(f"{line}\n".encode(errors="surrogateescape") + b'{"step":7,"loss":0.5,"off_policy/mean":null}\n')
    assert metric_lines(path) == [GOOD]
    assert NewLines(path).take() == (GOOD,)


@pytest.mark.parametrize("value", ["1e400", "1e308", "-1e308", str(10**400), '"abc"', "[1]", "{}", "true"])
def test_what_is_no_number_is_left_out_of_its_line(tmp_path: Path, value: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step":7,"x":{value},"loss":0.5}}\n{{"step":8}}\n')
    assert [line.get("x") for line in metric_lines(path)][-1:] == [None]
    assert metric_lines(path)[-1] == {"step": 8}


def test_no_file_is_no_lines(tmp_path: Path) -> None:
    assert metric_lines(tmp_path / "none") == []
