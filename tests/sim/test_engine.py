"""The simulated engine is exact to the step, also under interrupts, queueing, weight loads and a full cache."""

import random
from collections.abc import Callable

import pytest

from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.sim.cost import StepCost
from staleflow.sim.engine import EngineFull, EngineState, OnUpdate, SimEngine
from staleflow.sim.sample import Sample
from staleflow.sim.timeline import Timeline
from tests.sim.naive_engine import NaiveEngine, NaiveSample

SECOND = StepCost(k1=0.0, k2=1.0, k3=0.0, k4=0.0)
"""Every step takes one second."""


class Watched:
    """An engine and the finish time of each of its samples."""

    def __init__(
        self, cost: StepCost = SECOND, *, slots: int = 4, kv_capacity: int = 0, on_update: OnUpdate = "keep"
    ) -> None:
        self.timeline = Timeline()
        self.out: dict[int, float] = {}
        self.engine = SimEngine(
            self.timeline, cost, slots=slots, kv_capacity=kv_capacity, on_update=on_update, on_end=self._ended
        )

    def _ended(self, sample: Sample) -> None:
        self.out[sample.id] = self.timeline.now_s

    def run(self) -> dict[int, float]:
        self.timeline.run(lambda: False)
        return self.out


def versions(sample: Sample) -> list[int]:
    """Version of each token."""
    return [int(segment.version) for segment in sample.segments for _ in range(segment.tokens)]


# --- against single steps --------------------------------------------------------------------------------------------


def case(seed: int) -> tuple[StepCost, int, int, OnUpdate, list[tuple[float, str, int]], list[NaiveSample]]:
    """A random engine and its requests: (second, method, sample or version)."""
    draw = random.Random(seed)
    cost = StepCost(
        k1=draw.choice([0.0, 0.001, 0.02]),
        k2=draw.uniform(0.1, 2.0),
        k3=draw.choice([0.0, 0.3]),
        k4=draw.uniform(0.0, 0.5),
        prefill_s=draw.choice([0.0, 0.01]),
    )
    samples = [
        NaiveSample(
            id=id,
            prompt=draw.randint(0, 5),
            turns=[draw.randint(1, 12) for _ in range(draw.choice([1, 1, 3]))],
            tools=[draw.uniform(0.0, 9.0), draw.uniform(0.0, 9.0)],
        )
        for id in range(draw.randint(1, 14))
    ]
    asked: list[tuple[float, str, int]] = []
    for sample in samples:
        begin_s = draw.uniform(0.0, 40.0)
        asked.append((begin_s, "submit", sample.id))
        if draw.random() < 0.4:
            asked.append(
                (begin_s + draw.uniform(0.0, 40.0), draw.choice(["interrupt", "withdraw", "abort"]), sample.id)
            )
    asked += [(draw.uniform(0.0, 60.0), "load", version) for version in range(draw.randint(0, 4))]
    most = max(sample.prompt + sum(sample.turns) for sample in samples)
    kv_capacity = draw.choice([0, most, 2 * most])
    on_update: OnUpdate = draw.choice(["keep", "keep", "recompute", "drain"])
    return cost, draw.randint(1, 5), kv_capacity, on_update, sorted(asked), samples


def pause_s(version: int) -> float:
    return 0.7 * version


def asks(engine: SimEngine, what: str, number: int, samples: list[Sample]) -> Callable[[], object]:
    """Return a callable that sends one request to an engine."""
    if what == "load":
        return lambda: engine.load(Lineage(0), Version(number), pause_s(number))
    return lambda: getattr(engine, what)(samples[number])


@pytest.mark.parametrize("first", range(0, 2000, 500))
def test_the_engine_agrees_with_a_loop_over_single_steps(first: int) -> None:
    for seed in range(first, first + 500):
        cost, slots, kv_capacity, on_update, asked, plain = case(seed)
        naive = NaiveEngine(cost, slots=slots, kv_capacity=kv_capacity, on_update=on_update)
        naive.run([(s, what, plain[n] if what != "load" else (n, pause_s(n))) for s, what, n in asked])
        watched = Watched(cost, slots=slots, kv_capacity=kv_capacity, on_update=on_update)
        engine = watched.engine
        samples = [Sample(p.id, p.prompt, tuple(p.turns), tuple(p.tools[: len(p.turns) - 1])) for p in plain]
        for when_s, what, number in asked:
            watched.timeline.at(when_s, asks(engine, what, number, samples))
        out = watched.run()
        assert [versions(sample) for sample in samples] == [sample.versions for sample in plain], f"seed {seed}"
        expected = {sample.id: sample.ended_s for sample in plain if sample.fate != "aborted"}
        assert out == pytest.approx(expected, abs=1e-6), f"seed {seed}"
        seen = engine.state()
        assert (seen.running, seen.waiting, seen.kv_tokens) == (0, 0, 0), f"seed {seed}"
        assert (seen.generated, seen.preempted) == (naive.generated, naive.preempted), f"seed {seed}"


# --- one thing at a time ---------------------------------------------------------------------------------------------


def test_samples_beyond_the_slots_wait_their_turn() -> None:
    watched = Watched(slots=2)
    for id, tokens in enumerate((3, 5, 4)):
        watched.engine.submit(Sample(id, 0, (tokens,)))
    assert watched.run() == {0: 3.0, 1: 5.0, 2: 7.0}
    assert watched.engine.changes == [(0.0, 2), (5.0, 1), (7.0, 0)]


def test_a_step_lasts_what_the_cost_model_says() -> None:
    watched = Watched(StepCost(k1=0.01, k2=0.5, k3=0.2, k4=0.1))
    for id in range(3):
        watched.engine.submit(Sample(id, 10, (2,)))
    first, second = 0.01 * 30 + 0.6 + 0.1, 0.01 * 33 + 0.6 + 0.1
    assert watched.run() == pytest.approx(dict.fromkeys(range(3), first + second))


def test_a_sample_that_comes_in_the_middle_of_a_step_joins_at_the_next() -> None:
    watched = Watched()
    watched.engine.submit(Sample(0, 0, (10,)))
    watched.timeline.at(2.5, lambda: watched.engine.submit(Sample(1, 0, (2,))))
    assert watched.run() == {1: 5.0, 0: 10.0}


def test_an_interrupt_keeps_the_tokens_of_the_step_that_it_fell_into() -> None:
    watched, sample = Watched(), Sample(0, 0, (10,))
    watched.engine.submit(sample)
    watched.timeline.at(2.5, lambda: watched.engine.interrupt(sample))
    assert (watched.run(), sample.written, sample.truncated) == ({0: 3.0}, 3, True)


def test_an_interrupted_sample_that_waits_is_next_and_over_after_one_token() -> None:
    watched, last = Watched(slots=1), Sample(2, 0, (9,))
    for sample in (Sample(0, 0, (4,)), Sample(1, 0, (4,)), last):
        watched.engine.submit(sample)
    watched.timeline.at(1.5, lambda: watched.engine.interrupt(last))
    assert (watched.run(), last.written) == ({0: 4.0, 2: 5.0, 1: 9.0}, 1)


def test_an_aborted_sample_comes_out_nowhere_and_frees_its_slot() -> None:
    watched, sample = Watched(slots=1), Sample(0, 0, (10,))
    watched.engine.submit(sample)
    watched.engine.submit(Sample(1, 0, (3,)))
    watched.timeline.at(2.5, lambda: watched.engine.abort(sample))
    assert watched.run() == {1: 6.0}
    assert watched.engine.state().generated == 6


def test_a_withdrawn_sample_goes_on_at_another_engine_with_what_it_has() -> None:
    here, sample = Watched(), Sample(0, 0, (10,))
    there = SimEngine(here.timeline, SECOND, slots=1, on_end=lambda over: here.out.update({10: here.timeline.now_s}))
    here.engine.load(Lineage(0), Version(1), 0.0)
    there.load(Lineage(0), Version(2), 0.0)
    here.engine.submit(sample)
    here.timeline.at(3.5, lambda: here.engine.withdraw(sample))
    here.timeline.at(6.0, lambda: there.submit(sample))
    assert here.run() == {0: 4.0, 10: 12.0}
    assert versions(sample) == [1] * 4 + [2] * 6


def test_new_weights_pause_the_engine_and_open_a_segment() -> None:
    watched, sample = Watched(), Sample(0, 0, (6,))
    watched.engine.load(Lineage(0), Version(0), 0.0)
    watched.engine.submit(sample)
    watched.timeline.at(1.5, lambda: watched.engine.load(Lineage(0), Version(1), 10.0))
    assert (watched.run(), versions(sample)) == ({0: 16.0}, [0, 0, 1, 1, 1, 1])
    assert watched.engine.loads == [(0.0, 0.0, 0), (2.0, 12.0, 1)]


def test_drain_lets_what_runs_end_before_it_loads_and_nothing_join_before_it_has() -> None:
    watched = Watched(slots=2, on_update="drain")
    second = Sample(1, 0, (2,))
    watched.engine.submit(Sample(0, 0, (6,)))
    watched.timeline.at(1.5, lambda: watched.engine.load(Lineage(0), Version(1), 1.0))
    watched.timeline.at(2.5, lambda: watched.engine.submit(second))
    assert (watched.run(), versions(second)) == ({0: 6.0, 1: 9.0}, [1, 1])


def test_a_full_cache_sends_the_newest_back_and_reads_it_in_again_later() -> None:
    watched = Watched(StepCost(k1=0.0, k2=1.0, k3=0.0, k4=0.0, prefill_s=0.1), slots=2, kv_capacity=12)
    watched.engine.submit(Sample(0, 0, (8,)))
    watched.engine.submit(Sample(1, 0, (7,)))
    # both run until they store 6 + 6 tokens; the older ends at 8 s; the other prefills 6 tokens and writes one more
    assert watched.run() == pytest.approx({0: 8.0, 1: 8.0 + 0.6 + 1.0})
    assert watched.engine.state().preempted == 1


def test_a_sample_that_never_fits_is_refused() -> None:
    with pytest.raises(EngineFull, match="a sample of 11 tokens does not fit into a KV cache of 10"):
        Watched(kv_capacity=10).engine.submit(Sample(0, 3, (8,)))


def test_between_two_turns_a_sample_is_at_its_tool_and_its_slot_is_free() -> None:
    watched = Watched(slots=1)
    watched.engine.submit(Sample(0, 0, (2, 3), (4.0,)))
    watched.engine.submit(Sample(1, 0, (3,)))
    assert watched.run() == {1: 5.0, 0: 9.0}


def test_an_engine_that_hangs_goes_on_where_it_stood() -> None:
    watched = Watched()
    watched.engine.submit(Sample(0, 0, (4,)))
    watched.timeline.at(1.5, watched.engine.hang)
    watched.timeline.at(2.0, lambda: watched.engine.submit(Sample(1, 0, (1,))))
    watched.timeline.at(7.5, watched.engine.resume)
    assert watched.run() == {1: 9.0, 0: 10.0}


def test_what_is_seen_in_the_middle_of_a_step_is_what_the_last_one_left() -> None:
    watched = Watched()
    watched.engine.submit(Sample(0, 5, (10,)))
    watched.timeline.at(3.5, lambda: seen.append(watched.engine.state()))
    seen: list[EngineState] = []
    watched.run()
    assert seen == [EngineState(running=1, waiting=0, kv_tokens=8, generated=3, steps=3, busy_s=3.5, preempted=0)]
