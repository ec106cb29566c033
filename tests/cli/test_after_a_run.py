"""Commands inspect a finished run; all tests of this file share one short run."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import SIMULATED, Cli

pytestmark = pytest.mark.xdist_group("machine")

SHORT = ("trainer.steps=4", "trainer.checkpoint_every=2", "rollout.simulated.k2=0.001", "trainer.simulated_step_s=0.02")
CHAPTERS = (
    "Staleness",
    "Time and waits",
    "Where the tokens went",
    "Events",
    "Weights",
    "Audit",
    "Configuration",
)


@pytest.fixture(scope="module")
def ended() -> Iterator[Path]:
    """A run directory; tests must not modify it."""
    folder = Path(tempfile.mkdtemp(prefix="sf-"))
    command = [sys.executable, "-m", "staleflow.cli", "run", str(SIMULATED), *SHORT, "--run-dir", str(folder / "run")]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    yield folder / "run"
    shutil.rmtree(folder)


def test_its_trace_is_clean_and_what_was_checked_is_said(cli: Cli, ended: Path) -> None:
    said = cli("trace", "check", ended)
    assert said.code == 0
    assert "0 violations" in said.out
    assert "4 steps" in said.out
    answer = json.loads(cli("trace", "check", ended / "trace.jsonl", "--json").out)
    assert (answer["num_violations"], answer["violations"], answer["steps"]) == (0, [], 4)
    assert set(answer["unchecked"]).isdisjoint({"LINE", "CHAIN", "SEQUENCE"})


@pytest.mark.parametrize("how", ["edited", "removed", "duplicated"])
def test_one_line_that_is_not_as_it_was_is_caught(cli: Cli, ended: Path, short_dir: Path, how: str) -> None:
    lines = (ended / "trace.jsonl").read_bytes().splitlines(keepends=True)
    middle = len(lines) // 2
    line = lines[middle]
    lines[middle : middle + 1] = {
        "edited": [line.replace(b'"m":', b'"m":1', 1)],
        "removed": [],
        "duplicated": [line, line],
    }[how]
    (short_dir / "trace.jsonl").write_bytes(b"".join(lines))
    said = cli("trace", "check", "trace.jsonl")
    assert said.code == 1
    assert "0 violations" not in said.out.splitlines()
    assert "seq " in said.out


def test_the_story_of_a_group_goes_from_its_lease_to_its_batch(cli: Cli, ended: Path) -> None:
    events = [json.loads(line) for line in (ended / "trace.jsonl").read_bytes().splitlines()]
    group = next(event for event in events if event["ev"] == "seal")["members"][0]["group"]
    headline, *told = cli("trace", "show", ended, group).out.splitlines()
    assert headline.startswith(f"group {group}: trained by step 0, 1 lease, ")
    assert [line.split()[2] for line in told] == ["reserve", "push", "occupy", "seal", "deliver", "consume"]
    assert all(line.lstrip().startswith("+") for line in told)
    assert json.loads(cli("trace", "show", ended, group, "--json").out.splitlines()[0])["ev"] == "reserve"
    assert "does not contain it" in cli("trace", "show", ended, 999_999_999).err


def test_its_status_is_its_summary(cli: Cli, ended: Path) -> None:
    said = cli("status", ended)
    assert said.code == 0
    assert "4 of 4" in said.out
    answer = json.loads(cli("status", ended, "--json").out)
    assert (answer["phase"], answer["outcome"]) == ("finished", "finished")
    said = cli("status", ended, "--why")
    assert (said.code, said.out) == (0, "the run finished: 4 of 4 steps trained\n")


def test_a_finished_run_is_not_begun_again(cli: Cli, ended: Path) -> None:
    before = {path: path.read_bytes() for path in ended.rglob("*") if path.is_file()}
    told = (
        f"this run has finished (4 of 4 steps): {ended}. For more steps: "
        f"staleflow run --run-dir {ended} --resume trainer.steps=N\n"
    )
    said = cli("run", "--run-dir", ended, "--resume")
    assert (said.code, said.out, said.err) == (0, told, "")
    said = cli("run", "--run-dir", ended, "--resume", "--json")
    assert (said.code, json.loads(said.out)["outcome"], said.err) == (0, "finished", told)
    assert {path: path.read_bytes() for path in ended.rglob("*") if path.is_file()} == before


def test_without_a_directory_the_newest_run_is_meant(cli: Cli, ended: Path, short_dir: Path) -> None:
    for name in ("mine-1", "mine-2"):
        shutil.copytree(ended, short_dir / "runs" / name, ignore=shutil.ignore_patterns("sock"))
    for name, second in (("mine-1", 2000), ("mine-2", 1000)):
        os.utime(short_dir / "runs" / name / ".lock", (second, second))
    said = cli("status", "--why")
    assert (said.code, said.out) == (0, "the run finished: 4 of 4 steps trained\n")
    assert said.err == "using the newest run: runs/mine-1\n"
    assert cli("report").out == "runs/mine-1/report.html\n"
    assert "no process listens there" in cli("top").err
    said = cli("trace", "check")
    assert (said.code, said.err) == (0, "using the newest run: runs/mine-1\n")
    assert "0 violations" in said.out
    said = cli("trace", "plot", "--out", "lanes.html")
    assert (said.code, said.out.splitlines()[-1], said.err) == (0, "lanes.html", "using the newest run: runs/mine-1\n")


def test_a_worker_that_is_attached_to_it_is_refused_with_the_outcome(cli: Cli, ended: Path) -> None:
    said = cli("attach", "rollout", "--run-dir", ended)
    told = f'staleflow: run is "{ended}"; the run has ended: finished, 4 of 4 steps\n'
    assert (said.code, said.out, said.err) == (2, "", told)


def test_no_resumption_is_advised_where_it_cannot_help(cli: Cli, ended: Path, short_dir: Path) -> None:
    error = "rollout-0 rejected its configuration: no chat template"
    changed = {"outcome": "failed", "steps": 3, "error": error, "resume": ""}
    summary = json.loads((ended / "summary.json").read_text()) | changed
    (short_dir / "summary.json").write_text(json.dumps(summary))
    shutil.copy(ended / "config.json", short_dir)
    for said in (cli("status", short_dir), cli("status", short_dir, "--why")):
        assert said.code == 1
        assert "rejected its configuration" in said.out
        assert "resume with" not in said.out


def test_a_run_that_was_interrupted_says_how_to_go_on(cli: Cli, ended: Path, short_dir: Path) -> None:
    go_on = f"staleflow run --run-dir {short_dir} --resume"
    changed = {"outcome": "interrupted", "steps": 3, "resume": go_on}
    summary = json.loads((ended / "summary.json").read_text()) | changed
    (short_dir / "summary.json").write_text(json.dumps(summary))
    shutil.copy(ended / "config.json", short_dir)
    said = cli("status", short_dir, "--why")
    assert said.code == 1
    assert said.out == f"the run was interrupted; 3 of 4 steps trained; resume with: {go_on}\n"
    assert json.loads(cli("status", short_dir, "--json").out)["phase"] == "interrupted"


def test_a_trace_without_an_event_is_nothing_to_check(cli: Cli, short_dir: Path) -> None:
    (short_dir / "trace.jsonl").touch()
    said = cli("trace", "check", short_dir)
    assert (said.code, said.out) == (2, "")
    assert "the file has no events: nothing was checked" in said.err


def test_its_report_is_one_file_that_loads_nothing(cli: Cli, ended: Path, short_dir: Path) -> None:
    said = cli("report", ended, "--out", "it.html")
    assert (said.code, said.out, said.err) == (0, "it.html\n", "")
    page = (short_dir / "it.html").read_text()
    assert "The bound was kept: of 32 trained groups the oldest was" in page
    assert [word for word in CHAPTERS if f"<h2>{word}</h2>" not in page] == []
    assert "default-src &#39;none&#39;" in page or "default-src 'none'" in page
    assert loaded(page) == []
    assert "trainer.steps" in page.partition("<h2>Configuration</h2>")[2]
    assert cli("report", ended, "--out", "it.pdf").err.endswith("the name must end in .html\n")
    assert cli("report", short_dir).code == 2


@pytest.mark.usefixtures("fonts")
def test_its_timeline_is_a_page_and_a_picture(cli: Cli, ended: Path, short_dir: Path) -> None:
    said = cli("trace", "plot", ended, "--out", "lanes.html", "--out", "lanes.png")
    assert (said.code, said.err) == (0, "")
    page = (short_dir / "lanes.html").read_text()
    assert page.count('<div class="row">') == 4  # two engines, the reward worker, the trainer
    assert "Age of the trained groups" in page
    assert loaded(page) == []
    assert (short_dir / "lanes.png").read_bytes().startswith(b"\x89PNG")
    assert cli("trace", "plot", ended, "--out", "lanes.txt").code == 2


def loaded(page: str) -> list[str]:
    """Addresses that the page would fetch: every reference by address. Escaped quotes are text of the configuration."""
    return re.findall(r"""(?:src|href|url|import)\s*[=(]\s*["']?(?!#|data:|&#34;)[^\s"'>)]+""", page)


def test_it_is_not_run_over(cli: Cli, ended: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in ended.rglob("*")}
    said = cli("run", SIMULATED, *SHORT, "--run-dir", ended)
    assert said.code == 2
    assert "it contains a run already: add --resume" in said.err
    assert {path: path.stat().st_mtime_ns for path in ended.rglob("*")} == before
