"""A log line stays one line, regardless of the name a peer chose."""

import logging
from pathlib import Path

import pytest

from staleflow.process.logs import logging_to


def test_a_peer_cannot_write_lines_of_its_own(tmp_path: Path) -> None:
    with logging_to(tmp_path, "scheduler"):
        logging.getLogger("x").warning("denied: %s", "a\n2026-01-01T00:00:00.000Z scheduler INFO x: fine\r\x1b[2J")
    text = (tmp_path / "logs" / "scheduler.log").read_text()
    assert text.count("\n") == 1
    assert "\\x0a2026-01-01" in text
    assert not set(text) & {"\r", "\x1b"}


def test_a_full_disk_takes_no_log_and_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "scheduler.log").symlink_to("/dev/full")
    with logging_to(tmp_path, "scheduler"):
        logging.getLogger("x").warning("draining")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("WARNING x: draining")
