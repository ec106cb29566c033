"""The generated pages match the output of the code."""

import re
from typing import get_args
from xml.etree import ElementTree

import pytest

from docs.generate.pages import generated_files
from staleflow.configs.loading.describe import tables
from staleflow.configs.loading.explain import keys
from staleflow.protocols.wire.messages import Command, Op, Reply, Request, Status
from staleflow.trace.events import AnyEvent
from tests.docs.markdown import ROOT


@pytest.fixture(scope="module")
def fresh() -> dict[str, str]:
    return generated_files()


def test_every_made_page_and_picture_is_fresh(fresh: dict[str, str]) -> None:
    stale = [name for name, text in fresh.items() if (ROOT / "docs" / name).read_text() != text]
    assert stale == [], "make reference writes them anew"


def test_nothing_else_lies_beside_them(fresh: dict[str, str]) -> None:
    there = [path for folder in ("reference", "pictures") for path in (ROOT / "docs" / folder).iterdir()]
    drawn = "results-papers.svg"  # by bench.papers, from its own measurements
    beside = sorted(path.relative_to(ROOT / "docs").as_posix() for path in there if path.name != drawn)
    assert beside == sorted(name for name in fresh if name not in ("trace.md", "protocol.md"))


def test_the_page_of_the_trace_has_every_event_and_every_field_of_it(fresh: dict[str, str]) -> None:
    page = fresh["trace.md"]
    for kind in get_args(AnyEvent):
        _, _, rest = page.partition(f"### `{kind.__struct_config__.tag}`\n")
        rows = re.findall(r"^\| `(\w+)`", rest.partition("\n#")[0], re.MULTILINE)
        assert rows == list(kind.__struct_encode_fields__)


def test_the_page_of_the_protocol_has_every_message_and_every_field_of_it(fresh: dict[str, str]) -> None:
    page = fresh["protocol.md"]
    for kind in (*get_args(Request), *get_args(Reply), *get_args(Command), *get_args(Op)):
        _, _, rest = page.partition(f"### {kind.__name__}\n")
        assert rest, kind
        if not issubclass(kind, Status):
            rows = re.findall(r"^\| \d+ \| `(\w+)`", rest.partition("\n#")[0], re.MULTILINE)
            assert rows == list(kind.__struct_fields__)


def test_a_picture_is_well_formed_and_asks_for_nothing_from_elsewhere(fresh: dict[str, str]) -> None:
    for name, text in fresh.items():
        if name.endswith(".svg"):
            ElementTree.fromstring(text)
            assert text.count("http") == 1  # the SVG namespace


def test_every_key_has_a_sentence() -> None:
    found = list(tables())
    assert [f"{table.name}.{key.name}" for table in found for key in table.keys if not key.description] == []
    assert [table.name for table in found if not table.description] == []


def test_every_key_is_described_once() -> None:
    found = [f"{table.name}.{key.name}".lstrip(".") for table in tables() for key in table.keys]
    assert sorted(found) == sorted(keys())
