"""The learning benchmark evaluates finished runs correctly, and its tasks are sound."""

import pytest

from bench.learning import grid
from bench.learning_report import Run, breaks, drifts, final, full_window, gains, seconds, tables


def run(eta: int, correction: str, reward: list[float], *, seed: int = 0, lr: float = 1e-3) -> Run:
    key = {"task": "sort", "seed": seed, "eta": eta, "correction": correction, "bound": "trajectory", "lr": lr}
    names = ("off_policy/mean", "off_policy/max", "is_weight/ess", "masked", "masked/token")
    series = {name: [float(step) for step in range(6)] for name in names}
    times = {"time/write": [1.0] * 6, "time/train": [2.0] * 6}
    return {"key": key, "reward": reward, "series": series | times, "seconds": 1.0}


RUNS = [
    run(0, "none", [0.2, 0.8, 0.8, 0.8, 0.8]),
    run(0, "none", [0.2, 0.3, 0.3, 0.3, 0.3], seed=1),
    run(1, "none", [0.2, 0.75, 0.75, 0.75, 0.75]),
    run(2, "none", [0.2, 0.7, 0.7, 0.7, 0.7]),
    run(4, "none", [0.2, 0.9, 0.9, 0.9, 0.9]),
    run(1, "tis", [0.2, 0.9, 0.9, 0.9, 0.9]),
    run(4, "tis", [0.2, 0.8, 0.8, 0.8, 0.8]),
    run(4, "tis", [0.2, 0.2, 0.2, 0.2, 0.2], seed=1),
    run(0, "none", [0.2, 0.4, 0.4, 0.4, 0.4], lr=1e-4),
    run(2, "none", [0.2, 0.4, 0.4, 0.4, 0.4], lr=1e-4),
]


def test_a_run_is_compared_with_the_synchronous_one_of_its_seed_and_rate() -> None:
    """Each seed starts with its own model: 0.2 is low beside the first seed's 0.8, and close to the second's 0.3."""
    found = gains(RUNS)
    assert found["sort", 1e-3, "trajectory", 4, "tis"] == pytest.approx([0.0, -0.1])
    assert found["sort", 1e-4, "trajectory", 2, "none"] == pytest.approx([0.0])
    assert gains([run(1, "none", [0.5] * 5, seed=2)]) == {("sort", 1e-3, "trajectory", 1, "none"): []}


def test_a_correction_breaks_at_the_first_staleness_that_does_not_reach_the_synchronous_reward() -> None:
    """A loss of 0.05 is noise and a loss of 0.1 is not; results after a break do not repair it."""
    assert breaks(RUNS) == {
        ("sort", 1e-3, "trajectory", "none"): (1, 2),
        ("sort", 1e-3, "trajectory", "tis"): (4, None),
        ("sort", 1e-4, "trajectory", "none"): (2, None),
    }


def test_each_task_and_rate_has_a_table_with_a_row_a_choice_and_the_synchronous_one_first() -> None:
    lines = tables(RUNS).splitlines()
    titles = [place for place, line in enumerate(lines) if line.startswith("## ")]
    assert [lines[place] for place in titles] == ["## sort, learning rate 0.001", "## sort, learning rate 0.0001"]
    assert lines[titles[0] + 4].startswith("| - | 0 | synchronous | 2 | 0.20 | 0.550 ± 0.354 | - |")
    assert sum(line.startswith("| trajectory | ") for line in lines[titles[0] : titles[1]]) == 5
    assert lines[titles[1] + 5].startswith("| trajectory | 2 | none | 1 | 0.20 | 0.400 ± 0.000 | +0.000 ± 0.000 |")
    assert lines[titles[1] + 5].endswith("| 18 |")


def test_drift_is_the_mean_over_the_steps_that_trained_tokens_of_an_age() -> None:
    first = run(2, "tis", [0.2] * 5) | {"drift": {"mismatch_kl": [[0, 0.0], [1, 0.1], [2, 0.2], [2, 0.4]]}}
    second = run(1, "none", [0.2] * 5) | {"drift": {"mismatch_kl": [[1, 0.5]]}}
    assert drifts([first, second]).splitlines() == [
        "| metric | max_staleness | correction | age 0 | age 1 | age 2 |",
        "|---|---|---|---|---|---|",
        "| `mismatch_kl` | 1 | none |  | 0.500 |  |",
        "| `mismatch_kl` | 2 | tis | 0.000 | 0.100 | 0.300 |",
    ]
    assert "mismatch_kl" in tables([first])
    assert "mismatch_kl" not in tables(RUNS)


def test_time_is_turns_without_staleness_and_the_slower_one_with_it() -> None:
    assert seconds(RUNS[0])[-1] == 18.0
    assert seconds(RUNS[2])[-1] == 12.0


def test_a_full_window_begins_after_the_staleness_has_settled() -> None:
    assert full_window(RUNS[3], "is_weight/ess") == [3.0, 4.0, 5.0]
    assert full_window(RUNS[4] | {"key": RUNS[4]["key"] | {"eta": 9}}, "masked") == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert final(RUNS[0]) == pytest.approx(0.8)


def test_the_grid_runs_the_synchronous_choice_once_a_task_and_seed() -> None:
    keys = list(grid(["sort"], [0, 1], [1, 2, 4, 8], ["none", "tis"], ["trajectory", "token"]))
    assert len(keys) == 2 + 2 * 4 * 2 * 2
    assert [key["eta"] for key in keys].count(0) == 2


@pytest.mark.parametrize(("task", "answer"), [("complement", "6785"), ("rotate", "2143"), ("sort", "1234")])
def test_a_task_has_one_answer(task: str, answer: str) -> None:
    from bench.learning_task import Row, reward
    from bench.learning_task import answer as answer_of

    assert answer_of(task, "3214") == answer
    assert reward(answer, Row(prompt="3214=", answer=answer)) == 1.0
    assert reward(answer + "0", Row(prompt="3214=", answer=answer)) == 0.0
