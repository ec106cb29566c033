"""Every TOML block is a configuration or a part of one; every Python block compiles, and runs where it can."""

import ast
import importlib
import inspect
import tomllib
from typing import Any

import numpy as np
import pytest

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.explain import decode
from staleflow.configs.presets import merge
from staleflow.configs.rules.checks import consistent
from tests.docs.markdown import ROOT, Block, blocks

LANGUAGES = {"", "bash", "console", "sh", "text", "toml", "python", "json", "yaml", "mermaid"}
BASE: dict[str, Any] = {
    "model": {"path": "/somewhere"},
    "prompts": {"path": "/somewhere/prompts.jsonl"},
    "reward": {"run": "somewhere:reward"},
}
"""The rest of a configuration whose part a page shows; a table on the page replaces the table here."""
NEEDED = {"prompts": {"path": "/somewhere/prompts.jsonl"}, "reward": {"run": "somewhere:reward"}}

ELSEWHERE = {
    "docs/python.md": "tests/report/test_python_page.py",
    "docs/tutorials/mirror.md": "tests/clients/weights/test_download.py",
    "docs/tutorials/weights.md": "tests/servers/running.py",
    "docs/tutorials/streaming.md": "tests/clients/trainer/test_streaming.py",
    "docs/tutorials/trl.md": "tests/process/test_trl_run.py",
    "docs/tutorials/lora.md": "tests/clients/trainer/test_lora.py",
}
"""Pages whose Python needs a running service or its results, and the tests that do the same with them."""

NEEDED_PACKAGES = {"docs/tutorials/trl.md": "trl"}
"""Pages whose Python imports a package that ``make test`` does not install."""

ALL = list(blocks())


def of(language: str) -> list[Block]:
    return [block for block in ALL if block.language == language]


def test_every_block_has_a_language_that_is_checked() -> None:
    assert [str(block) for block in ALL if block.language not in LANGUAGES] == []


@pytest.mark.parametrize("block", of("toml"), ids=str)
def test_toml_is_a_configuration_or_a_part_of_one(block: Block) -> None:
    table = tomllib.loads(block.text)
    whole: dict[str, Any] = dict(BASE)
    for key, value in table.items():
        needed = NEEDED.get(key)
        whole[key] = merge(needed, value) if needed else value
    if {"source", "sources", "submitted"} & whole["prompts"].keys():
        whole["prompts"] = table["prompts"]
    if "functions" in whole["reward"]:
        whole["reward"] = table["reward"]
    try:
        consistent(decode({"security": {"keys": "/somewhere/keys"}} | whole))
    except ConfigError:  # configurations that are valid only without keys
        consistent(decode({"security": {"insecure": True}} | whole))


@pytest.mark.parametrize("block", of("python"), ids=str)
def test_python_compiles_and_what_it_imports_exists(block: Block) -> None:
    tree = compile(block.text, str(block), "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert isinstance(tree, ast.Module)
    if block.page in NEEDED_PACKAGES:
        pytest.importorskip(NEEDED_PACKAGES[block.page])
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("staleflow"):
            found = importlib.import_module(node.module or "")
            assert [alias.name for alias in node.names if not hasattr(found, alias.name)] == []
    if block.page in ELSEWHERE:
        return
    assert all(isinstance(node, DEFINITIONS) or _says(node) for node in tree.body), "it does something: run it"
    run(block)


DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign)


def _says(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def run(block: Block) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(block.text, str(block), "exec"), names)
    return names


def test_what_is_tested_elsewhere_is_tested_there() -> None:
    used = {block.page for block in of("python")}
    assert [test for page, test in ELSEWHERE.items() if page in used and not (ROOT / test).is_file()] == []


def defined(name: str) -> list[Any]:
    """Return the objects of that name that the pages define."""
    found = [run(block) for block in of("python") if block.page not in ELSEWHERE and f"def {name}(" in block.text]
    return [names[name] for names in found if name in names]


def test_the_rewards_of_the_pages_score_an_answer() -> None:
    scores = [function for function in defined("score") if "answer" in inspect.signature(function).parameters]
    assert scores
    for score in scores:
        assert (score("1+1=", " 2\n", answer="2"), score("1+1=", "3", answer="2")) == (1.0, 0.0)


def test_the_stage_of_the_tutorial_marks_what_was_written_before() -> None:
    class Two:
        token_ids = (np.array([5, 6, 5]), np.array([7]))

    (repeats,) = defined("repeats")
    found = repeats(Two())
    assert found["share"] == [pytest.approx(1 / 3), 0.0]
    assert [list(seen) for seen in found["seen"]] == [[0, 0, 1], [0]]
