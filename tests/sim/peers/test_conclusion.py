"""The sentences below a comparison name the fastest choice without a cost, the costs of others, and broken bounds."""

from dataclasses import replace

import pytest

from staleflow.sim.peers.compare import OWN
from staleflow.sim.peers.conclusion import CHOICES, LEGEND, conclusion
from staleflow.sim.result import Result
from staleflow.sim.simulate import simulate
from tests.sim.configs import config


@pytest.fixture(scope="module")
def plain() -> Result:
    result = simulate(config())
    return replace(result, violations=0, discarded=0.0, masked=0.0, length_bias=1.0)


def test_the_fastest_row_without_a_cost_is_compared_with_the_fastest_such_peer(plain: Result) -> None:
    rows = [
        replace(plain, name="staleflow wait", steps_per_min=30.0),
        replace(plain, name="staleflow clustered", steps_per_min=36.0),
        replace(plain, name="psrl", steps_per_min=24.0),
        replace(plain, name="slime", steps_per_min=10.0),
    ]
    assert conclusion(rows) == [
        "Fastest without violations, lost tokens or length bias: staleflow clustered (36.000 steps/min), "
        "1.50 times the fastest other system that does the same: psrl (24.000 steps/min)."
    ]


def test_faster_rows_are_named_with_their_costs_and_slower_ones_are_not(plain: Result) -> None:
    rows = [
        replace(plain, name="staleflow wait", steps_per_min=30.0),
        replace(plain, name="staleflow token", steps_per_min=39.0, masked=0.32),
        replace(plain, name="prime-rl", steps_per_min=40.0, discarded=0.797, length_bias=0.453),
        replace(plain, name="trl", steps_per_min=20.0, discarded=0.4),
    ]
    assert conclusion(rows)[1:] == [
        "Faster at a cost: prime-rl (40.000 steps/min): 79.7% of the tokens discarded, length bias 0.453; "
        "staleflow token (39.000 steps/min): 32.0% of the tokens masked."
    ]


def test_rows_beyond_the_bound_are_never_recommended(plain: Result) -> None:
    rows = [
        replace(plain, name="staleflow wait", steps_per_min=30.0),
        replace(plain, name="areal", steps_per_min=50.0, violations=1056),
    ]
    assert conclusion(rows) == [
        "Fastest without violations, lost tokens or length bias: staleflow wait (30.000 steps/min).",
        "Beyond the bound: areal (1,056 violations).",
    ]


def test_the_legend_explains_every_row_of_ours() -> None:
    assert list(CHOICES) == list(OWN)
    assert [line.split(":")[0] for line in LEGEND[: len(OWN)]] == [f"staleflow {name}" for name in OWN]
