"""``staleflow simulate`` prints one table or JSON, gives the same result for the same seed, and can keep its trace."""

import json
import sys
from pathlib import Path

import pytest

from staleflow.cli.main import main
from staleflow.configs.schema import Config
from tests.cli.conftest import SIMULATED, Cli

ONE = ("simulate", SIMULATED, "--steps", 6)


def test_the_table_says_how_fast_how_stale_and_at_what_price(cli: Cli) -> None:
    said = cli(*ONE)
    assert (said.code, said.err, said.left) == (0, "", [])
    lines = said.out.splitlines()
    assert "simulated: 6 steps in " in lines[0]
    for measure in ("steps a minute", "of the trainer's limit", "violations of the audit", "tokens masked"):
        assert sum(measure in line for line in lines) == 1
    assert max(map(len, lines)) <= 80


def test_a_picture_that_nobody_can_draw_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[object] = []

    def simulate(config: Config, **_: object) -> None:
        ran.append(config)

    monkeypatch.setattr("staleflow.sim.simulate.simulate", simulate)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*map(str, ONE), "--plot", str(tmp_path / "tail")]) == 2
    assert f'--plot is "{tmp_path / "tail"}"; it needs matplotlib: ' in capsys.readouterr().err
    assert ran == []


def test_a_seed_is_a_run(cli: Cli) -> None:
    first, again, other = (json.loads(cli(*ONE, "--json", "--seed", seed).out) for seed in (3, 3, 4))
    assert first == again
    assert first["trace_hash"] != other["trace_hash"]
    assert (first["violations"], len(first["steps"])) == (0, 6)


def test_the_trace_is_kept_and_passes_the_audit_of_its_own_command(cli: Cli, short_dir: Path) -> None:
    assert cli(*ONE, "--trace", "kept").left == ["kept"]
    assert sorted(path.name for path in (short_dir / "kept").iterdir()) == ["metrics.jsonl", "trace.jsonl"]
    assert cli("trace", "check", "kept").code == 0
    again = cli(*ONE, "--trace", "kept")
    assert (again.code, again.out) == (2, "")
    assert again.err == 'staleflow: trace directory is "kept"; it has a trace.jsonl already: another directory\n'


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("rollout.simulated.k2=0", "rollout.simulated.k3=0"),
            "a step of an engine of speed 1 would last 0 s: above 0",
        ),
        (("rollout.simulated.lengths=trace", "rollout.simulated.trace=none.jsonl"), "no such file"),
        (
            ("simulation.events=[{at_s=1.0,engine=9,what='crash'}]",),
            "simulation.events.engine is 9; engines are 0 to 1",
        ),
    ],
)
def test_what_cannot_be_simulated_is_one_line(cli: Cli, words: tuple[str, ...], said: str) -> None:
    refused = cli(*ONE, *words)
    assert (refused.code, refused.out, refused.left) == (2, "", [])
    assert said in refused.err
    assert refused.err.count("\n") == 1


def test_a_run_that_stands_still_says_what_it_waits_for(cli: Cli) -> None:
    gone = "simulation.events=[{at_s=0.1,engine=0,what='crash'},{at_s=0.1,engine=1,what='crash'}]"
    stalled = cli(*ONE, gone)
    assert (stalled.code, stalled.out) == (1, "")
    assert stalled.err.endswith("of virtual time: no rollout worker is attached\n")
