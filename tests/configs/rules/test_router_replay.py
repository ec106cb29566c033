"""Router replay needs an engine that records experts, and refuses keys that contradict it by name."""

import pytest

from staleflow.configs.columns import typed_columns
from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import load
from staleflow.protocols.wire.routed_experts import COLUMN
from tests.configs.conftest import Write

REPLAYS = ("trainer.router_replay=true", "trainer.backend=torch", "model.build=somewhere:build")
COLUMNS = ",".join(f'{{name="c{n}", per="token", dtype="int8", required=false}}' for n in range(16))
NO_RECORDS = (
    'with trainer.router_replay it must be "transformers" or an engine of your own: this one records no experts'
)


@pytest.mark.parametrize("engine", ["simulated", "vllm", "vllm_server"])
def test_an_engine_that_records_no_experts_is_refused(write: Write, engine: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(write(), [*REPLAYS, f"rollout.engine={engine}"])
    assert str(refused.value) == f'rollout.engine is "{engine}"; {NO_RECORDS}'


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ['rollout.pool=[{engine="transformers"}, {engine="vllm"}]'],
            f'rollout.pool[1].engine is "vllm"; {NO_RECORDS}',
        ),
        (["trainer.compile=true"], "trainer.compile is true; with trainer.router_replay it must be false"),
        (
            ["trainer.backend=simulated"],
            'trainer.router_replay is true; with trainer.backend "simulated" there is no model; set it to false',
        ),
        (
            ['column=[{name="routed_experts", per="token", dtype="uint8", shape=[2, 2], required=false}]'],
            'column[0].name is "routed_experts"; trainer.router_replay adds this column',
        ),
        ([f"column=[{COLUMNS}]"], "with trainer.router_replay, which adds one, a run has at most 15 columns"),
    ],
)
def test_contradictions_are_refused(write: Write, overrides: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(write(), [*REPLAYS, "rollout.engine=transformers", *overrides])
    assert line in str(refused.value)


@pytest.mark.parametrize("engine", ["transformers", "mine.py:Engine"])
def test_the_column_is_added(write: Write, engine: str) -> None:
    config = load(write(), [*REPLAYS, f"rollout.engine={engine}"])
    assert typed_columns(config.column, router_replay=config.trainer.router_replay) == (COLUMN,)
    assert typed_columns(config.column) == ()
