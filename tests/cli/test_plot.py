"""``staleflow trace plot``: the lanes of a run, drawn, and what its stages did at the same time."""

import json
from pathlib import Path

from tests.cli.conftest import Cli
from tests.monitor.test_lanes import left_behind
from tests.report.traces import PLAIN, save


def test_the_command_says_what_overlaps_and_draws_it(cli: Cli, tmp_path: Path) -> None:
    run_dir = left_behind(tmp_path)
    save(run_dir, PLAIN)
    said = cli("trace", "plot", run_dir, "--out", run_dir / "lanes.svg")
    assert (said.code, said.err) == (0, "")
    assert said.out.splitlines()[0] == "judge and length were at work at the same time for 1.00 s"
    drawn = (run_dir / "lanes.svg").read_text()
    assert drawn.startswith("<?xml")
    assert json.loads(cli("trace", "plot", run_dir, "--json").out)[0] == {"stages": ["judge", "length"], "seconds": 1.0}
    (run_dir / "trace.jsonl").write_text(json.dumps(PLAIN[0]) + "\n")
    for path in run_dir.glob("stages-*"):
        path.unlink()
    assert cli("trace", "plot", run_dir).err.endswith("nobody has done anything in it yet\n")
