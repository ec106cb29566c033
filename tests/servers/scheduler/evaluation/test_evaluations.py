"""Rollout workers play evaluation sets at a pinned version while training goes on."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from staleflow.configs.evals import EvalSet
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import Lineage, Step, Version, WorkerId
from staleflow.protocols.wire.messages import (
    Command,
    Detach,
    Done,
    Drain,
    EndEvaluation,
    Evaluate,
    Finished,
    GetRetainedVersions,
    InstanceStats,
    PromptScores,
    PutScores,
    Refusal,
    RetainedVersions,
)
from staleflow.servers.scheduler.evaluation.evaluations import FIRST_RETRY_MS, MAX_FAILURES, WORKER_TIMEOUT_MS
from tests.servers.scheduler.table import Seat, Table
from tests.servers.scheduler.world import config

PROMPTS = 4


def evaluated(*sets: EvalSet, steps: int = 100, **more: Any) -> Config:
    return msgspec.structs.replace(config(batch_size=1, steps=steps, **more), eval=list(sets))


def sums(**more: Any) -> EvalSet:
    return msgspec.convert({"name": "sums", "source": "nobody:opens", "prompts": PROMPTS, "every": 2} | more, EvalSet)


class Player(Seat):
    """A rollout worker that plays evaluations: it accepts the commands, and the test sends the scores."""

    def __init__(self, table: Table, name: str) -> None:
        self.playing: Evaluate | None = None
        self.done = list[Evaluate]()
        """Every evaluation that it was ordered to play."""
        super().__init__(table, name, eval_prompts=[PROMPTS] * len(table.config.eval))

    def _obey(self, command: Command) -> None:
        match command:
            case Evaluate():
                self.playing, self.evaluation = command, command.ticket
                self.done.append(command)
            case EndEvaluation() if command.ticket == self.evaluation:
                self.playing, self.evaluation = None, 0
            case _:
                super()._obey(command)

    def score(self, *prompts: int, reward: float = 1.0, failure: str = "", ticket: int = 0) -> Code | None:
        """Send the scores of prompts, by default of all that it plays; return the code of a refusal."""
        playing = self.playing if self.playing is not None else self.done[-1]
        numbers = prompts or (() if failure else tuple(playing.prompts))
        scores = [PromptScores(prompt=prompt, rewards=[reward], lengths=[3]) for prompt in numbers]
        put = PutScores(worker=WorkerId(self.name), ticket=ticket or playing.ticket, scores=scores, failure=failure)
        reply = self.table.ask(self.name, put)
        if isinstance(reply, Refusal):
            return reply.code
        assert isinstance(reply, Done)
        if self.playing is playing and (failure or set(numbers) == set(playing.prompts)):
            self.playing, self.evaluation = None, 0
        return None


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    made = Table(tmp_path / "run", evaluated(sums()))
    yield made
    made.close()


def trains(table: Table, *workers: Seat) -> None:
    """Train one step with groups of these workers."""
    while table.interpreter.machine.sealed_batch(Step(table.interpreter.machine.version)) is None:
        for worker in workers:
            worker.report()
        busy = next(worker for worker in workers if worker.held)
        busy.finish(next(iter(busy.held.values())).group)
    table.train()
    for worker in workers:
        worker.report()


def metrics(table: Table) -> list[dict[str, Any]]:
    path = table.run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if "eval/sums/reward" in line]


def weights(evaluate: Evaluate | None) -> tuple[int, int]:
    assert evaluate is not None
    return evaluate.lineage, evaluate.version


def test_a_set_is_played_at_version_0_at_every_second_version_and_at_the_last(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", evaluated(sums(), steps=5))
    a = Player(table, "a")
    for version in range(5):
        if a.playing is not None:
            assert weights(a.playing) == (0, version)
            assert a.playing.prompts == list(range(PROMPTS))
            assert a.score(reward=version) is None
        a.report()
        trains(table, a)
    assert weights(a.playing) == (0, 5)
    a.score()
    assert [(line["step"], line["version"], line["eval/sums/reward"]) for line in metrics(table)] == [
        *((-1, 0, 0.0), (1, 2, 2.0), (3, 4, 4.0), (4, 5, 1.0))
    ]
    table.close()


def test_a_worker_that_plays_loads_nothing_newer_and_starts_groups_with_the_version_it_has(table: Table) -> None:
    a, b = Player(table, "a"), Player(table, "b")
    assert weights(a.playing) == (0, 0)
    assert b.playing is None
    trains(table, a, b)
    assert (a.stats.version, b.stats.version) == (0, 1)
    started = {assign.version for assign in (*a.held.values(), *b.held.values())}
    assert started == {0, 1}, "training goes on at both versions"
    trains(table, a, b)
    trains(table, a, b)
    assert (a.stats.version, b.stats.version) == (0, 3)
    assert a.held == {}, "the bound admits no group of version 0 at version 3"
    assert a.score() is None
    a.report()
    assert a.stats.version == 2, "the next evaluation"


def test_each_line_of_the_scores_names_the_version_and_the_prompt(table: Table) -> None:
    a = Player(table, "a")
    a.score(0, reward=0.5)
    assert not (table.run_dir / "evaluations.jsonl").exists()
    a.score(1, 2, 3)
    lines = [json.loads(line) for line in (table.run_dir / "evaluations.jsonl").read_text().splitlines()]
    assert [(line["set"], line["version"], line["prompt"], line["rewards"]) for line in lines] == [
        *(("sums", 0, 0, [0.5]), ("sums", 0, 1, [1.0]), ("sums", 0, 2, [1.0]), ("sums", 0, 3, [1.0]))
    ]
    (line,) = metrics(table)
    assert (line["eval/sums/reward"], line["eval/sums/avg@1"]) == (0.875, 0.75)


@pytest.mark.parametrize("lost", ["silent", "detached", "no report"])
def test_the_prompts_of_a_lost_worker_go_to_another_one(table: Table, lost: str) -> None:
    a, b = Player(table, "a"), Player(table, "b")
    assert a.playing is not None
    ticket = a.playing.ticket
    a.score(1)
    if lost == "silent":
        table.silent("a")
    elif lost == "detached":
        table.ask("a", Detach(worker=WorkerId("a"), why="goodbye"))
    else:
        for _ in range(4):  # b reports and a does not
            table.after(10_000)
            b.report()
    b.report()
    assert b.playing is not None
    assert weights(b.playing) == (0, 0)
    assert b.playing.prompts == [0, 2, 3], "what has scores is not played again"
    assert b.playing.ticket > ticket
    if lost != "detached":
        assert a.score(0, reward=7.0, ticket=ticket) is Code.STALE_LEASE
    b.score()
    assert metrics(table)[0]["eval/sums/reward"] == 1.0


def test_a_worker_that_comes_back_with_an_old_evaluation_is_ordered_to_end_it(table: Table) -> None:
    a, b = Player(table, "a"), Player(table, "b")
    table.silent("a")
    b.report()
    assert b.playing is not None
    a.report()
    assert a.playing is None


def test_a_worker_that_forgot_what_it_plays_is_a_failure(table: Table) -> None:
    a = Player(table, "a")
    a.playing, a.evaluation = None, 0
    a.report()
    table.after(FIRST_RETRY_MS)
    a.report()
    assert a.playing is not None
    assert len(a.done) == 2


def test_while_an_evaluation_runs_the_newest_due_version_waits(table: Table) -> None:
    a, b = Player(table, "a"), Player(table, "b")
    for _ in range(5):
        trains(table, a, b)
    assert table.interpreter.machine.version == 5
    assert weights(a.playing) == (0, 0)
    a.score()
    a.report()
    assert weights(a.playing) == (0, 4), "version 2 was skipped"
    assert [line["version"] for line in metrics(table)] == [0]


def test_a_worker_with_a_newer_version_finishes_its_groups_before_it_loads_the_older_one(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", evaluated(sums(), max_staleness=6))
    a, b = Player(table, "a"), Player(table, "b")
    trains(table, a, b)
    assert weights(a.playing) == (0, 0)
    assert b.stats.version == 1
    assert b.held != {}
    table.ask("a", Detach(worker=WorkerId("a"), why="goodbye"))
    b.report()
    assert b.playing is None, "no token of its groups may be older than version 1"
    before = set(b.held)
    while left := before & set(b.held):
        b.finish(b.held[min(left)].group)
        if table.interpreter.machine.sealed_batch(Step(table.interpreter.machine.version)) is not None:
            table.train()  # makes room in the window
        b.report()
        new = [assign for lease, assign in b.held.items() if lease not in before]
        assert all(assign.version == 0 for assign in new), "it starts no group before it has the older version"
    assert weights(b.playing) == (0, 0)
    assert b.stats.version == 0
    table.close()


def test_a_set_may_be_shared_by_several_workers(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", evaluated(sums(workers=2)))
    a, b, c = (Player(table, name) for name in "abc")
    assert a.playing is not None
    assert b.playing is not None
    assert (a.playing.prompts, b.playing.prompts, c.playing) == ([0, 2], [1, 3], None)
    a.score()
    b.score()
    assert len(metrics(table)) == 1
    table.close()


def test_sets_that_are_due_together_are_played_one_after_another(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", evaluated(sums(), sums(name="more")))
    a, b = Player(table, "a"), Player(table, "b")
    assert b.playing is None
    a.score()
    a.report()
    b.report()
    assert [one.set for one in (*a.done, *b.done)] == ["sums", "more"]
    table.close()


def test_failures_are_retried_later_and_give_the_evaluation_up_in_the_end(table: Table) -> None:
    a = Player(table, "a")
    a.score(0, failure="")
    for number in range(MAX_FAILURES):
        assert a.playing is not None, number
        a.score(failure="no such judge")
        a.report()
        assert a.playing is None
        table.after(FIRST_RETRY_MS << number)
        a.report()
    assert a.playing is None
    (line,) = metrics(table)
    assert (line["eval/sums/reward"], line["eval/sums/failed"]) == (1.0, 3.0)


def test_scores_that_cannot_be_are_refused(table: Table) -> None:
    a = Player(table, "a")
    assert a.playing is not None
    for scores in (
        PromptScores(prompt=0, rewards=[float("nan")], lengths=[1]),
        PromptScores(prompt=0, rewards=[1.0, 1.0], lengths=[1, 1]),
        PromptScores(prompt=0, rewards=[1.0], lengths=[]),
        PromptScores(prompt=0, rewards=[1.0], lengths=[1], numbers={"reward/x": [float("inf")]}),
    ):
        put = PutScores(worker=WorkerId("a"), ticket=a.playing.ticket, scores=[scores])
        reply = table.ask("a", put)
        assert isinstance(reply, Refusal)
        assert reply.code is Code.MALFORMED
    b = Player(table, "b")
    assert b.score(0, ticket=a.playing.ticket) is Code.STALE_LEASE if b.done else True


def test_the_version_of_an_evaluation_is_kept(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", evaluated(sums(every=3)))
    a = Player(table, "a")
    a.score()
    while table.interpreter.machine.version < 3:
        trains(table, a)
    table.silent("a")
    b = Seat(table, "b")  # plays no evaluation, and has every version
    for _ in range(4):
        table.after(31_000)
        trains(table, b)
    reply = table.ask("parameters", GetRetainedVersions())
    assert isinstance(reply, RetainedVersions)
    assert (0, 3) in reply.versions
    assert (0, 4) not in reply.versions
    table.close()


def test_a_rollback_ends_the_evaluation_of_an_abandoned_version(table: Table) -> None:
    a = Player(table, "a")
    a.score()
    for _ in range(2):
        a.report()
        trains(table, a)
    assert weights(a.playing) == (0, 2)
    table.roll_back(0)
    a.report()
    assert a.playing is None
    assert a.stats == msgspec.structs.replace(a.stats, lineage=Lineage(0), version=Version(0))


def test_a_restarted_scheduler_has_unfinished_evaluations_played_again(table: Table) -> None:
    a = Player(table, "a")
    assert a.playing is not None
    ticket = a.playing.ticket
    a.score(0)
    table.restart()
    a.report()
    assert a.playing is not None
    assert a.playing.ticket > ticket, "tickets of different incarnations differ"
    assert a.playing.prompts == [0, 1, 2, 3]
    a.score()
    table.restart()
    a.report()
    assert a.playing is None


def test_a_trained_run_ends_after_its_last_evaluation(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", evaluated(sums(), steps=1))
    a = Player(table, "a")
    a.score()
    trains(table, a)
    table.ask("trainer", Finished(trainer_term=table.term))
    status = table.status()
    assert (status["trained"], status["finished"]) == (True, False)
    assert status["why"] == (
        "training is over; the run ends after evaluation sums at version 1: 0 of 4 prompts scored, 1 workers"
    )
    table.restart()
    assert table.status()["trained"] is True
    a.report()
    assert weights(a.playing) == (0, 1)
    a.score()
    table.after(100)
    assert table.status()["finished"] is True
    table.close()


@pytest.mark.parametrize("end", ["failed", "drained", "without a worker"])
def test_a_run_that_ends_otherwise_waits_for_no_evaluation(tmp_path: Path, end: str) -> None:
    table = Table(tmp_path / "run", evaluated(sums(), steps=1))
    if end == "drained":
        a = Player(table, "a")
        table.ask("admin", Drain(why="enough"))
        a.report()
        assert a.playing is None
    table.ask("trainer", Finished(trainer_term=table.term, error="no" if end == "failed" else ""))
    if end == "without a worker":
        assert table.status()["finished"] is False
        table.after(WORKER_TIMEOUT_MS)
    table.after(100)
    assert table.status()["finished"] is True
    table.close()


def test_tokens_of_evaluations_do_not_count_as_generated_for_training(table: Table) -> None:
    a = Player(table, "a")
    for generated, of_evaluations in ((100, 0), (150, 0), (200, 120), (260, 120)):
        a.report(generated_tokens=generated, evaluated_tokens=of_evaluations)
    assert isinstance(a.stats, InstanceStats)
    assert table.status()["totals"]["tokens_generated"] == 150
