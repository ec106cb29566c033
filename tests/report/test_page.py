"""The page shows a run in progress."""

import re
from pathlib import Path

import pytest

from staleflow.configs.loading.load import write_resolved
from staleflow.configs.schema import Config, Model, Prompts, Reward
from staleflow.report.page import report
from staleflow.trace.audit.report import FileRule
from tests.trace.histories import history

CLEAN = "The audit found no violation"
CONFIG = Config(model=Model(path="m"), prompts=Prompts(path="p.jsonl"), reward=Reward(run="r:f"))


def test_a_line_that_is_being_written_breaks_no_promise(tmp_path: Path) -> None:
    trace = history(tmp_path, 3)
    write_resolved(CONFIG, tmp_path)
    *lines, close = trace.read_bytes().splitlines(keepends=True)
    trace.write_bytes(b"".join(lines) + close[:-20])
    assert CLEAN in report(tmp_path)
    trace.write_bytes(b"".join([*lines, close]) + close[:-20])
    assert CLEAN not in report(tmp_path), "nothing comes after the end"


def test_each_rule_has_all_its_violations_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("staleflow.trace.audit.report.MAX_VIOLATIONS", 1)
    lines = history(tmp_path, 3).read_bytes().replace(b'"h":"', b'"h":"0')
    (tmp_path / "trace.jsonl").write_bytes(lines)
    write_resolved(CONFIG, tmp_path)
    of_chain = re.search(f"<td>{FileRule.CHAIN}</td>.*?>(\\d+)</td></tr>", report(tmp_path))
    assert of_chain is not None
    assert int(of_chain[1]) == lines.count(b"\n")
