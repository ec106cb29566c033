"""docs/operations.md tells of everything that a run can say to its operator."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from staleflow.cli.chaos import KINDS
from staleflow.protocols.consistency.effects import Code, DropWhy, ReleaseWhy
from staleflow.supervisor.chaos import Kind

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "operations.md").read_text()
FOLDERS = ("servers", "clients", "staleflow/runtime", "staleflow/supervisor")
LOUD = ("warning", "error", "exception", "critical")


def messages() -> Iterator[str]:
    """Every warning and error of a log, with ``…`` for what differs; those that are nothing else are left out."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"log.{level}" for level in LOUD}:
                    texts = (part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant))
                    found = (re.sub(r"%[-0-9.]*[a-z]", "…", text) for text in texts if isinstance(text, str))
                    yield from (text for text in found if text.strip("…: "))


def test_every_warning_and_error_is_explained() -> None:
    said = sorted(set(messages()))
    assert len(said) > 40, "void: the messages are not found"
    assert [text for text in said if f"`{text}`" not in PAGE] == []


@pytest.mark.parametrize("word", [*Code, *ReleaseWhy, *DropWhy], ids=str)
def test_every_refusal_and_every_reason_is_explained(word: str) -> None:
    assert f"`{word}`" in PAGE


def test_every_kind_of_fault_has_its_command() -> None:
    assert tuple(kind.value for kind in Kind) == KINDS
    assert all(f"--kind {kind}" in PAGE for kind in KINDS)
