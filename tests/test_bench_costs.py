"""The measurement of costs writes a file that the simulator reads."""

from pathlib import Path

import pytest

from bench.costs import text
from bench.costs_fit import fitted
from staleflow.configs.costs import Costs, EngineCosts, SchedulerCosts
from staleflow.configs.loading.cost_file import read_costs

RESULTS = Path(__file__).parent.parent / "bench" / "results"


def test_a_written_cost_file_is_read_back(tmp_path: Path) -> None:
    costs = Costs(
        source="here",
        scheduler=SchedulerCosts(source='a "load"', message_s=1.2345678e-5, messages={"Report": 2e-5}),
        engine=EngineCosts(k2=1e-3),
    )
    (tmp_path / "costs.toml").write_text(text(costs))
    read = read_costs(tmp_path / "costs.toml")
    assert (read.source, read.engine, read.shard) == ("here", EngineCosts(k2=1e-3), None)
    assert read.scheduler == SchedulerCosts(source='a "load"', message_s=1.235e-5, messages={"Report": 2e-5})


def test_coefficients_are_those_of_the_measurements() -> None:
    rows = [(1.0, 10.0), (1.0, 1000.0), (3.0, 50.0)]
    assert fitted(rows, [2.0 + 0.1 * size if one == 1 else 6.0 + 5.0 for one, size in rows]) == pytest.approx(
        [2.0, 0.1]
    )
    assert fitted([(1.0, 1.0), (1.0, 2.0)], [2.0, 1.0])[1] == 0.0  # never negative


def test_the_shipped_cost_file_is_complete() -> None:
    costs = read_costs(RESULTS / "2026-11-2-cores-costs.toml")
    tables = [getattr(costs, name) for name in Costs.__struct_fields__]
    assert all(table == costs.source or table.source for table in tables)
