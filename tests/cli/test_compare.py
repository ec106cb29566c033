"""``staleflow simulate --compare`` prints one table as text or JSON, or draws it as pictures."""

import json
import re

import pytest

from staleflow.cli.simulate import show
from staleflow.configs.loading.load import load
from staleflow.sim.peers.compare import COLUMNS, compare
from tests.cli.conftest import SIMULATED, Cli

COMPARE = ("simulate", SIMULATED, "--compare", "--steps", 6, "--peers")
OWN = [f"staleflow {name}" for name in ("wait", "clustered", "token", "truncate", "retry", "drop")]


def test_the_table_has_a_row_each_and_no_line_too_long(cli: Cli) -> None:
    said = cli(*COMPARE, "areal,trl")
    lines = said.out.splitlines()
    rows = [line for line in lines if line.startswith(("staleflow ", "areal ", "trl ")) and ":" not in line]
    assert (said.code, said.left) == (0, [])
    assert [line.split("  ")[0].strip() for line in rows] == [*OWN, "areal", "trl"]
    assert {len(line.split()) for line in rows} == {13, 14}  # staleflow rows have names of two words
    assert max(map(len, lines)) <= 120


def test_on_a_narrow_terminal_no_digit_is_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = list(compare(load(SIMULATED), ["areal"], steps=3))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    show(results, "simulated")
    printed = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    table, legend, _ = printed.partition("staleflow wait: ")
    lines = table.splitlines()
    assert legend
    assert max(map(len, printed.splitlines())) <= 80
    assert not [line for line in lines if "…" in line]
    for name in [*OWN, "areal"]:
        result = next(one for one in results if one.name == name)
        shown = " ".join(line.removeprefix(name) for line in lines if line.startswith(name)).split()
        assert " ".join(shown) == " ".join(text(result) for _, text in COLUMNS)


def test_json_has_the_same_rows_and_nothing_else(cli: Cli) -> None:
    said = cli(*COMPARE, "sync", "--json")
    found = json.loads(said.out)
    assert [row["name"] for row in found] == [*OWN, "sync"]
    assert (found[-1]["staleness_max"], len(found[-1]["steps"]), found[-1]["violations"]) == (0, 6, 0)


def test_a_peer_that_breaks_the_bound_is_no_failure_of_the_command(cli: Cli) -> None:
    said = cli(*COMPARE, "laminar", "--json", "staleness.max_staleness=0", "trainer.simulated_step_s=1.0")
    assert json.loads(said.out)[-1]["violations"] > 0
    assert said.code == 0


def test_pictures_are_where_they_were_asked_for(cli: Cli) -> None:
    pytest.importorskip("matplotlib")
    said = cli("simulate", SIMULATED, "--steps", 6, "--plot", "pictures/tail")
    assert (said.code, said.left) == (0, ["pictures"])
    assert said.out.splitlines()[-2:] == ["pictures/tail.png", "pictures/tail.html"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--compare", "--peers", "arael"), '--peers is "arael"; it must be one of sync, psrl, nemo-rl,'),
        (("--peers", "areal"), '--peers is "areal"; it needs --compare'),
        (("--compare", "--trace", "t"), '--trace is "t"; it writes the trace of one run'),
    ],
)
def test_options_that_mean_nothing_together(cli: Cli, words: tuple[str, ...], why: str) -> None:
    said = cli("simulate", SIMULATED, *words)
    assert why in said.err
    assert (said.code, said.out, said.err.count("\n"), said.left) == (2, "", 1, [])
