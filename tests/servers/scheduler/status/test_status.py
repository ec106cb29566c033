"""The status reports the counts, ages and reasons of a run, and many processes that poll it cost little."""

from pathlib import Path
from typing import Literal

import msgspec

from staleflow.configs.schema import Staleness
from staleflow.protocols.consistency.effects import ReleaseWhy
from staleflow.protocols.consistency.ids import Lineage, Version, WorkerId
from staleflow.protocols.consistency.limits import Bound
from staleflow.protocols.wire.messages import (
    Attach,
    Done,
    GetStatus,
    RegisterCheckpoint,
    RegisterCheckpointReply,
    SchedulerStatus,
    StageLoads,
)
from staleflow.protocols.wire.messages.status import Ages, ShardStatus, as_dict
from tests.servers.scheduler.table import Seat, Table
from tests.servers.scheduler.world import config


def asked(table: Table) -> SchedulerStatus:
    reply = table.ask("monitor", GetStatus())
    assert isinstance(reply, SchedulerStatus)
    return reply


def trained(table: Table, seat: Seat, steps: int) -> None:
    for _ in range(steps):
        seat.report()
        for group in seat.holds()[:2]:
            seat.finish(group)
        table.train()


def test_groups_are_counted_by_how_many_versions_they_are_behind(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config(max_staleness=1))
    seat = Seat(table, "a", capacity=4)
    trained(table, seat, 2)
    seat.report()
    seat.finish(seat.holds()[0])
    spread = asked(table).staleness
    assert spread.consumed == ((0, 2), (1, 2))
    live = asked(table).window
    newest = asked(table).version
    assert spread.in_flight == tuple((newest + 1 - row.deadline, row.leased) for row in reversed(live))
    assert sum(count for _, count in spread.in_queue) == 1


def test_programs_that_read_the_json_find_every_field_under_its_name(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config())
    Seat(table, "a")
    values = as_dict(asked(table))
    assert " ".join(values) == (
        "run run_dir parameters incarnation uptime_s run_s lineage forks version checkpoints next_step steps "
        "trainer_term max_staleness bound on_overdue batch_size group_size max_inflight security ledger window pinned "
        "why trainer_waits recommendation wanted staleness recent instances workers workers_left_out stages shards "
        "totals lengths violations metrics first_metrics "
        "finished trained drained error closed full map_used"
    )
    nested = {key: " ".join(row if hasattr(row, "keys") else row[0]) for key, row in values.items() if key in NESTED}
    assert nested == NESTED
    assert values["staleness"]["in_flight"] == [[0, 4], [1, 0]], "pairs are lists, as in JSON"


NESTED = {
    "ledger": "leased pushed occupied sealed consumed spares claimed",
    "window": "deadline leased pushed occupied",
    "pinned": "step groups",
    "staleness": "in_flight in_queue consumed",
    "instances": "worker name version running waiting kv_used slots tokens_per_s limit held failed loading "
    "evaluation last_command last_seen_s",
    "workers": "worker name role alive pid last_seen_s",
    "stages": "stage after workers waiting taken calls calls_under_way limit failing",
    "shards": "shard used_share full",
    "totals": "reserves pushes occupies releases drops rejects steps tokens_trained tokens_masked tokens_pushed "
    "tokens_generated moves staleness samples_pushed samples_trained served_s violations",
    "lengths": "ranker described length/ranker_tau length/ranker_n",
}


def test_under_the_token_bound_only_what_was_trained_has_an_age(tmp_path: Path) -> None:
    staleness = Staleness(max_staleness=1, bound=Bound.TOKEN)
    table = Table(tmp_path / "run", msgspec.structs.replace(config(), staleness=staleness))
    trained(table, Seat(table, "a"), 1)
    assert asked(table).staleness == Ages(consumed=((0, 2),))


def test_what_was_trained_is_counted_over_a_restart(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config())
    trained(table, Seat(table, "a"), 2)
    before = asked(table).staleness.consumed
    table.restart()
    assert asked(table).staleness.consumed == before
    assert sum(count for _, count in before) == 4


def test_running_time_is_that_of_all_schedulers_without_the_time_between_them(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config())
    began_s = asked(table).run_s
    table.clock.ms += 40_000
    trained(table, Seat(table, "a"), 1)
    served_s = asked(table).run_s
    assert served_s >= began_s + 40
    table.clock.ms += 100
    table.restart()
    table.clock.ms += 2_000
    assert served_s + 2 <= asked(table).run_s <= served_s + 2.1


def test_a_pinning_group_is_told_with_its_engine_and_its_times(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config())
    seat = Seat(table, "a", capacity=8)
    slow, *others = list(seat.held.values())
    for assign in others[:2]:
        seat.finish(assign.group)
    table.train()
    seat.report()
    table.after(5_000)
    for group in [group for group in seat.holds() if group != slow.group][:2]:
        seat.finish(group)
    table.wait_for_batch()
    values = asked(table)
    (pin,) = values.pinned.groups
    assert (pin.group, pin.version, pin.worker, pin.stages) == (slow.group, 0, "a", ())
    assert (pin.so_far_s, pin.left_s) == (5.0, None), "four groups say nothing of one that took longer"
    assert values.why.endswith(f"group {slow.group} of version 0, on a, for 5 s so far; policy: wait")
    assert values.trainer_waits == "older groups"


def test_a_shard_that_refuses_pushes_is_named_before_the_group_that_waits_for_it(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config())
    seat = Seat(table, "a", capacity=8)
    slow, *others = list(seat.held.values())
    for assign in others[:2]:
        seat.finish(assign.group)
    table.train()
    seat.report()
    for group in [group for group in seat.holds() if group != slow.group][:2]:
        seat.finish(group)
    table.wait_for_batch()
    waits = f"step 1 waits for group {slow.group} of version 0, on a; policy: wait"

    def why(full: Literal["", "map", "disk"]) -> str:
        report = StageLoads(shard=0, loads=[], used_share=0.89, full=full)
        assert table.ask("trajectories-0", report) == Done()
        assert asked(table).shards == (ShardStatus(shard=0, used_share=0.89, full=full),)
        return asked(table).why

    full = "trajectory server 0 is full (89 % of trajectories.map_mb): pushes wait"
    assert why("") == waits
    assert why("map") == f"{full} until a checkpoint releases groups; {waits}"
    assert why("disk") == f"trajectory server 0: its disk is full; pushes wait; {waits}"
    kept = RegisterCheckpoint(trainer_term=table.term, lineage=Lineage(0), version=Version(1))
    assert table.ask("trainer", kept) == RegisterCheckpointReply(oldest=Version(1))
    fit = "the groups of 2 batches must fit in 90 % of it, so a new run needs a larger one"
    assert why("map") == f"{full}, and no checkpoint can free space: {fit}; {waits}"


def test_the_status_has_the_surviving_history_and_the_checkpoints(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config())
    seat = Seat(table, "a")
    for _ in range(2):
        seat.report()
        for group in seat.holds()[: table.config.trainer.batch_size]:
            seat.finish(group)
        table.train()
    assert (asked(table).forks, asked(table).checkpoints) == (((0, 0),), (0,))
    kept = RegisterCheckpoint(trainer_term=table.term, lineage=Lineage(0), version=Version(1), keep=2)
    assert table.ask("trainer", kept) == RegisterCheckpointReply(oldest=Version(0))
    table.roll_back(1)
    assert (asked(table).forks, asked(table).checkpoints) == (((0, 0), (1, 2)), (0, 1))


def test_the_word_for_what_the_trainer_waits_for_follows_the_groups(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config())
    seat = Seat(table, "a")
    assert asked(table).trainer_waits == "", "it has asked for nothing"
    table.wait_for_batch()
    assert asked(table).trainer_waits == "engines"
    assigns = list(seat.held.values())[:2]
    for assign in assigns:
        assert table.push(assign, "a") is None
        del seat.held[assign.lease]
    assert asked(table).trainer_waits == "stages"
    table.silent("a")
    assert asked(table).trainer_waits == "workers"
    seat.report()
    for assign in assigns:
        table.occupy(assign)
    assert asked(table).trainer_waits == "", "it has its batch"


def test_an_engine_says_what_it_was_told_last(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config())
    seat = Seat(table, "a")
    (row,) = asked(table).instances
    assert row.last_command == f"assign {seat.holds()[-1]}"
    assert (row.name, row.version, row.loading, row.slots) == ("a", 0, None, 2)
    seat.loads = False
    trained(table, seat, 1)
    (row,) = asked(table).instances
    assert (row.loading, row.last_command.split()[0]) == (1, "pull")


def test_noteworthy_lines_are_kept_at_hand_and_the_life_of_a_group_is_not(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config())
    seat = Seat(table, "a")
    lost = seat.assign(seat.holds()[-1])
    del seat.held[lost.lease]
    table.release(lost, ReleaseWhy.ABORTED, "a")
    filtered = seat.assign(seat.holds()[-1])
    assert table.push(filtered, "a") is None
    del seat.held[filtered.lease]
    table.release(filtered, ReleaseWhy.FILTERED, "trajectories-0")
    trained(table, seat, 30)
    recent = asked(table).recent
    kinds = [line["ev"] for line in recent]
    assert kinds[:2] == ["open", "attach"]
    assert [(line["group"], line["why"]) for line in recent if line["ev"] == "release"] == [(lost.group, "aborted")]
    assert {"reserve", "push", "occupy", "consume", "deliver"}.isdisjoint(kinds)
    assert kinds.count("seal") + kinds.count("publish") == 24, "what comes with every step drives out its own kind only"
    assert all("members" not in line and "recovered" not in line for line in recent)
    assert [line["t"] for line in recent] == sorted(line["t"] for line in recent)


def test_with_many_processes_most_of_an_answer_serves_for_a_second(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config())
    for number in range(64):
        table.attach(f"rollout-{number}", "rollout", capacity=0)
    first = asked(table)
    table.clock.ms += 999
    assert asked(table).workers is first.workers
    table.clock.ms += 1
    assert asked(table).workers is not first.workers


def test_with_many_processes_the_term_of_a_trainer_that_joins_is_known_at_once(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config())
    for number in range(64):
        table.attach(f"rollout-{number}", "rollout", capacity=0)
    first = asked(table)
    table.join("successor", 0)
    assert table.term > first.trainer_term
    assert asked(table).trainer_term == table.term
    assert asked(table).workers is first.workers


def test_with_few_processes_every_answer_is_new(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config())
    assert asked(table) is not asked(table)


def test_a_silent_trainer_is_named_once(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config())
    trained(table, Seat(table, "a"), 1)
    table.silent("trainer")
    assert asked(table).why == "trainer has been silent for 1 s: step 1 waits for it or its successor"


class Unpublished(Table):
    """A run whose trainer has joined and publishes nothing."""

    def publish(self, version: int, batch: int | None = None) -> None:
        pass


def test_a_trainer_that_has_published_nothing_is_called_by_its_name(tmp_path: Path) -> None:
    table = Unpublished(tmp_path / "run", config())
    worker = WorkerId("coach.7354b0f4")
    table.ask(worker, Attach(worker=worker, name="coach", role="trainer"))
    table.join(worker, version=0)
    assert asked(table).why == "version 0 is still to be published by coach"
