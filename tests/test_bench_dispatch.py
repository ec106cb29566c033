"""The variants of the dispatch benchmark do what their rows claim, and the price list adds up; speeds are virtual."""

import pytest

from bench.dispatch_pool import Mode, pooled
from bench.dispatch_shapes import shape
from bench.dispatch_variants import Lengths, Order, queue_order, same_lengths
from bench.price_list import CHOICES, HALVED, overrides
from staleflow.configs.schema import Config
from staleflow.sim.cost import StepCost
from staleflow.sim.sample import Sample
from staleflow.sim.simulate import simulate
from staleflow.sim.timeline import Timeline

SMALL = (
    "trainer.batch_size=4",
    "rollout.max_new_tokens=2000",
    "rollout.simulated.mean_tokens=300",
    "trainer.simulated_step_s=2",
    "simulation.load_s=0.5",
)


def small(name: str, *chosen: str) -> Config:
    return shape(name, *SMALL, *chosen, seed=0, steps=8)


@pytest.mark.parametrize("mode", ["route", "move", "tail"])
def test_a_pool_keeps_exact_versions(mode: Mode) -> None:
    """The audit of the trace checks the versions of every token."""
    with same_lengths() as lengths, pooled(mode, tail_share=0.25, tail_tokens=200, tail_slots=4) as pool:
        result = simulate(small("tail", "rollout.workers=4", "rollout.simulated.k1=1e-5"))
    assert len(result.steps) == 8
    assert (result.violations, result.discarded) == (0, 0)
    assert (pool.moves > 0) == (mode != "route")
    assert len(lengths.expected) >= 8 * 4 * 4


@pytest.mark.parametrize(
    ("order", "ends"), [("longest", [9, 7, 5, 2]), ("shortest", [2, 5, 7, 9]), ("expected", [5, 2, 9, 7])]
)
def test_a_queue_serves_its_samples_in_order(order: Order, ends: list[int]) -> None:
    lengths, ended, timeline = Lengths(), list[Sample](), Timeline()
    with queue_order(order, lengths) as ordered:
        engine = ordered(timeline, StepCost(k1=0.0, k2=1.0, k3=0.0, k4=0.0), slots=1, on_end=ended.append)
    for place, tokens in enumerate((7, 9, 2, 5)):
        sample = Sample(place, 0, (tokens,))
        lengths.expected[sample] = 10.0 * place
        engine.submit(sample)
    timeline.run(lambda: len(ended) == len(ends))
    assert [sample.length for sample in ended] == ends


def test_all_variants_meet_the_same_lengths() -> None:
    drawn: list[dict[float, int]] = []
    for admission in ("fill", "just_in_time"):
        with same_lengths() as lengths:
            simulate(small("tail", f"coordination.admission={admission}"))
        drawn.append({round(expected, 6): sample.length for sample, expected in lengths.expected.items()})
    both = drawn[0].keys() & drawn[1].keys()
    assert len(both) >= 8 * 4
    assert all(drawn[0][one] == drawn[1][one] for one in both)


def test_the_price_list_has_valid_choices_and_reports_cut_tokens() -> None:
    config = small("long-tail")
    for choice in CHOICES:
        small("long-tail", *overrides(choice, config))
    assert overrides(HALVED, config) == ("rollout.max_new_tokens=1000",)
    result = simulate(small("long-tail", "staleness.on_overdue=truncate"))
    assert 0.0 < result.truncated < 1.0
    assert result.length_bias < 1.0
