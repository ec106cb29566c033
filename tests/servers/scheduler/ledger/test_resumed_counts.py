"""Totals of a whole run count every item once, despite restarts and silent peers."""

from collections import Counter
from pathlib import Path

from staleflow.protocols.consistency.effects import ReleaseWhy
from staleflow.protocols.consistency.ids import GroupId, Step
from staleflow.servers.scheduler.coordination.backoff import MAX_TRIES
from tests.servers.scheduler.table import Seat, Table
from tests.servers.scheduler.world import config


def test_tokens_that_an_engine_generated_before_a_restart_or_a_silence_are_counted_once(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config())
    seat = Seat(table, "a")
    seat.report(generated_tokens=100)
    seat.finish(seat.holds()[0])
    assert table.interpreter.totals.counts.tokens_generated == 100
    table.restart()
    seat.report(generated_tokens=150)
    assert table.interpreter.totals.counts.tokens_generated == 100, "how much of it was new, nobody knows"
    seat.report(generated_tokens=170)
    table.silent("a")
    seat.report(generated_tokens=200)
    assert table.interpreter.totals.counts.tokens_generated == 150
    table.close()


def test_a_step_that_was_sealed_before_a_restart_is_counted_when_it_is_consumed(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config(batch_size=2))
    seat = Seat(table, "a")
    for group in seat.holds()[:2]:
        seat.finish(group)
    table.restart()
    table.train()
    counts = table.interpreter.totals.counts
    assert (counts.steps, counts.tokens_trained, counts.samples_trained) == (1, 12, 4)
    table.close()


def test_a_prompt_that_always_fails_is_tried_a_few_times_an_epoch_and_nothing_of_it_piles_up(tmp_path: Path) -> None:
    rows, epochs = 4, 12
    table = Table(tmp_path / "run", config(batch_size=1), rows=rows)
    seat = Seat(table, "a", capacity=2)
    dealt: list[int] = []
    while table.interpreter.machine.version < epochs * (rows - 1):
        for assign in list(seat.held.values()):
            if assign.lease not in seat.held:
                continue
            if assign.group % rows == 1:
                dealt.append(assign.group // rows)
                table.release(assign, ReleaseWhy.ABORTED, "trajectories-0")
                seat.held.pop(assign.lease, None)
            else:
                seat.finish(assign.group)
        while table.interpreter.machine.sealed_batch(Step(table.interpreter.machine.version)) is not None:
            table.train()
        seat.report()
    tries = Counter(dealt)
    given_up = [epoch for epoch in tries if table.interpreter.machine.retired(GroupId(epoch * rows + 1))]
    assert len(given_up) >= epochs // 2
    assert {tries[epoch] for epoch in given_up} == {MAX_TRIES}
    assert max(tries.values()) == MAX_TRIES
    assert table.interpreter.prompts.num_requeued <= len(tries) - len(given_up) <= 4
    table.close()
