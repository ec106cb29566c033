"""``why`` names the party that is stopped, silent or failing, not the ones that wait for it."""

from pathlib import Path

import msgspec
import pytest

from staleflow.configs.schema import Environment, Stage
from staleflow.protocols.consistency.effects import ReleaseWhy
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import Detach, Done, StageLoad, StageLoads
from staleflow.servers.scheduler.workers.registry import CRASH_LOOP_WINDOW_MS, FIRST_MESSAGE_TIMEOUT_MS
from tests.servers.scheduler.table import TICK_MS, Seat, Table
from tests.servers.scheduler.world import config

WAITS = {
    "trajectories-0": "its groups cannot be pushed, rewarded or trained",
    "parameters": "no version is published or loaded",
}


@pytest.mark.parametrize("server", list(WAITS))
def test_a_silent_server_is_named_and_no_worker_is_blamed(tmp_path: Path, server: str) -> None:
    table = Table(tmp_path / "run", config())
    Seat(table, "a")
    table.wait_for_batch()
    before = table.why
    assert server not in before
    table.silent(server)
    table.after(4_000)
    assert table.why == f"{server} has been silent for 4 s: {WAITS[server]}"
    assert table.status()["trainer_waits"] == "servers"
    role = {"trajectories-0": "trajectories", "parameters": "parameters"}[server]
    table.attach(server, role, endpoint="ipc:///none", rows=1000, prompts_sha="p")
    assert table.why == before
    assert table.status()["trainer_waits"] == "engines"


@pytest.mark.parametrize(
    ("server", "said"),
    [("trajectories-0", "trajectory server 0 has left"), ("parameters", "the parameter server has left")],
)
def test_a_server_that_said_goodbye_is_named_too(tmp_path: Path, server: str, said: str) -> None:
    table = Table(tmp_path / "run", config())
    Seat(table, "a")
    assert table.ask(server, Detach(worker=WorkerId(server), why="stopped")) == Done()
    assert table.why == said


def test_a_restarted_scheduler_blames_no_server_before_it_could_be_heard(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config())
    Seat(table, "a")
    table.restart()
    assert "silent for" not in table.why
    table.after(FIRST_MESSAGE_TIMEOUT_MS)
    assert table.why == f"trajectories-0 has been silent for 3 s: {WAITS['trajectories-0']}"


def crash(table: Table, number: int) -> None:
    """Kill the trainer's process, so that it becomes silent; its successor attaches under the same name and joins."""
    table.silent(table.interpreter.machine.trainer)
    table.attach(f"trainer.{number}", "trainer", name="trainer")
    table.join(f"trainer.{number}", int(table.interpreter.machine.version))


def test_a_trainer_in_a_crash_loop_is_named_while_it_works_and_while_it_is_away(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config())
    seat = Seat(table, "a")
    for group in seat.holds()[:2]:
        seat.finish(group)
    assert table.why.startswith("the trainer works on step 0; ")
    crash(table, 1)
    assert table.why.startswith("the trainer works on step 0; "), "one restart is no loop"
    crash(table, 2)
    crash(table, 3)
    loop = "trainer was restarted 3 times in the last 5 min; its log has the reason"
    assert table.why.startswith(f"{loop}; the trainer works on step 0; ")
    table.silent("trainer.3")
    table.after(7_000)
    assert table.why == f"{loop}; trainer has been silent for 7 s: step 0 waits for it or its successor"
    crash(table, 4)
    table.after(CRASH_LOOP_WINDOW_MS)
    assert table.why.startswith("the trainer works on step 0; "), "it works again"


def test_a_worker_that_fails_everything_is_named_with_its_reason(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config(batch_size=8, max_staleness=2))
    good, bad = Seat(table, "good", capacity=4), Seat(table, "bad", capacity=4)
    assert good.holds()
    for _ in range(4):
        for assign in list(bad.held.values()):
            del bad.held[assign.lease]
            table.release(assign, ReleaseWhy.ABORTED, "bad", detail="no module named judge")
        table.after(TICK_MS)
        bad.report()
    failed = table.interpreter.totals.counts.releases["aborted"]
    assert table.why.endswith(f"; bad is on hold for 1 s: its last {failed} groups failed: no module named judge")
    rows = {row["name"]: row["failed"] for row in table.status()["instances"]}
    assert rows["good"] is None
    assert rows["bad"]["groups"] == failed
    table.after(1_000)
    bad.report()
    assert f"bad is limited to one group at a time: its last {failed} groups failed" in table.why
    assert len(bad.held) == 1
    bad.finish(bad.holds()[0])
    assert "held" not in table.why


def test_an_environment_that_lets_too_few_episodes_play_is_named_with_its_keys(tmp_path: Path) -> None:
    """Every engine may be at its own limit; the one with most episodes queued is named."""
    settings = config(batch_size=8, max_staleness=2)
    played = Environment(run="nobody:Plays", processes=2, concurrency=4)
    table = Table(tmp_path / "run", msgspec.structs.replace(settings, environment=played))
    for name, queued in (("a", 3), ("b", 5), ("c", 0)):
        Seat(table, name).report(running=1, episodes=8, episodes_waiting=queued)
    limit = (
        "environment at b: 8 of 8 episodes under way, 5 queued; raise environment.concurrency or environment.processes"
    )
    assert table.why.endswith(f" in stages; {limit}")
    rows = {row["name"]: row["limit"] for row in table.status()["instances"]}
    assert rows == {"a": limit.replace(" b:", " a:").replace(" 5 ", " 3 "), "b": limit, "c": ""}


def test_a_stage_that_is_the_limit_is_named_with_the_keys_that_raise_it(tmp_path: Path) -> None:
    """Every stage may be at its own limit; the one with most groups waiting is named."""
    judge = Stage(name="judge", run="nobody:judges", makes=["score"])
    table = Table(tmp_path / "run", msgspec.structs.replace(config(batch_size=8, max_staleness=2), stage=[judge]))
    for number, stage in enumerate(("judge", "reward", "reward")):
        table.attach(f"{stage}-{number}", "stage", stage=stage)
    seat = Seat(table, "a")
    assert table.push(seat.assign(seat.holds()[0]), "a") is None
    loads = [
        StageLoad(stage="judge", waiting=9, taken=8, groups=[], calls=8),
        StageLoad(stage="reward", waiting=4, taken=2, groups=[], calls=2),
    ]
    assert table.ask("trajectories-0", StageLoads(shard=0, loads=loads, used_share=0.25)) == Done()
    limit = "stage judge: 8 of 8 calls under way, 9 groups queued; raise stage[0].concurrency or stage[0].workers"
    assert table.why.endswith(f" in stages; {limit}")
    one_by_one = "stage reward: 2 of 2 calls under way, 5 groups queued; raise reward.workers, or make it an async def"
    rows = {row["stage"]: row["limit"] for row in table.status()["stages"]}
    assert rows == {"judge": limit, "reward": one_by_one}
    loads[0] = msgspec.structs.replace(loads[0], taken=7)
    assert table.ask("trajectories-0", StageLoads(shard=0, loads=loads, used_share=0.25)) == Done()
    assert table.why.endswith(" in stages; 9 wait for the stage judge (1 worker, 7 in work)")
