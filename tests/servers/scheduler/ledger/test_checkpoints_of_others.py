"""Only the joined trainer may report checkpoints; a report from another one would delete checkpoints still needed."""

from pathlib import Path

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.messages import Refusal, RegisterCheckpoint, RegisterCheckpointReply
from tests.servers.scheduler.table import Seat, Table
from tests.servers.scheduler.world import config


def test_a_stranger_that_guesses_the_term_moves_no_checkpoint(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config(batch_size=2))
    seat = Seat(table, "a")
    for group in list(seat.holds())[:2]:
        seat.finish(group)
    table.train()
    kept = RegisterCheckpoint(trainer_term=table.term, lineage=Lineage(0), version=Version(1))
    before = table.interpreter.machine.snapshot()
    for stranger in ("stranger", "a", "parameters"):
        refused = table.ask(stranger, kept)
        assert isinstance(refused, Refusal), refused
        assert (refused.code, refused.detail) == (Code.DENIED, f"{stranger} is not the trainer, trainer is")
    assert table.interpreter.machine.snapshot() == before
    table.join("trainer.2", 0)  # its newest checkpoint; version 1 was never saved
    kept = RegisterCheckpoint(trainer_term=table.term, lineage=Lineage(0), version=Version(0))
    assert isinstance(table.ask("trainer", kept), Refusal)
    assert table.ask("trainer.2", kept) == RegisterCheckpointReply(oldest=Version(0))
    table.close()
