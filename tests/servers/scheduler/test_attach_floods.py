"""What a process says of itself takes little room, in the store and in memory, however often and long it says it."""

from pathlib import Path

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import Attached, Detach, Done, Refusal
from staleflow.runtime.roles import Role
from tests.servers.scheduler.asked import Asked


def test_long_texts_are_refused(tmp_path: Path) -> None:
    run = Asked(tmp_path)
    run.cast()
    for field in ("endpoint", "stage", "prompts_sha"):
        answer = run.attach("m", "m", "monitor", Role.MONITOR, **{field: "x" * 100_000})
        assert isinstance(answer, Refusal)
        assert answer.code is Code.MALFORMED
    assert isinstance(run.attach("m", "m", "monitor", Role.MONITOR), Attached)
    assert isinstance(run.ask("m", Role.MONITOR, Detach(worker=WorkerId("m"), why="x" * 10**6)), Done)
    assert run.interpreter.trace.path.stat().st_size < 10_000
    run.stop()


def test_a_process_has_one_name(tmp_path: Path) -> None:
    run = Asked(tmp_path)
    run.cast()
    assert isinstance(run.attach("m", "m0", "monitor", Role.MONITOR), Attached)
    answer = run.attach("m", "m1", "monitor", Role.MONITOR)
    assert isinstance(answer, Refusal)
    assert answer.code is Code.CONFLICT
    run.stop()


def test_who_only_looked_is_forgotten(tmp_path: Path) -> None:
    run = Asked(tmp_path)
    run.cast()
    for number in range(100):
        assert isinstance(run.attach(f"m{number}", f"m{number}", "monitor", Role.MONITOR), Attached)
        run.service.on_gone(f"m{number}")
    with run.interpreter.store.read() as txn:
        assert txn.count("workers") == 3
    status = run.service._registry.processes()  # pyright: ignore[reportPrivateUsage]
    assert len(status) == 3
    run.stop()
