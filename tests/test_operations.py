"""docs/operations.md explains every message that a run can send to its operator."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from staleflow.cli.chaos import KINDS
from staleflow.protocols.consistency.effects import Code, DropWhy, ReleaseWhy
from staleflow.protocols.wire.messages.status import Hold
from staleflow.servers.scheduler.status.sentences import restricted
from staleflow.supervisor.chaos import Kind

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "operations.md").read_text()
FOLDERS = ("servers", "clients", *(f"staleflow/{name}" for name in ("net", "store", "trace", "process", "supervisor")))
LOUD = ("warning", "error", "exception", "critical")


def nodes() -> Iterator[ast.AST]:
    """Yield every syntax node of the code that runs in a run's processes."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield from ast.walk(ast.parse(path.read_text()))


def messages() -> Iterator[str]:
    """Yield every warning and error of a log, with ``…`` for the variable parts; skip those that are only variable."""
    for node in nodes():
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"log.{level}" for level in LOUD}:
            found = (re.sub("…+", "…", text) for part in ast.walk(node.args[0]) if (text := said_by(part)))
            yield from (text for text in found if text.strip("…: "))


def said_by(node: ast.AST) -> str:
    """Return the text that a piece of code writes, with ``…`` for the variable parts; empty for code that is no
    text."""
    match node:
        case ast.Constant(value=str(text)):
            return re.sub(r"%[-0-9.]*[a-z]", "…", text)
        case ast.JoinedStr(values=parts):
            return "".join(said_by(part) or "…" for part in parts)
        case _:
            return ""


def explained() -> Iterator[str]:
    """Return the messages in the page's tables."""
    section = PAGE.partition("## Messages of the logs")[2].partition("\n## ")[0]
    for line in section.splitlines():
        if line.startswith("| `"):
            yield from re.findall(r"`([^`]+)`", line.split(" | ")[0])


def test_every_warning_and_error_is_explained() -> None:
    said = sorted(set(messages()))
    assert len(said) > 40, "void: the messages are not found"
    assert [text for text in said if f"`{text}`" not in PAGE] == []


def test_every_message_that_is_explained_is_written_by_somebody() -> None:
    """The source is a log, or an error that a log takes over."""
    told = list(explained())
    assert len(told) > 40, "void: the tables are not found"
    written = [re.sub("…+", "…", text) for node in nodes() if (text := said_by(node))]
    assert [message for message in told if not any(message in text for text in written)] == []


def test_every_sentence_that_names_a_process_at_fault_is_explained() -> None:
    tree = ast.parse((ROOT / "servers/scheduler/status/sentences.py").read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for name in ("silent", "restarted"):
        (returned,) = [node.value for node in functions[name].body if isinstance(node, ast.Return)]
        assert returned is not None
        assert f"`{said_by(returned)}`" in PAGE
    for held_s in (4.0, 0.0):
        said = restricted({"…": Hold(groups=9, held_s=held_s, detail="…")})
        assert said.replace("4 s", "…").partition(": its last 9")[0] in PAGE


@pytest.mark.parametrize("word", [*Code, *ReleaseWhy, *DropWhy], ids=str)
def test_every_refusal_and_every_reason_is_explained(word: str) -> None:
    assert f"`{word}`" in PAGE


def test_every_kind_of_fault_has_its_command() -> None:
    assert tuple(kind.value for kind in Kind) == KINDS
    assert all(f"--kind {kind}" in PAGE for kind in KINDS)
