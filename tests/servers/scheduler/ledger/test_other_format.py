"""A ledger stored by an incompatible version of staleflow is rejected in one line and left unchanged."""

from pathlib import Path

import pytest

from staleflow.configs.errors import ConfigError
from tests.servers.scheduler.table import Seat, Table
from tests.servers.scheduler.world import config


def test_a_ledger_of_another_format_is_refused_and_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(tmp_path / "run", config(batch_size=2))
    held = Seat(table, "a").holds()
    with monkeypatch.context() as patched:
        patched.setattr("staleflow.protocols.consistency.snapshot.FORMAT", 2)
        with pytest.raises(ConfigError, match=r"run directory is .*; the ledger was stored with \(format, .*\) \(5, "):
            table.restart()
    table.restart()
    assert table.interpreter.machine.state_counts()["leased"] == len(held) > 0
    table.close()
