"""The page about a run that goes on."""

from pathlib import Path

from staleflow.configs.load import write_resolved
from staleflow.configs.schema import Config, Model, Prompts, Reward
from staleflow.report.page import report
from tests.runtime.histories import history

CLEAN = "The audit found nothing wrong"


def test_a_line_that_is_being_written_breaks_no_promise(tmp_path: Path) -> None:
    trace = history(tmp_path, 3)
    config = Config(model=Model(path="m"), prompts=Prompts(path="p.jsonl"), reward=Reward(run="r:f"))
    write_resolved(config, tmp_path)
    *lines, close = trace.read_bytes().splitlines(keepends=True)
    trace.write_bytes(b"".join(lines) + close[:-20])
    assert CLEAN in report(tmp_path)
    trace.write_bytes(b"".join([*lines, close]) + close[:-20])
    assert CLEAN not in report(tmp_path), "nothing comes after the end"
