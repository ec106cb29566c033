"""docs/consistency.md numbers the guarantees of the service, and every number names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "consistency.md"
LINE = re.compile(r"^- \*\*G(\d+)\*\* (.+?)\. — (.+)$", re.MULTILINE)
CITED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def guarantees() -> list[tuple[int, str, list[tuple[str, str]]]]:
    """Return number, sentence and cited tests (file, name) of each guarantee."""
    found = LINE.findall(PAGE.read_text())
    return [(int(number), sentence, CITED.findall(cited)) for number, sentence, cited in found]


def test_guarantees_are_numbered_without_a_gap() -> None:
    assert [number for number, _, _ in guarantees()] == list(range(1, len(guarantees()) + 1))
    assert len(guarantees()) == PAGE.read_text().count("**G")


def test_every_guarantee_names_tests_that_exist() -> None:
    missing: list[str] = []
    for number, _, cited in guarantees():
        assert cited, f"G{number} names no test"
        for path, name in cited:
            file = ROOT / path
            if not file.exists() or not re.search(rf"^\s*(async )?def {name}\(", file.read_text(), re.MULTILINE):
                missing.append(f"G{number}: {path}::{name}")
    assert missing == []


def test_every_test_is_cited_by_its_whole_name() -> None:
    for number, _, cited in guarantees():
        line = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"- **G{number}**"))
        assert line.count("`tests/") == len(cited), f"G{number}"


def test_every_cited_test_runs_in_make_test() -> None:
    left_out = re.compile(r"pytest\.mark\.(long|skip|xfail)\b")
    for number, _, cited in guarantees():
        for path, name in cited:
            text = (ROOT / path).read_text()
            before = re.split(rf"^(?:async )?def {name}\(", text, flags=re.MULTILINE)[0]
            marks = before.rstrip().rpartition("\n\n\n")[2], *re.findall(r"^pytestmark = .*", text, re.MULTILINE)
            assert not any(map(left_out.search, marks)), f"G{number}: {path}::{name} is left out of make test"
