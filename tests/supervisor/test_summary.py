"""The summary at the end of a run is computed from its files."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from staleflow import api
from staleflow.configs.loading.load import load, write_resolved
from staleflow.monitor.ending import rows
from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.wire.messages import SchedulerStatus
from staleflow.protocols.wire.messages.status import RunTotals
from staleflow.supervisor import summary
from staleflow.supervisor.summary import Summary, TraceFacts, rewards, summarise
from staleflow.trace.events import Occupy
from staleflow.trace.reader import Line
from tests.report.traces import PLAIN, event, lines, opened, save

SIMULATED = Path(__file__).parent.parent.parent / "configs" / "simulated.toml"


def seal(batch: int, step: int, *versions: int) -> dict[str, Any]:
    members = [{"group": 9, "lease": 9, "lineage": 0, "version": version, "sha": ""} for version in versions]
    fields = {"lineage": 0, "step": step, "members": members, "tokens": 10, "masked_tokens": 3}
    return event("seal", 0, batch=batch, **fields)


def consume(batch: int) -> dict[str, Any]:
    return event("consume", 0, batch=batch, step=0)


def publish(version: int) -> dict[str, Any]:
    return event("publish", 0, lineage=0, version=version, bytes=1)


def rollback(to_version: int) -> dict[str, Any]:
    return event("rollback", 0, lineage=1, from_lineage=0, to_version=to_version)


def reserve(group: int) -> dict[str, Any]:
    return event("reserve", 0, group=group, lease=group, worker="a", version=0)


def push(group: int) -> dict[str, Any]:
    segments = [{"lineage": 0, "version": 0, "tokens": tokens} for tokens in (6, 4)]
    return event("push", 0, group=group, lease=group, segments=segments)


def release(group: int, why: str = "aborted") -> dict[str, Any]:
    return event("release", 0, group=group, lease=group, tokens=0, why=why)


def facts(events: Iterable[dict[str, Any]], step_s: float = 1.0) -> TraceFacts:
    """Facts of these events, ``step_s`` apart."""
    return summary.facts(lines({**event, "m": round(at * step_s * 1e9)} for at, event in enumerate(events)))


ATTACH, DETACH = (event(ev, 0, worker="a", role="rollout", why="") for ev in ("attach", "detach"))
CLOSE = event("close", 0, why="")


def test_off_policy_is_of_what_was_trained_not_of_what_was_sealed() -> None:
    assert facts([seal(1, 2, 0, 2), seal(2, 3, 0, 0), consume(1)]).ages == {2: 1, 0: 1}


def test_groups_that_failed_are_lost_though_nothing_was_ever_trained() -> None:
    in_a_stage = [reserve(1), push(1), release(1)]
    at_a_worker = [reserve(2), release(2), reserve(3), release(3, "expired"), reserve(4), release(4, "filtered")]
    assert facts([ATTACH, *in_a_stage, *at_a_worker]).lost == {"aborted": 2, "expired": 1}


def test_what_a_drain_gives_back_is_not_lost_also_when_the_run_is_resumed() -> None:
    drain = [reserve(1), reserve(2), DETACH, release(1), release(2), CLOSE]
    resumed = [ATTACH, seal(1, 0, 0), consume(1), reserve(3), release(3)]
    assert facts([ATTACH, *drain, *resumed]).lost == {"aborted": 1}


def test_what_a_worker_gives_back_that_leaves_in_the_middle_is_lost() -> None:
    left = [ATTACH, reserve(1), DETACH, release(1)]
    assert facts(left).lost == {}
    assert facts([*left, seal(1, 0, 0), consume(1)]).lost == {"aborted": 1}


def test_a_trace_is_read_as_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace of one day has millions of lines; the summary keeps none of them in memory."""
    alive: set[int] = set()
    most = 0

    class Told(Occupy, frozen=True, kw_only=True):
        def __del__(self) -> None:
            alive.discard(id(self))

    def told(path: Path) -> Iterator[Line]:
        nonlocal most
        for seq in range(100):
            alive.add(id(event := Told(group=GroupId(seq))))
            most = max(most, len(alive))
            yield Line("r", 1, seq, 0, 0, "occupy", event)

    monkeypatch.setattr(summary, "read_lines", told)
    made(tmp_path)
    assert 0 < most <= 2


def test_the_model_is_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    learning = ["trainer.backend=torch", "model.build=a:b"]
    assert made(tmp_path, learning).model == ""
    for name in ("8", "25", "30.part"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "checkpoint.json").touch()
    (tmp_path / "checkpoints" / "40").mkdir()
    newest = str(tmp_path / "checkpoints" / "25")
    assert made(tmp_path, learning).model == newest
    assert ("model", newest) in rows(made(tmp_path, learning))
    assert made(tmp_path).model == "", "simulated: no weights to speak of"


def test_held_out_prompts_are_judged_before_training_groups() -> None:
    trained = {"step": 0, "reward/mean": 0.1}
    assert rewards([trained]) == ("training groups", 0.1, 0.1)
    assert rewards([{"reward/eval": 0.2}, trained, {"reward/eval": 0.9}]) == ("held-out prompts", 0.2, 0.9)
    assert rewards([]) == ("training groups", None, None)


def made(run_dir: Path, overrides: Sequence[str] = (), **changes: Any) -> Summary:
    config = load(SIMULATED, overrides)
    given: dict[str, Any] = {
        "outcome": "finished",
        "error": "",
        "status": SchedulerStatus(version=30, totals=RunTotals(tokens_trained=7, releases={"filtered": 2})),
        "violations": 0,
        "restarts": {"rollout-0": 1, "trainer": 0},
    }
    return summarise(config, run_dir, **(given | changes))


def test_a_summary_comes_back_as_it_was_written(tmp_path: Path) -> None:
    lines = [{"step": 0, "reward/mean": 0.5, "trainer/bad_steps": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')
    it = made(tmp_path)
    assert (it.steps, it.steps_wanted, it.tokens_trained, it.groups_filtered, it.failed_steps) == (30, 30, 7, 2, 1)
    assert it.restarts == {"rollout-0": 1}
    summary.write(it, tmp_path)
    assert summary.read(tmp_path) == it
    assert summary.read(tmp_path / "none") is None


def test_nothing_known_is_nothing_claimed(tmp_path: Path) -> None:
    it = made(tmp_path, status=SchedulerStatus(), violations=None)
    assert (it.steps, it.reward_start, it.off_policy_mean, it.off_policy_max) == (0, None, None, None)


def test_a_trace_counts_steps_and_tokens() -> None:
    def trained(step: int) -> list[dict[str, Any]]:
        return [push(step), seal(step, step, 0), consume(step), publish(step + 1)]

    done = [publish(0), *trained(0), *trained(1), push(2), release(2, "filtered"), seal(2, 2, 0)]
    found = facts(done)
    assert (found.steps, found.tokens_trained, found.tokens_pushed, found.filtered) == (2, 14, 30, 1)
    assert facts([*done, rollback(1)]).steps == 1


def test_a_resumed_run_that_ends_before_its_scheduler_answers_has_what_it_had(tmp_path: Path) -> None:
    save(tmp_path, PLAIN)
    it = made(tmp_path, outcome="interrupted", status=SchedulerStatus())
    assert (it.steps, it.tokens_trained, it.tokens_generated, it.groups_filtered) == (2, 20, 20, 0)
    it = made(tmp_path)
    assert (it.steps, it.tokens_trained, it.groups_filtered) == (2, 20, 0), "the trace is newer than any status"


def test_wall_time_and_tokens_per_second_are_those_of_all_sessions_and_without_the_time_between_them() -> None:
    step = [push(0), seal(0, 0, 0), consume(0), publish(1)]
    first = [opened(0), publish(0), *step, CLOSE]
    resumed = [opened(0), push(1), seal(1, 1, 0), consume(1)]
    night = [
        {**event, "m": round((at + 10_000 * (at >= len(first))) * 1e9)} for at, event in enumerate(first + resumed)
    ]
    found = summary.facts(lines(night))
    assert (found.wall_s, found.working_s, found.tokens_per_s) == (9.0, 8.0, 14 / 8)


def test_tokens_and_ages_of_steps_that_were_rolled_back_do_not_count() -> None:
    lines = [seal(0, 0, 0), consume(0), seal(1, 1, 0), consume(1), rollback(1)]
    found = facts(lines)
    assert (found.tokens_trained, found.ages) == (7, {0: 1})
    assert facts([*lines, seal(2, 1, 1), consume(2)]).ages == {0: 2}


@pytest.mark.parametrize(
    "change", [{"outcome": "failed"}, {"error": "e"}, {"violations": 1}, {"status": SchedulerStatus(error="e")}]
)
def test_a_run_with_an_error_or_a_violation_is_not_good(tmp_path: Path, change: dict[str, Any]) -> None:
    assert made(tmp_path).good
    assert not made(tmp_path, **change).good


def test_a_finished_run_is_left_as_it_is_also_from_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    learning = load(SIMULATED, ["trainer.backend=torch", "model.build=a:b", "model.options.width=8"])
    write_resolved(learning, tmp_path)
    (tmp_path / "checkpoints" / "30").mkdir(parents=True)
    (tmp_path / "checkpoints" / "30" / "checkpoint.json").touch()
    summary.write(made(tmp_path, ["trainer.backend=torch", "model.build=a:b"], outcome="finished"), tmp_path)
    before = (tmp_path / "summary.json").read_bytes()
    assert api.run(learning, run_dir=tmp_path, resume=True).summary.outcome == "finished"
    command = capsys.readouterr().out.strip().rpartition("staleflow run ")[2].split()
    assert command[0] == f"{tmp_path}/config.toml"
    more = load(command[0], [word.replace("=N", "=60") for word in command[1:]])
    assert (more.trainer.steps, more.model.path) == (60, str(tmp_path / "checkpoints" / "30"))
    assert (tmp_path / "summary.json").read_bytes() == before


def test_more_of_a_launched_run_is_launched_from_its_own_configuration(tmp_path: Path) -> None:
    """The run's own configuration lacks ``[launch]``, and has the keys and addresses of the finished run."""
    done = made(tmp_path)
    told = summary.how_to_continue(done, load(SIMULATED), "staleflow launch --on ssh")
    assert told.endswith(
        f"For more steps: staleflow launch --on ssh CONFIG --run-dir {tmp_path} --resume trainer.steps=N"
    )
    told = summary.how_to_continue(done, load(SIMULATED))
    assert told.endswith(f"For more steps: staleflow run --run-dir {tmp_path} --resume trainer.steps=N")


def test_only_a_run_that_trained_every_step_is_finished(tmp_path: Path) -> None:
    assert summary.finished(tmp_path, 30) is None
    for outcome, version, done in (("finished", 30, True), ("finished", 29, False), ("interrupted", 30, False)):
        summary.write(made(tmp_path, outcome=outcome, status=SchedulerStatus(version=version)), tmp_path)
        assert (summary.finished(tmp_path, 30) is not None) == done
    summary.write(made(tmp_path, outcome="finished", status=SchedulerStatus(version=30)), tmp_path)
    assert summary.finished(tmp_path, 31) is None, "more steps are wanted"
