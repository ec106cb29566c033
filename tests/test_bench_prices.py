"""The benchmarks of prices: durations follow from the hardware, and their tables from the simulated speeds."""

import pytest

from bench import preemptible, prices
from bench.prices_world import (
    DELTA,
    FULL,
    H20,
    H800,
    LORA,
    MODEL_GIB,
    PARAMETERS,
    SMALL_SIZE,
    WEIGHT_BYTES,
    Gpu,
    Transfer,
    costs,
)
from staleflow.sim.cost import StepCost


def test_a_step_is_limited_by_memory_or_arithmetic_of_its_gpu() -> None:
    engine = costs(FULL, 10.0).engine
    assert engine is not None
    fleets = [gpu.fleet(1, 1.0) for gpu in (H800, H20)]
    h800, h20 = (StepCost.of(engine, speed=kind.speed, compute=kind.compute) for kind in fleets)
    assert h20.steps_s(1, 1, 0) < h800.steps_s(1, 1, 0), "one sample reads all weights, and H20 has the faster memory"
    assert h20.steps_s(1, 128, 0) > 2 * h800.steps_s(1, 128, 0), "many samples compute"
    assert h800.k2 == pytest.approx(WEIGHT_BYTES / (0.75 * 3.35e12))
    assert h20.k3 == pytest.approx(2 * PARAMETERS / (0.6 * 148e12))
    assert [kind.kv_tokens for kind in fleets] == [989_816, 1_240_932]


def test_a_version_crosses_the_link_at_the_size_of_its_transfer() -> None:
    def pull_s(transfer: Transfer, gbit: float) -> float:
        pull = costs(transfer, gbit).pull
        assert pull is not None
        return pull.network_gib_s * MODEL_GIB

    assert pull_s(FULL, 10.0) == pytest.approx(WEIGHT_BYTES * 8 / 10e9)
    assert pull_s(DELTA, 1.0) == pytest.approx(WEIGHT_BYTES * 8 / 1e9 / 68)
    assert pull_s(LORA, 0.1) == pytest.approx(2 * 80.7e6 * 8 / 1e8)


def row(gpu: Gpu, count: int, speed: float, **how: object) -> prices.Row:
    fleet = prices.Fleet(gpu=gpu, count=count, **how)  # type: ignore[arg-type]
    return prices.Row(fleet=fleet, steps_per_min=speed, of_limit=0.5, staleness=1.0)


def test_cost_effectiveness_is_that_of_the_cheapest_number_of_engines_against_both_baselines() -> None:
    measured = [
        row(H800, 14, 0.5, trains=True),
        row(H800, 4, 1.2),
        row(H800, 8, 1.5),
        row(H20, 8, 1.0),
        row(H20, 16, 1.6),
    ]
    table = list(prices.comparison(measured))
    at_two = {cells[0]: cells[3] for cells in table[1:]}
    # A step costs 28 / 0.5 = 56, (8 + 8) / 1.2 = 13.3 or (8 + 16) / 1.5 = 16, (8 + 8) / 1 = 16 or (8 + 16) / 1.6 = 15.
    assert at_two["H800"] == "1.00 / 4.20 (4)"
    assert at_two["H20"] == "0.89 / 3.73 (16)"
    assert at_two["H800, colocated, synchronous"] == "0.24 / 1.00 (14)"


def test_fleets_are_simulated_with_their_link_and_their_losses() -> None:
    near = prices.measure(prices.Fleet(gpu=H20, count=2), SMALL_SIZE)
    far = prices.measure(prices.Fleet(gpu=H20, count=2, gbit=1.0), SMALL_SIZE)
    assert far.staleness > near.staleness, "versions arrive later"
    assert far.cells()[:3] == ("2 H20", "1 Gbit/s", "full versions")
    base = preemptible.measure(preemptible.Fleet(fixed=2), SMALL_SIZE, 1)
    cheap = preemptible.measure(preemptible.Fleet(fixed=0, preemptible=2), SMALL_SIZE, 1)
    assert (base.lost, base.discarded, base.cost[0]) == (0, 0.0, base.cost[1])
    assert cheap.cost[0] < cheap.cost[1] < base.cost[0]
    assert cheap.cells(base)[0] == "2 preemptible"
