"""``metrics.jsonl`` has one line per step, with finite numbers only, and survives restarts."""

import json
import math
from pathlib import Path
from typing import Any

from staleflow.process.clock import WALL, Clock
from staleflow.protocols.consistency import events
from staleflow.protocols.consistency.effects import Consumed, Member, Sealed
from staleflow.protocols.consistency.ids import (
    BatchId,
    GroupId,
    LeaseId,
    Lineage,
    Step,
    TrainerTerm,
    Version,
    WorkerId,
)
from staleflow.protocols.consistency.limits import Limits
from staleflow.protocols.consistency.machine import Machine
from staleflow.protocols.wire.messages import Metrics
from staleflow.servers.scheduler.ledger.totals import Totals
from staleflow.servers.scheduler.lengths.expected import Lengths
from staleflow.servers.scheduler.status.step_metrics import StepMetrics, length_bias
from staleflow.trace.reader import read_events
from tests.servers.scheduler.table import Seat, Table
from tests.servers.scheduler.world import config

LIMITS = Limits(max_staleness=1, batch_size=2)


def machine() -> Machine:
    made = Machine(LIMITS)
    made.apply(events.Join(trainer=WorkerId("t"), lineage=Lineage(0), version=Version(0)), 0)
    made.apply(events.Publish(trainer_term=TrainerTerm(1), sha="v0", nbytes=1), 0)
    return made


def metrics(path: Path, clock: Clock = WALL) -> StepMetrics:
    return StepMetrics(path, LIMITS, 2, Totals(), Lengths(), clock)


def lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resumed_run_goes_on_after_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics(path).step(Step(0), {"loss": 1.0}, machine(), [], 10**9)
    with path.open("ab") as file:
        file.write(b'{"step":1,"torn')
    resumed = metrics(path)
    assert resumed.last["step"] == 0
    resumed.step(Step(1), {"loss": 0.5}, machine(), [], 2 * 10**9)
    assert [(line["step"], line["loss"]) for line in lines(path)] == [(0, 1.0), (1, 0.5)]


def test_the_first_evaluation_is_known_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written = metrics(path)
    assert written.first == {}
    for step, value in ((-1, 0.25), (0, None), (1, 0.5)):
        values = {"loss": 1.0} if value is None else {"reward/eval": value}
        written.step(Step(step), values, machine(), [], 10**9)
    assert written.first == {"step": -1, "lineage": 0, "reward/eval": 0.25}
    assert metrics(path).first == written.first


def test_the_same_step_said_twice_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = metrics(path)
    first.step(Step(0), {"loss": 1.0}, machine(), [], 10**9)
    first.step(Step(0), {"loss": 1.0}, machine(), [], 10**9)
    metrics(path).step(Step(0), {"loss": 1.0}, machine(), [], 10**9)
    assert len(lines(path)) == 1


def test_the_trainers_word_counts_where_both_know_a_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics(path).step(Step(0), {"perf/tokens_per_second": 7.0}, machine(), [], 10**9)
    assert lines(path)[0]["perf/tokens_per_second"] == 7.0


def test_a_lease_lasts_until_its_group_is_pushed_as_in_the_trace(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config(batch_size=2))
    seat = Seat(table, "a")
    for group in seat.holds()[:2]:
        table.after(2_000)
        seat.finish(group)
    table.after(1_000)
    table.train()
    table.ask("trainer", Metrics(worker=WorkerId("trainer"), step=Step(0), values={}))
    table.close()
    began_ns, held_s = dict[int, int](), list[float]()
    for event in read_events(table.run_dir / "trace.jsonl"):
        if event["ev"] == "reserve":
            began_ns[event["lease"]] = event["m"]
        elif event["ev"] == "push":
            held_s.append((event["m"] - began_ns[event["lease"]]) / 1e9)
    assert held_s == [2.0, 4.0]
    (line,) = lines(table.run_dir / "metrics.jsonl")
    assert line["time/reserve"] == 3.0


def test_a_file_that_is_not_ours_does_not_stop_a_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("no json\n")
    assert metrics(path).last == {}


def test_length_bias_is_mean_trained_over_mean_sampled() -> None:
    totals = Totals()
    assert length_bias(totals) == 1.0
    totals.counts.tokens_pushed, totals.counts.samples_pushed = 100, 10
    assert length_bias(totals) == 1.0
    totals.counts.tokens_trained, totals.counts.samples_trained = 40, 8
    assert length_bias(totals) == 0.5


def test_a_masked_token_is_of_the_length_and_is_not_trained() -> None:
    totals, batch = Totals(), BatchId(1)
    where: dict[str, Any] = {"lineage": Lineage(0), "step": Step(3), "trainer_term": TrainerTerm(1)}
    member = Member(GroupId(7), LeaseId(1), Lineage(0), Version(1), "ab", 0, 4096, 500)
    sealed = Sealed(batch=batch, members=(member,), tokens=500, masked_tokens=120, digest="cd", **where)
    totals.consumed(Consumed(batch=batch, **where), sealed, samples=5)
    assert (totals.counts.tokens_trained, totals.counts.tokens_masked) == (380, 120)
    totals.counts.tokens_pushed, totals.counts.samples_pushed = 1000, 10
    assert length_bias(totals) == 1.0


def test_what_is_not_finite_is_neither_written_nor_told(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    said = metrics(path)
    said.step(
        Step(0), {"loss": 0.5, "nan": math.nan, "high": math.inf, "low": -math.inf, "most": 1e308}, machine(), [], 10**9
    )
    line = lines(path)[0]
    assert (line["loss"], line["most"]) == (0.5, 1e308)
    assert {"nan", "high", "low"}.isdisjoint({*line, *said.last, *said.newest})
