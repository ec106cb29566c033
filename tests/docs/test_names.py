"""The keys and metrics that a page names in its text exist in the code."""

import re
from collections.abc import Iterator

import pytest

from staleflow.configs.loading.describe import tables
from staleflow.configs.loading.explain import keys
from staleflow.metrics.names import FAMILIES, METRICS
from tests.docs.markdown import ROOT, inline, pages

TABLES = {table.name for table in tables()}
KEYS = {*keys(), *TABLES}
KEY = re.compile(r"(\w+(?:\.\w+)+)(?: ?= ?\S.*)?")
METRIC = re.compile(r"\w+(?:/\w+){1,2}")
FILES = ("jsonl", "json", "key", "log", "md", "mdb", "py", "toml", "out", "part", "safetensors", "svg", "git")
"""Suffixes of file names: ``metrics.jsonl`` is no key."""
COLUMNS = {"reward/reward", "reward/correct", "reward/brevity", *FAMILIES}
"""Columns of stages, and metrics whose names are the user's."""
OURS = [page for page in pages() if page != "CHANGELOG.md"]


def codes(page: str) -> Iterator[str]:
    """Yield inline code; on the page that puts other systems' keys beside staleflow's, only that of the last column."""
    if page != "docs/migrating.md":
        yield from inline(page)
        return
    for line in (ROOT / page).read_text().splitlines():
        if line.startswith("| `"):
            yield from re.findall(r"`([^`]+)`", line.rstrip(" |").rpartition(" | ")[2])


@pytest.mark.parametrize("page", OURS)
def test_keys_exist(page: str) -> None:
    named = [found[1] for code in codes(page) if (found := KEY.fullmatch(code))]
    ours = [name for name in named if name.partition(".")[0] in TABLES and name.rpartition(".")[2] not in FILES]
    assert [name for name in ours if name not in KEYS and not is_option(name)] == []


def is_option(name: str) -> bool:
    """``model.options.limit``: the user's function decides which options exist."""
    return name.rpartition(".")[0].endswith(".options")


@pytest.mark.parametrize("page", OURS)
def test_metrics_exist(page: str) -> None:
    rooms = {name.partition("/")[0] for name in METRICS}
    named = [code for code in codes(page) if METRIC.fullmatch(code) and code.partition("/")[0] in rooms]
    assert [name for name in named if name not in METRICS and name not in COLUMNS] == []
