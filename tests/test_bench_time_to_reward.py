"""A campaign of times to a reward continues where it stopped, and its table is correct."""

from pathlib import Path

import msgspec

from bench.time_to_reward import Result, missing, read, rows


def result(way: str, seed: int, *rewards: float, workload: str = "smollm2") -> Result:
    """A run that was evaluated every 3 steps, of 10 s each."""
    curve = [(3 * place, 30.0 * place, reward) for place, reward in enumerate(rewards)]
    return Result(workload=workload, seed=seed, way=way, curve=curve, load=1.0, processor_s=50.0, age=1.5)


def test_a_file_has_one_result_a_line_and_the_last_may_be_cut_off(tmp_path: Path) -> None:
    first, second = result("TRL", 0, 0.1, 0.5), result("eta-2", 0, 0.1, 0.4)
    file = tmp_path / "runs.jsonl"
    file.write_bytes(msgspec.json.encode(first) + b"\n" + msgspec.json.encode(second) + b"\n" + b'{"workload": "smo')
    assert read(file) == [first, second]
    assert read(tmp_path / "none") == []
    file.write_bytes(msgspec.json.encode([first, second]))  # the form of earlier files
    assert read(file) == [first, second]


def test_a_ratio_is_to_the_base_of_the_same_seed_and_a_mean_needs_all_seeds() -> None:
    results = [
        *(result("synchronous", 0, 0.1, 0.2, 0.4), result("synchronous", 1, 0.1, 0.3)),
        *(result("eta-2", 0, 0.1, 0.3), result("eta-2", 1, 0.1, 0.5)),
        *(result("eta-4", 0, 0.1, 0.2), result("eta-4", 1, 0.1, 0.3)),
    ]
    cells = {row[1:3]: (row[3], row[-1]) for row in rows(results, {"smollm2": 0.3}, "synchronous")}
    assert cells["0", "synchronous"] == ("45 (0.3)", "")
    assert cells["0", "eta-2"] == ("30 (0.3)", "1.50")
    assert cells["1", "eta-2"] == ("15 (0.3)", "2.00")
    assert cells["0", "eta-4"] == ("not reached (0.3)", "")
    assert cells["mean", "synchronous / eta-2"][1] == "1.67"
    assert ("mean", "synchronous / eta-4") not in cells


def test_finished_runs_are_not_repeated() -> None:
    finished = [result("TRL", 0, 0.1), result("eta-2", 1, 0.1)]
    every = [("smollm2", seed, way) for seed in (0, 1) for way in ("TRL", "eta-2")]
    assert missing([], ["smollm2"], range(2), ["TRL", "eta-2"], []) == every
    left = missing(finished, ["smollm2"], range(2), ["TRL", "eta-2"], [])
    assert left == [("smollm2", 0, "eta-2"), ("smollm2", 1, "TRL")]
    assert missing(finished, ["smollm2"], range(2), ["TRL", "eta-2"], ["trainer.lr=1e-5"]) == every
