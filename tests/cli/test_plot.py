"""``staleflow trace plot`` draws the lanes of a run and shows which stages worked at the same time."""

import json
from pathlib import Path

import pytest

from staleflow.cli.main import main
from tests.cli.conftest import Cli
from tests.monitor.test_lanes import left_behind
from tests.report.traces import PLAIN, save


@pytest.mark.parametrize("more", [(), ("--seconds", "1")], ids=["all", "some seconds"])
def test_there_is_nothing_to_draw_after_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    save(tmp_path, PLAIN)
    out = tmp_path / "lanes.html"
    assert main(["trace", "plot", str(tmp_path), "--out", str(out), "--start", "12", *more]) == 2
    assert capsys.readouterr().err == "staleflow: --start is 12.0; nothing happened after second 11.0\n"
    assert not out.exists()


def test_the_stages_of_a_trace_lie_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = save(left_behind(tmp_path), PLAIN)
    assert main(["trace", "plot", str(trace), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0] == {"stages": ["judge", "length"], "seconds": 1.0}


@pytest.mark.usefixtures("fonts")
def test_the_command_says_what_overlaps_and_draws_it(cli: Cli, tmp_path: Path) -> None:
    run_dir = left_behind(tmp_path)
    save(run_dir, PLAIN)
    said = cli("trace", "plot", run_dir, "--out", run_dir / "lanes.svg")
    assert (said.code, said.err) == (0, "")
    assert said.out.splitlines()[0] == "judge and length worked at the same time for 1.00 s"
    drawn = (run_dir / "lanes.svg").read_text()
    assert drawn.startswith("<?xml")
    assert json.loads(cli("trace", "plot", run_dir, "--json").out)[0] == {"stages": ["judge", "length"], "seconds": 1.0}
    (run_dir / "trace.jsonl").write_text(json.dumps(PLAIN[0]) + "\n")
    for path in run_dir.glob("stages-*"):
        path.unlink()
    assert cli("trace", "plot", run_dir).err.endswith("it contains no work of any process yet\n")
