"""``staleflow plan --graph`` prints the stages of a configuration as text and as a diagram."""

import io
import sys
from pathlib import Path

import pytest

from staleflow.cli.graph import text
from staleflow.cli.main import main
from staleflow.configs.loading.load import load
from tests.cli.conftest import Cli

STAGES = Path(__file__).parent.parent.parent / "configs" / "stages.toml"


def test_the_graph_says_what_works_at_the_same_time_and_what_flows(cli: Cli) -> None:
    said = cli("plan", STAGES, "--graph", "rollout.filter=none")
    assert (said.code, said.err) == (0, "")
    lines = said.out.splitlines()
    assert lines[0] == "push → length + repeats → reward → credit → train"
    assert [line.split("  ")[0] for line in lines[2:]] == ["length", "repeats", "reward", "credit"]
    assert "after length, repeats  makes reward/reward" in lines[4]
    assert "makes repeats/share, repeats/seen (a token)  2 workers, 4 groups at once (1024 of an async def)" in lines[3]
    assert lines[3].endswith("at most 20 s each")


def test_a_letter_that_the_output_lacks_is_a_question_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "latin-1"))
    assert main(["plan", str(STAGES), "--graph", "rollout.filter=none"]) == 0
    assert written.getvalue().splitlines()[0] == b"push ? length + repeats ? reward ? credit ? train"


@pytest.mark.parametrize(("advantage", "said"), [("grpo", True), ("reinforce_pp", False)])
def test_the_filter_is_named_where_the_advantage_asks_for_it(advantage: str, *, said: bool) -> None:
    told = text(load(STAGES, [f"trainer.algorithm.advantage={advantage}"]))
    assert told.endswith("after the reward, zero_spread releases groups whose rewards are equal") == said


def test_the_diagram_has_an_arrow_for_each_stage_that_another_waits_for(cli: Cli) -> None:
    assert cli("plan", STAGES, "--mermaid").out.splitlines() == [
        "flowchart LR",
        "    push --> length",
        "    push --> repeats",
        '    length -- "closeness" --> reward',
        '    repeats -- "share" --> reward',
        '    reward -- "reward" --> credit',
        '    repeats -- "seen" --> credit',
        "    credit --> train",
        "    reward{{reward}}",
    ]


def test_a_circle_is_refused_with_its_path(cli: Cli) -> None:
    said = cli("plan", STAGES, "--graph", "reward.needs=['credit/weights']")
    assert (said.code, said.out) == (2, "")
    refusal = 'reward.needs is "credit/weights"; it has a value a token; the reward takes columns of one a sample'
    assert said.err == f"staleflow: {refusal}\n"
    circle = "stage=[{name='a',run='m:f',needs=['b/x'],makes=['x']},{name='b',run='m:f',needs=['a/x'],makes=['x']}]"
    said = cli("plan", STAGES, "--graph", "reward.needs=[]", circle)
    assert said.err == 'staleflow: stage[0].needs is "b/x"; stages wait for each other in a circle: a → b → a\n'
