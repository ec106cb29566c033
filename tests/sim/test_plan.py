"""``staleflow plan`` measures a run from its trace, simulates candidate settings, and keeps the best of them."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from staleflow.cli.main import main
from staleflow.cli.plan import show as show_front
from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config, Prompts, Reward, Rollout, Staleness
from staleflow.configs.simulation import Simulated, Simulation
from staleflow.configs.trainer import Trainer
from staleflow.sim import plan as searched
from staleflow.sim.measured import measure
from staleflow.sim.peers.compare import changed
from staleflow.sim.plan import Choice, front, picks, plan, splits
from staleflow.sim.simulate import simulate
from tests.report.traces import PLAIN, save


def config(*, steps: int = 12, mean_tokens: float = 100.0) -> Config:
    return Config(
        name="planned",
        prompts=Prompts(source="nobody:opens"),
        reward=Reward(run="nobody:calls"),
        staleness=Staleness(max_staleness=1),
        rollout=Rollout(
            engine="simulated",
            group_size=2,
            workers=3,
            max_inflight=32,
            max_new_tokens=1000,
            filter="none",
            simulated=Simulated(mean_tokens=mean_tokens, k1=0.0, k2=0.01, k3=0.0),
        ),
        trainer=Trainer(backend="simulated", batch_size=4, steps=steps, simulated_step_s=1.5),
        simulation=Simulation(reward_s=0.25, pull_s=0.5),
    )


def test_a_trace_says_how_long_everything_took_and_the_run_can_be_simulated_again(tmp_path: Path) -> None:
    first = simulate(config(), run_dir=tmp_path)
    found = measure(tmp_path / "trace.jsonl")
    assert found.engines == 3
    assert found.train_s == pytest.approx(1.5, abs=0.01)
    assert found.stages_s == pytest.approx(0.25, abs=0.01)
    assert found.pull_s == pytest.approx(0.5, abs=0.01)
    assert 0.01 <= found.token_s < 0.03  # a group takes as long as the longer of its two trajectories
    assert sum(found.lengths) / len(found.lengths) == pytest.approx(sum(first.drawn) / len(first.drawn), rel=0.15)
    again = simulate(changed(config(), found.overrides(tmp_path / "lengths.jsonl")))
    assert again.steps_per_min == pytest.approx(first.steps_per_min, rel=0.25)


def test_a_run_that_streamed_says_how_long_its_trainer_computed_in_its_metrics(tmp_path: Path) -> None:
    streamed = changed(config(), ("trainer.streaming=true", "staleness.max_staleness=0"))
    first = simulate(streamed, run_dir=tmp_path)
    found = measure(tmp_path / "trace.jsonl")
    assert found.train_s == pytest.approx(1.5, abs=0.01)
    again = simulate(changed(streamed, found.overrides(tmp_path / "lengths.jsonl")))
    assert again.steps_per_min == pytest.approx(first.steps_per_min, rel=0.25)
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"needs its metrics\.jsonl beside its trace"):
        measure(tmp_path / "trace.jsonl")


def test_a_trace_that_says_nothing_is_refused_by_name(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with pytest.raises(ConfigError, match="cannot be read"):
        measure(trace)
    trace.write_text('{"ev": "push", "m": 1}\n')
    with pytest.raises(ConfigError, match=r"line 1 is not an event: .*missing required field"):
        measure(trace)
    trace.write_text("{\n")
    with pytest.raises(ConfigError, match="line 1 is not JSON"):
        measure(trace)
    save(tmp_path, PLAIN[:1])
    with pytest.raises(ConfigError, match="trained a step"):
        measure(trace)


def test_a_trainer_that_takes_no_time_limits_no_choice() -> None:
    at_once = changed(config(), ("trainer.simulated_step_s=0",))
    found = msgspec.json.decode(msgspec.json.encode(simulate(at_once).summary()))
    assert (found["trainer_limit"], searched.choice((), found).of_limit) == (0.0, 0.0)
    assert searched.choice((), found).steps_per_min > 0


def one(steps_per_min: float, staleness_mean: float, waste: float) -> Choice:
    return Choice(
        overrides=(),
        steps_per_min=steps_per_min,
        of_limit=1.0,
        staleness_mean=staleness_mean,
        staleness_max=2,
        waste=waste,
        length_bias=1.0,
    )


def test_the_front_has_what_nothing_else_beats_fastest_first() -> None:
    fast, fresh, thrifty = one(3.0, 2.0, 0.5), one(1.0, 0.0, 0.5), one(1.0, 2.0, 0.0)
    beaten = one(2.9, 2.0, 0.5)
    assert front([thrifty, beaten, fresh, fast, fast]) == [fast, fresh, thrifty]


def test_devices_are_split_into_engines_and_ranks_that_share_the_trainers_work() -> None:
    found = splits(config(), 8)
    assert found[0] == ("rollout.workers=7", "trainer.simulated_step_s=1.5")
    assert ("rollout.workers=4", "trainer.simulated_step_s=0.375") in found
    with pytest.raises(ConfigError, match="more than the trainer's own 1"):
        splits(config(), 1)


def test_a_plan_is_slower_where_it_is_fresher_and_keeps_every_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searched, "SHORT_STEPS", 10)
    monkeypatch.setattr(searched, "LONG_STEPS", 15)
    found = front(list(plan(config(), [0, 2], jobs=2)))
    assert len(found) > 1
    for faster, slower in itertools.pairwise(found):
        assert faster.steps_per_min > slower.steps_per_min or faster.staleness_mean <= slower.staleness_mean
    by_eta = {"staleness.max_staleness=0": 0, "staleness.max_staleness=2": 2}
    for choice in found:
        bound = next(eta for override, eta in by_eta.items() if override in choice.overrides)
        assert choice.staleness_max <= bound
        assert math.isfinite(choice.steps_per_min)


@pytest.mark.parametrize("etas", ["one", "-1", "1,,2", ""])
def test_values_of_max_staleness_that_are_none_are_refused(etas: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "configs/simulated.toml", "--etas", etas]) == 2
    assert "--etas" in capsys.readouterr().err


def test_a_choice_is_printed_with_the_lines_that_change_something(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate(config(), run_dir=tmp_path)
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config()))
    assert main(["plan", str(tmp_path), "--etas", "0", "--jobs", "2"]) == 0
    said = capsys.readouterr().out
    assert "staleness.max_staleness=0" in said
    assert "simulated_step_s" not in said


def test_whoever_waits_for_a_plan_hears_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def one(file: Path, overrides: tuple[str, ...], steps: int) -> Choice:
        return Choice(
            overrides=overrides,
            steps_per_min=1.0,
            of_limit=1.0,
            staleness_mean=0.0,
            staleness_max=0,
            waste=0.0,
            length_bias=1.0,
        )

    monkeypatch.setattr(searched, "_one", one)
    heard: list[tuple[int, int]] = []
    found = list(plan(config(), [0, 1], on_progress=lambda done, of: heard.append((done, of))))
    done = [part for part, _ in heard]
    first = 7 * searched.SHORT_STEPS  # one candidate at bound 0, six at bound 1
    assert done == sorted(done)
    assert heard[6] == (first, 2 * first)
    assert heard[-1] == (first + len(found) * searched.LONG_STEPS,) * 2


def chosen(steps_per_min: float, staleness: float, waste: float = 0.0, *overrides: str) -> Choice:
    return Choice(
        overrides=overrides,
        steps_per_min=steps_per_min,
        of_limit=steps_per_min / 100,
        staleness_mean=staleness,
        staleness_max=4,
        waste=waste,
        length_bias=1.0,
    )


FRONT = [
    chosen(100.0, 4.0, 0.0, "staleness.max_staleness=4", "staleness.on_overdue=wait"),
    chosen(99.0, 1.5, 0.9, "staleness.max_staleness=3"),
    chosen(95.0, 1.0, 0.0, "staleness.max_staleness=2", "coordination.admission=fill"),
    chosen(40.0, 0.1, 0.0, "staleness.max_staleness=1"),
    chosen(10.0, 0.0, 0.0, "staleness.max_staleness=0"),
]


def test_three_of_a_front_are_picked_and_the_knee_is_near_to_all_that_is_good() -> None:
    assert picks(FRONT) == {"freshest": FRONT[4], "knee": FRONT[2], "fastest": FRONT[0]}
    assert picks(FRONT[:1]) == dict.fromkeys(("freshest", "knee", "fastest"), FRONT[0])


def test_of_a_limit_that_is_none_no_share_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    show_front([replace(FRONT[0], of_limit=0.0)], config(), None)
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("│ 1 "))
    assert [cell.strip() for cell in row.split("│")[2:4]] == ["100.000", "-"]


def test_the_picks_are_marked_and_their_lines_stand_below_in_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    show_front(FRONT, config(), None)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    rows = [line for line in out.splitlines() if line.startswith("│")]
    assert [line.split("│")[-2].strip() for line in rows][-5:] == ["fastest", "", "knee", "", "freshest"]
    knee = out.partition("\nknee (3): ")[2].partition("\n\n")[0].splitlines()
    assert knee[0].endswith("the default choice")
    assert knee[1:] == ["  staleness.max_staleness=2", "  coordination.admission=fill"]
