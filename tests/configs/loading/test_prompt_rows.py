"""Prompt sources give the same rows from a file or a function, and one clear line for every invalid source."""

import json
from pathlib import Path
from typing import Any

import pytest

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.prompt_rows import open_eval_prompts, open_prompts
from staleflow.configs.schema import Prompts

ROWS: list[dict[str, Any]] = [{"question": f"{n} + 1", "answer": n + 1, "tags": ["sum"]} for n in range(5)]
COLUMNS = {"prompt": "question"}


def jsonl(path: Path, *lines: str) -> str:
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def rows_file(path: Path) -> str:
    return jsonl(path / "rows.jsonl", *map(json.dumps, ROWS), "")


def module(path: Path, body: str) -> str:
    (path / "source.py").write_text(body)
    return f"{path / 'source.py'}:rows"


def test_rows_come_with_our_column_names(tmp_path: Path) -> None:
    rows = open_prompts(Prompts(path=rows_file(tmp_path), columns=COLUMNS), seed=0)
    assert len(rows) == 5
    assert rows[3] == {"prompt": "3 + 1", "answer": 4, "tags": ["sum"]}


def test_the_same_rows_have_the_same_sha_from_every_source(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    source = module(
        tmp_path, f"def rows(seed, extra):\n    assert (seed, extra) == (7, 1)\n    return iter({ROWS!r})\n"
    )
    given = (
        Prompts(columns=COLUMNS, path=rows_file(tmp_path)),
        Prompts(columns=COLUMNS, path=str(tmp_path / "rows.parquet")),
        Prompts(columns=COLUMNS, source=source, options={"extra": 1}),
    )
    assert len({open_prompts(prompts, seed=7).sha for prompts in given}) == 1


def test_one_changed_value_changes_the_sha(tmp_path: Path) -> None:
    one = open_prompts(Prompts(path=jsonl(tmp_path / "a.jsonl", '{"prompt": "a", "x": 1}')), seed=0)
    two = open_prompts(Prompts(path=jsonl(tmp_path / "b.jsonl", '{"prompt": "a", "x": 2}')), seed=0)
    again = open_prompts(Prompts(path=jsonl(tmp_path / "c.jsonl", '{"x": 1, "prompt": "a"}')), seed=1)
    assert one.sha == again.sha
    assert one.sha != two.sha


def test_held_out_rows_are_opened_as_the_others(tmp_path: Path) -> None:
    given = Prompts(path="unused.jsonl", eval_path=rows_file(tmp_path), columns=COLUMNS)
    rows = open_eval_prompts(given, seed=0)
    assert rows is not None
    assert rows[0]["prompt"] == "0 + 1"
    assert open_eval_prompts(Prompts(path="unused.jsonl"), seed=0) is None


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "it has no rows"),
        (['{"question": "a"}'], 'line 1 has no column "prompt" (it has question); name it in prompts.columns'),
        (['{"prompt": "a"}', "{oops"], "line 2 must be a JSON object"),
        (['{"prompt": "a"}', "[1]"], "line 2 must be a JSON object"),
        (['{"prompt": 5}'], 'line 1: column "prompt" must be text, it is int'),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path: Path, lines: list[str], says: str) -> None:
    path = jsonl(tmp_path / "bad.jsonl", *lines)
    with pytest.raises(ConfigError) as error:
        open_prompts(Prompts(path=path), seed=0)
    assert str(error.value).startswith(f'prompts.path is "{path}"')
    assert says in str(error.value)


def test_a_column_that_is_renamed_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='line 1 has no column "text"'):
        open_prompts(Prompts(path=rows_file(tmp_path), columns={"prompt": "question", "body": "text"}), seed=0)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for name in ("no.jsonl", "no.parquet"):
        with pytest.raises(ConfigError, match="no such file"):
            open_prompts(Prompts(path=str(tmp_path / name)), seed=0)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt\na\n")
    with pytest.raises(ConfigError, match=r"it must end in \.jsonl or \.parquet"):
        open_prompts(Prompts(path=str(tmp_path / "rows.csv")), seed=0)


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "rows.parquet").write_text("not at all")
    with pytest.raises(ConfigError, match="it must be a Parquet file"):
        open_prompts(Prompts(path=str(tmp_path / "rows.parquet")), seed=0)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("def rows(seed):\n    return []\n", "it has no rows"),
        ("def rows(seed):\n    return 5\n", "calling it failed (TypeError"),
        ("def rows():\n    return []\n", "calling it failed (TypeError"),
        ("def rows(seed):\n    yield {'prompt': 'a'}\n    raise KeyError('b')\n", "calling it failed (KeyError: 'b')"),
        ("def rows(seed):\n    return ['a']\n", "row 0 must be a dict of columns, it is str"),
        ("def rows(seed):\n    return [{'prompt': 'a', 'x': object()}]\n", "row 0 cannot be sent"),
        ("def other(seed):\n    return []\n", "has no rows"),
    ],
)
def test_a_bad_function_is_named_with_what_went_wrong(tmp_path: Path, body: str, says: str) -> None:
    source = module(tmp_path, body)
    with pytest.raises(ConfigError) as error:
        open_prompts(Prompts(source=source), seed=0)
    assert str(error.value).startswith(f'prompts.source is "{source}"')
    assert says in str(error.value)


def test_exactly_one_source_must_be_given() -> None:
    with pytest.raises(ConfigError, match=r"exactly one of it and prompts\.source must be set"):
        open_prompts(Prompts(), seed=0)
