"""The comparison of all bounds and all peers is complete, both as a table and as pictures."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from staleflow.configs.errors import ConfigError
from staleflow.protocols.consistency.limits import Bound, OnOverdue
from staleflow.sim.peers.compare import COLUMNS, OWN, changed, compare
from staleflow.sim.peers.presets import PEERS
from staleflow.sim.peers.run import simulate_peer
from staleflow.sim.plot import page
from staleflow.sim.result import Result
from staleflow.sim.simulate import simulate
from tests.sim.configs import config

TAIL = config(group_size=1, train_s=0.5)


@pytest.fixture(scope="module")
def results() -> Sequence[Result]:
    return list(compare(TAIL, list(PEERS)))


def named(results: Sequence[Result], name: str) -> Result:
    return next(result for result in results if result.name == name)


def test_there_is_a_row_for_each_choice_and_each_peer(results: Sequence[Result]) -> None:
    assert [result.name for result in results] == [*(f"staleflow {name}" for name in OWN), *PEERS]
    assert {len(result.steps) for result in results} == {12}


def test_no_choice_of_ours_violates_the_bound(results: Sequence[Result]) -> None:
    own = results[: len(OWN)]
    assert [(result.violations, result.staleness_max) for result in own] == [(0, 1)] * len(OWN)


def test_all_rows_draw_the_same_trajectories_in_the_same_order(results: Sequence[Result]) -> None:
    wait, areal = named(results, "staleflow wait"), named(results, "areal")
    count = min(len(wait.drawn), len(areal.drawn))
    assert count > 20
    assert wait.drawn[:count] == areal.drawn[:count]


def test_waiting_is_as_fast_as_psrl_and_everything_else_is_faster(results: Sequence[Result]) -> None:
    psrl = named(results, "psrl").steps_per_min
    assert named(results, "staleflow wait").steps_per_min == pytest.approx(psrl, rel=0.02)
    assert min(named(results, f"staleflow {name}").steps_per_min for name in ("token", "truncate", "drop")) > psrl


def test_a_trainer_that_takes_no_time_is_no_limit_to_be_near(results: Sequence[Result]) -> None:
    at_once = config(group_size=1, train_s=0.0)
    share = dict(COLUMNS)["÷\u00a0trainer limit"]
    for result in (simulate(at_once), simulate_peer("areal", at_once)):
        assert (result.trainer_limit, share(result)) == (0.0, "-")
    assert share(results[0]) == f"{results[0].steps_per_min / 120:.3f}"


def test_only_the_token_bound_masks(results: Sequence[Result]) -> None:
    assert [result.name for result in results if result.masked] == ["staleflow token"]


def test_a_choice_leaves_the_rest_of_the_configuration_alone() -> None:
    token = config(bound=Bound.TOKEN, on_overdue=OnOverdue.WAIT, group_size=1, train_s=0.5)
    assert changed(TAIL, OWN["token"]) == token


def test_a_row_is_a_run_of_its_own(results: Sequence[Result]) -> None:
    alone = simulate(changed(TAIL, OWN["drop"]))
    assert named(results, "staleflow drop").trace_hash == alone.trace_hash


def test_a_peer_nobody_knows_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="laminar"):
        compare(TAIL, ["lamina"])


# --- pictures ---------------------------------------------------------------------------------------------------------


class Outside(HTMLParser):
    """Collects every external resource of a page, and the text of its table cells."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.cells: list[str] = []
        self._in_cell = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_cell = tag in ("td", "th")
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and value and not value.startswith(("#", "data:")):
                self.loaded.append(value)
        if tag in ("script", "link", "iframe"):
            self.loaded.append(tag)

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.cells.append(data)
        self._in_cell = False


def test_the_page_has_the_table_and_loads_nothing(results: Sequence[Result]) -> None:
    seen = Outside()
    seen.feed(page(results, "<svg></svg>"))
    assert seen.loaded == []
    assert seen.cells[: len(COLUMNS)] == [name for name, _ in COLUMNS]
    rows = [cell for result in results for cell in (result.name, *(text(result) for _, text in COLUMNS))]
    assert seen.cells[len(COLUMNS) :] == rows


def test_names_are_text_on_the_page(results: Sequence[Result]) -> None:
    assert "<b>" not in page([replace(results[0], name="<b>")], "")


@pytest.fixture(scope="module")
def drawn(results: Sequence[Result], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    pytest.importorskip("matplotlib")
    from staleflow.sim.plot import plot

    return plot(results[-2:], 1, tmp_path_factory.mktemp("plot") / "deep" / "run.1")


def test_a_plot_is_a_png_and_a_page(drawn: list[Path]) -> None:
    assert [path.name for path in drawn] == ["run.1.png", "run.1.html"]
    assert drawn[0].read_bytes().startswith(b"\x89PNG")


def test_the_picture_on_the_page_is_whole_and_loads_nothing(drawn: list[Path]) -> None:
    text = drawn[1].read_text(encoding="utf-8")
    svg = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + len("</svg>")])
    words = {element.text for element in svg.iter() if element.tag.endswith("text")}
    seen = Outside()
    seen.feed(text)
    assert seen.loaded == []
    assert "Lengths" in words
    assert {"trl", "laminar", "trainer", "trained, trl"} <= words


def test_the_same_run_is_the_same_picture(drawn: list[Path], results: Sequence[Result], tmp_path: Path) -> None:
    from staleflow.sim.plot import plot

    again = plot(results[-2:], 1, tmp_path / "again")
    assert again[1].read_bytes() == drawn[1].read_bytes()


def test_a_single_run_is_drawn_too(results: Sequence[Result], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from staleflow.sim.plot import plot

    assert all(path.stat().st_size > 1000 for path in plot(results[:1], 1, tmp_path / "one"))


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from staleflow.sim.plot import plot

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"it needs matplotlib: pip install .*\[plot\]"):
        plot([], 1, tmp_path / "none")
