"""The streaming benchmark compares equal workloads; in virtual time it reaches its target at every bound."""

from bench.streaming import BOUNDS, TARGET, rows


def test_streaming_hides_the_trainers_time_in_virtual_time() -> None:
    found = rows(("trainer.steps=16",), seeds=2, real_time=False)
    assert [(row.max_staleness, row.time) for row in found] == [(eta, "virtual") for eta in BOUNDS]
    for row in found:
        assert row.gain >= TARGET, row
        assert row.streamed <= 60.0 / row.step_s, "no faster than a trainer that never waits"
