"""docs/grafana/staleflow.json queries only metrics that the scheduler exports."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from staleflow.metrics.names import PREFIX
from staleflow.servers.scheduler.status.prometheus import FAMILIES, names

BOARD: dict[str, Any] = json.loads((Path(__file__).parent.parent / "docs" / "grafana" / "staleflow.json").read_text())
OWN_LABELS = {"instance"}
"""The label that Prometheus adds: the run that a number belongs to."""


def queries() -> Iterator[tuple[str, str, str]]:
    """Yield title, expression and legend of every line."""
    for panel in BOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"], target["legendFormat"]


def test_every_query_names_a_metric_that_exists() -> None:
    known = names()
    asked = {name for _, query, _ in queries() for name in re.findall(rf"{PREFIX}\w+", query)}
    assert len(asked) > 30, "void: the queries are not found"
    assert asked - set(known) == set()


def test_counters_are_looked_at_as_rates_and_nothing_else_is() -> None:
    for title, query, _ in queries():
        for rated, name in re.findall(rf"(rate\()?({PREFIX}\w+)", query):
            if title != "Violations":
                assert bool(rated) == (names()[name] == "counter"), f"{title}: {query}"


def test_every_label_is_one_that_its_metric_has() -> None:
    for title, query, legend in queries():
        named = [name.removeprefix(PREFIX) for name in re.findall(rf"{PREFIX}\w+", query)]
        labels = {label for name in named if name in FAMILIES for label in FAMILIES[name].labels}
        used = set(re.findall(r"(\w+)=~?\"", query)) | set(re.findall(r"{{(\w+)}}", legend))
        assert used - OWN_LABELS <= labels, f"{title}: {query}"


def test_each_run_can_be_chosen_and_panels_do_not_overlap() -> None:
    asked = [query for _, query, _ in queries()]
    assert all(query.count(PREFIX) == query.count('instance=~"$instance"') for query in asked)
    cells = [
        (x, y)
        for panel in BOARD["panels"]
        for at in [panel["gridPos"]]
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
