"""README and the first page quote only numbers that the page of results has."""

import re

import pytest

from docs.generate.bars import CHARTS, number, table
from tests.docs.markdown import ROOT, links, prose

RESULTS = "docs/results.md"
NUMBER = re.compile(r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?(?![\w-])")
MINUTES = re.compile(r"(\d+)(?: to (\d+))? minutes")


def numbers(text: str) -> set[str]:
    return {value.rstrip(",") for value in NUMBER.findall(text)}


def quoted() -> list[tuple[str, str]]:
    """Return label and text of each row of README's table of numbers."""
    _, _, below = prose("README.md").partition("\n## Numbers\n")
    rows = [line.split(" | ") for line in below.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    return [(label.removeprefix("| "), f"{label} {measured}") for label, measured, _ in rows[1:]]


@pytest.mark.parametrize(("label", "text"), quoted(), ids=[label for label, _ in quoted()])
def test_a_number_of_the_readme_is_on_the_page_of_results(label: str, text: str) -> None:
    assert label
    assert numbers(text) - numbers(prose(RESULTS)) == set()


def test_the_readme_has_rows_of_numbers_and_each_links_to_the_page_of_results() -> None:
    assert len(quoted()) >= 10
    assert all(numbers(text) for _, text in quoted())
    assert sum(target.startswith(f"{RESULTS}#") for target in links("README.md")) >= len(quoted())


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_minutes_are_on_the_page_of_results(page: str) -> None:
    quoted_minutes = {value for pair in MINUTES.findall(prose(page)) for value in pair if value}
    assert quoted_minutes - numbers(prose(RESULTS)) == set()


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_is_drawn_from_a_table_with_numbers(name: str) -> None:
    chart = CHARTS[name]
    titles, *rows = table((ROOT / RESULTS).read_text(), chart.heading)
    for column in chart.columns:
        assert any(number(row[titles.index(column)]) is not None for row in rows)
