"""A length trace uses every row of its file and names an invalid row."""

import json
from pathlib import Path

import pytest

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.length_trace import read_lengths
from staleflow.configs.loading.load import load
from staleflow.configs.loading.presence import present
from tests.configs.conftest import MINIMAL, Write


def jsonl(path: Path, *rows: object) -> Path:
    file = path / "trace.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def parquet(path: Path, **columns: list[object]) -> Path:
    arrow = pytest.importorskip("pyarrow")
    file = path / "trace.parquet"
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table(columns), file)
    return file


def test_a_column_of_either_kind_of_file_is_read(tmp_path: Path) -> None:
    rows = [{"tokens": 3, "other": 1}, {"tokens": 5.0, "other": 2}, {"tokens": 1, "other": 3}]
    assert read_lengths(jsonl(tmp_path, *rows), "tokens") == [3, 5, 1]
    assert read_lengths(parquet(tmp_path, tokens=[3, 5, 1], other=[1, 2, 3]), "tokens") == [3, 5, 1]


@pytest.mark.parametrize("value", [0, -3, 2.5, "7", None, True])
def test_a_length_that_is_none_is_named_with_its_row(tmp_path: Path, value: object) -> None:
    with pytest.raises(ConfigError, match=r'trace\.jsonl"; line 2: column "tokens" is .*; it must be a whole number'):
        read_lengths(jsonl(tmp_path, {"tokens": 3}, {"tokens": value}), "tokens")


@pytest.mark.parametrize("value", [0.0, -3.0, float("nan"), float("inf"), 2.5, None])
def test_a_length_of_a_parquet_file_that_is_none_is_named_with_its_row(tmp_path: Path, value: object) -> None:
    with pytest.raises(ConfigError, match=r'row 1: column "tokens" is .*; it must be a whole number from 1'):
        read_lengths(parquet(tmp_path, tokens=[3.0, value]), "tokens")


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    said = r'has no column "tokens"; name it in rollout\.simulated\.trace_column'
    with pytest.raises(ConfigError, match=f"line 2 {said}"):
        read_lengths(jsonl(tmp_path, {"tokens": 3}, {"length": 4}), "tokens")
    with pytest.raises(ConfigError, match=f"row 0 {said}"):
        read_lengths(parquet(tmp_path, length=[3]), "tokens")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("t.jsonl", "", "it has no rows"),
        ("t.jsonl", '{"tokens": 1}\n{\n', "line 2 must be a JSON object"),
        ("t.jsonl", "[1]\n", "line 1 must be a JSON object"),
        ("t.jsonl", '{"tokens": NaN}\n', "line 1 must be a JSON object"),
        ("t.jsonl", '{"tokens": Infinity}\n', "line 1 must be a JSON object"),
        ("t.csv", "tokens\n1\n", r"it must end in \.jsonl or \.parquet"),
        ("t.parquet", "none", "it must be a Parquet file"),
        ("", "", "no such file"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / (name or "other")).write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_lengths(tmp_path / (name or "missing.jsonl"), "tokens")


def test_a_run_with_a_wrong_trace_never_starts(write: Write, tmp_path: Path) -> None:
    trace = jsonl(tmp_path, {"tokens": 3}, {"tokens": 0})
    config = load(write(MINIMAL), ["rollout.simulated.lengths=trace", f"rollout.simulated.trace={trace}"])
    with pytest.raises(ConfigError, match=r'rollout\.simulated\.trace is .*; line 2: column "tokens" is 0'):
        present(config, lambda _: {})
