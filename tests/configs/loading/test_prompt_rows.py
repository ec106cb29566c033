"""Prompt sources give the same rows from a file or a function, and one clear line for every invalid source."""

import json
from pathlib import Path
from typing import Any

import pytest

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import load
from staleflow.configs.loading.presence import present
from staleflow.configs.loading.prompt_rows import open_eval_prompts, open_prompts, shares
from staleflow.configs.schema import Prompts, PromptSource
from tests.configs.conftest import Write

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


CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2+2?"},
]


@pytest.mark.parametrize("column", ["messages", "prompt"])
def test_rows_of_messages_keep_them_and_have_the_last_question_as_prompt(tmp_path: Path, column: str) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    path = jsonl(tmp_path / "chat.jsonl", json.dumps({column: CHAT, "tools": tools, "answer": "4"}))
    rows = open_prompts(Prompts(path=path, chat_template=True), seed=0)
    assert rows[0] == {"prompt": "And 2+2?", "messages": CHAT, "tools": tools, "answer": "4"}


def test_messages_of_parquet_lose_the_empty_fields_that_it_adds(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    messages = [{"role": "user", "content": "a"}, {"role": "tool", "content": "b", "tool_call_id": "1"}]
    parquet.write_table(arrow.Table.from_pylist([{"messages": messages}]), tmp_path / "chat.parquet")
    rows = open_prompts(Prompts(path=str(tmp_path / "chat.parquet"), chat_template=True), seed=0)
    assert rows[0]["messages"] == messages


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": []}, "messages must be a list of at least one message, each with role and content"),
        ({"messages": "hello"}, "messages must be a list of at least one message"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role is 'robot'; it must be one of system, u"),
        ({"messages": [*CHAT, "a"]}, "messages[4].role is 'None'; it must be one of system, user, assistant, tool"),
        ({"messages": [{"role": "user", "content": 4}]}, "messages[0].content must be text, it is int"),
        ({"messages": CHAT[:3]}, "the last message has role assistant; the policy writes the next answer"),
        ({"messages": CHAT, "tools": "add"}, "tools must be a list of descriptions"),
    ],
)
def test_messages_that_the_policy_cannot_continue_are_named(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    path = jsonl(tmp_path / "chat.jsonl", json.dumps(row))
    with pytest.raises(ConfigError) as error:
        open_prompts(Prompts(path=path, chat_template=True), seed=0)
    assert str(error.value).startswith(f'prompts.path is "{path}"; line 1: {says}')


def test_messages_need_a_chat_template(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "chat.jsonl", json.dumps({"messages": CHAT}))
    with pytest.raises(ConfigError, match=r"line 1: it has messages: set prompts\.chat_template, or rename the column"):
        open_prompts(Prompts(path=path), seed=0)


def test_several_sources_have_their_shares_and_every_row(tmp_path: Path) -> None:
    few = jsonl(tmp_path / "few.jsonl", *(json.dumps({"prompt": f"few {n}"}) for n in range(3)))
    source = module(tmp_path, "def rows(seed, n):\n    return [{'prompt': f'many {k}'} for k in range(n)]\n")
    given = Prompts(
        sources=[PromptSource(path=few, weight=1.0), PromptSource(source=source, options={"n": 14}, weight=2.0)]
    )
    rows = open_prompts(given, seed=0)
    texts = [rows[row]["prompt"] for row in range(len(rows))]
    assert texts == [f"few {n % 3}" for n in range(7)] + [f"many {n}" for n in range(14)]
    assert open_prompts(given, seed=0).sha == rows.sha


@pytest.mark.parametrize(
    ("rows", "weights", "counts"),
    [
        ([3, 3], [1.0, 1.0], [3, 3]),
        ([10, 2], [1.0, 1.0], [10, 10]),
        ([10, 2], [5.0, 1.0], [10, 2]),
        ([10, 2], [1.0, 3.0], [10, 30]),
        ([7], [0.5], [7]),
        ([1000, 1], [1000.0, 0.1], [10_000, 1]),
    ],
)
def test_a_pass_has_every_row_and_each_source_its_share(
    rows: list[int], weights: list[float], counts: list[int]
) -> None:
    assert shares(rows, weights) == counts


def test_weights_that_would_repeat_rows_without_end_are_named() -> None:
    with pytest.raises(
        ConfigError, match=r"prompts\.sources\.weight is \[0\.001, 1000\.0\]; a pass .* at most 50000000"
    ):
        shares([100, 1], [0.001, 1000.0])


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["prompts.sources=[{path='/a.jsonl'}]"],
            r"prompts\.source is .*; with prompts\.sources there must be only one",
        ),
        (["prompts.source=", "prompts.sources=[{}]"], r"prompts\.sources\[0\]\.path is missing; exactly one of it and"),
        (
            ["prompts.source=", "prompts.sources=[{path='/a.csv'}]"],
            r'prompts\.sources\[0\]\.path is "/a\.csv"; it must end in \.jsonl or \.parquet',
        ),
        (
            ["prompts.source=", "prompts.sources=[{path='/a.jsonl', options={n=1}}]"],
            r"prompts\.sources\[0\]\.options is .*; these are options of source, which is missing",
        ),
        (
            ["prompts.source=", "prompts.sources=[{source='a.b'}]"],
            r'prompts\.sources\[0\]\.source is "a\.b"; it must be module:function',
        ),
        (["prompts.system=Be brief."], r"prompts\.system is \"Be brief\.\"; it needs prompts\.chat_template = true"),
    ],
)
def test_keys_of_prompts_that_contradict_are_named(write: Write, overrides: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        load(write(), overrides)


def test_sources_are_checked_and_counted_before_a_run(write: Write, tmp_path: Path) -> None:
    few = jsonl(tmp_path / "few.jsonl", '{"prompt": "1+1=", "answer": "2"}', '{"prompt": "2+2=", "answer": "4"}')
    body = "def rows(seed, limit):\n    return [{'prompt': str(n), 'answer': ''} for n in range(limit)]\n"
    sources = f"prompts.sources=[{{path='{few}'}}, {{source='{module(tmp_path, body)}', options={{limit=5}}}}]"
    given = ["prompts.source=", sources, "prompts.epochs=1"]
    with pytest.raises(ConfigError, match=r"10 rows x 1 give 10 groups, but"):
        present(load(write(), given))
    present(load(write(), [*given, "trainer.batch_size=2", "trainer.steps=5"]))
