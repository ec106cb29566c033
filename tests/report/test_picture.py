"""``staleflow trace plot`` draws its picture."""

from pathlib import Path

from staleflow.monitor.lanes import Lane, Span
from staleflow.report.facts import Facts
from staleflow.report.picture import picture


def test_of_many_engines_some_are_left_out_and_never_a_stage_or_the_trainer(tmp_path: Path) -> None:
    kinds = [("engine", f"rollout-{number}") for number in range(70)]
    kinds += [("judge", "judge-0"), ("trainer", "the-trainer")]
    path = tmp_path / "lanes.svg"
    picture([Lane(kind, name, [Span(0, 1)]) for kind, name in kinds], Facts(run="r"), path, window_s=(0, 1))
    drawn = path.read_text()
    assert "judge-0" in drawn
    assert "the-trainer" in drawn
    assert "rollout-61" in drawn
    assert "rollout-62" not in drawn
    assert "8 more are not shown" in drawn
