"""The sentences of the page match the run."""

import re

import pytest

from staleflow.configs.errors import MISSING
from staleflow.configs.schema import Config, Prompts, Reward, Stage
from staleflow.configs.trainer import Trainer
from staleflow.report import sections
from staleflow.report.curves import Curves
from staleflow.report.facts import Facts, Spent
from staleflow.report.settings import changes
from staleflow.trace.audit.report import AuditReport, Violation
from staleflow.trace.audit.state import Rule
from tests.report.traces import PLAIN, SECOND, event, opened, publish, read


def facts(**changed: object) -> Facts:
    found = read(PLAIN)
    for name, value in changed.items():
        setattr(found, name, value)
    return found


def test_the_verdict_names_the_oldest_and_the_bound() -> None:
    kept, words = sections.verdict(facts(), AuditReport(lines=22))
    assert (kept, words) == (
        True,
        "The bound was kept: of 2 trained groups the oldest was 1 version old, the bound is 2. "
        "The audit found no violation in 22 events.",
    )
    assert "no trained token was older than 2 versions" in sections.verdict(facts(bound="token"), AuditReport())[1]
    assert (
        sections.verdict(Facts(), AuditReport(lines=3))[1]
        == "No step was trained yet; the audit found no violation in 3 events."
    )


def test_a_violation_is_the_verdict() -> None:
    found = AuditReport(lines=22, num_violations=2, violations=[Violation(Rule.I1, 9, "group 4 is 3 versions old")])
    kept, words = sections.verdict(facts(), found)
    assert not kept
    assert words == "2 violations in 22 events. The first, at line 9: group 4 is 3 versions old."


def test_waits_are_told_longest_first_with_what_came_last() -> None:
    assert sections.waits_words(facts()) == "For 7.0 s, 70 % of the time, the trainer had no complete batch to work on."
    assert [row["waited"] for row in sections.wait_rows(facts())] == ["4.00 s", "3.00 s"]
    assert sections.wait_rows(facts())[1]["text"] == "group 2 of version 0 from rollout-0, 3.00 s on its way"


@pytest.mark.parametrize("night_s", [8 * 3600, 10**6, -100], ids=["a night", "another boot", "a younger boot"])
def test_the_time_between_two_incarnations_is_in_no_rate(night_s: int) -> None:
    later = [one | {"m": one["m"] + night_s * SECOND} for one in [opened(7, 2, version=1), *PLAIN[12:]]]
    found = read([*PLAIN[:12], *later])
    assert sections.waits_words(found) == sections.waits_words(facts())
    config = Config(prompts=Prompts(path="p.jsonl"), reward=Reward(run="r:f"))
    tiles = {tile.label: tile.value for tile in sections.tiles(found, Curves([]), config, 0)}
    assert (tiles["tokens/s trained"], tiles["trainer waited"], tiles["time"]) == ("2", "70 %", "0:12")


def test_a_trace_without_the_first_weights_is_counted_from_its_first_line() -> None:
    lacking = facts(versions=[])
    assert sections.waits_words(lacking).startswith("For 7.0 s, 64 % of the time")
    config = Config(prompts=Prompts(path="p.jsonl"), reward=Reward(run="r:f"))
    assert "64 %" in [tile.value for tile in sections.tiles(lacking, Curves([]), config, 0)]


def test_every_token_that_was_not_trained_has_its_row() -> None:
    spent = facts(
        released={"expired": Spent(2, 30)}, dropped={"quarantine": Spent(1, 10)}, undone_steps=1, undone_tokens=5
    )
    rows = [(row.name, row.groups, row.tokens, row.share) for row in sections.waste_meters(spent, 100)]
    assert rows == [
        ("trained", "2", "20", 20),
        ("rolled back", "", "5", 5),
        ("expired", "2", "30", 30),
        ("dropped, quarantine", "1", "10", 10),
    ]
    assert sections.waste_words(spent, 100).endswith("20 % were trained.")


def test_the_last_word_on_a_step_counts_and_what_never_moves_has_no_chart() -> None:
    curves = Curves(
        [
            {"step": 1, "t": 5.0, "loss": 0.5, "lr": 0.1},
            {"step": 0, "t": 4.0, "loss": 0.9, "lr": 0.1},
            {"step": 1, "t": 9.0, "loss": 0.4, "my/score": None},
        ]
    )
    assert (curves.steps, curves.values("loss"), curves.names) == ([0, 1], [0.9, 0.4], ["loss", "lr"])
    assert [chart.title for chart in curves.group([("Loss", ("loss",)), ("Rate", ("lr",))])] == ["Loss"]


def test_a_curve_ends_with_the_steps_that_a_rollback_left() -> None:
    said = [
        *({"step": step, "lineage": 0, "reward/mean": 0.25, "loss": float(step)} for step in range(21)),
        {"step": 9, "lineage": 1, "reward/eval": 0.5},
        *({"step": step, "lineage": 1, "reward/mean": 0.75, "loss": 9.0} for step in (10, 11)),
    ]
    curves = Curves(said)
    assert curves.steps == list(range(12))
    assert (curves.measured("loss")[-3:], curves.measured("reward/eval")) == ([9.0, 9.0, 9.0], [0.5])
    said = [line for line in said if "reward/eval" not in line]
    config = Config(prompts=Prompts(path="p.jsonl"), reward=Reward(run="r:f"))
    tiles = {tile.label: tile.value for tile in sections.tiles(facts(), Curves(said), config, 0)}
    assert tiles["reward"] == "0.25 → 0.75"


def test_the_chart_of_versions_is_that_of_the_history_that_survived() -> None:
    loads = [
        event("pull", 12 + version / 10, worker="rollout-0.aa", lineage=0, version=version, ok=True)
        for version in (1, 2)
    ]
    back = [event("rollback", 13, lineage=1, from_lineage=0, to_version=1), publish(14, 2, lineage=1)]
    late = [event("pull", 15, worker="rollout-0.aa", lineage=1, version=2, ok=True)]
    [chart] = sections.version_charts(read([*PLAIN[:-1], *loads, *back, *late]))
    assert chart.hover["x"] == [0, 1, 2]
    numbers = [float(number) for path in chart.paths for number in re.findall(r"[-\d.]+", path.d)]
    assert all(0 <= number <= 1000 for number in numbers)


def test_what_differs_from_the_defaults_is_shown_and_secrets_are_not() -> None:
    stage = Stage(name="judge", run="a:b", makes=["x"], options={"api_key": "sk-1", "model": "m"})
    config = Config(prompts=Prompts(path="p.jsonl"), reward=Reward(run="r:f"), trainer=Trainer(steps=3), stage=[stage])
    found = {key: (value, default) for key, value, default in changes(config)}
    assert found["trainer.steps"] == (3, 100)
    assert set(found) == {"prompts.path", "reward.run", "trainer.steps", "stage"}
    assert "sk-1" not in str(found)
    assert "(not shown)" in str(found["stage"])
    options = Config(prompts=Prompts(options={"n": 1}), reward=Reward(run="r:f"))
    assert ("prompts.options.n", 1, MISSING) in changes(options)


def test_a_time_has_its_units_beside_its_numbers() -> None:
    said = [sections.duration(seconds) for seconds in (12.34, 59.99, 227.5, 3600.0, 3725.0)]
    assert said == ["12.3 s", "60.0 s", "3 min 47 s", "1 h 0 min", "1 h 2 min"]
