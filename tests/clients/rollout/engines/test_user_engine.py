"""``rollout.engine`` may name a class of the user."""

import inspect
from pathlib import Path

import numpy as np
import pytest

from staleflow.clients.rollout.engines.base import AsyncEngine, Engine, Request, Sampling
from staleflow.clients.rollout.engines.thread import EngineThread
from staleflow.clients.rollout.main import open_engine
from staleflow.configs.engines import ASYNC, STEPPED
from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import load
from staleflow.configs.loading.presence import present
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import Lineage, Version

HERE = Path(__file__).parent / "user_engines.py"
SIMULATED = Path(__file__).parents[4] / "configs" / "simulated.toml"


def config(name: str, *overrides: str) -> Config:
    return load(SIMULATED, (f"rollout.engine={HERE}:{name}", *overrides))


@pytest.mark.parametrize("name", ["Echo", "opened"])
async def test_a_class_or_a_function_makes_the_engine_that_the_worker_uses(tmp_path: Path, name: str) -> None:
    engine, encode = await open_engine(config(name), tmp_path)
    await engine.load({}, Lineage(0), Version(3))
    request = Request(id=1, prompt_ids=encode("x"), sampling=Sampling(max_new_tokens=8))
    trajectory = await engine.generate(request)
    assert trajectory.token_ids.tolist() == [0, 1, 2]
    assert trajectory.segments[0].version == 3


async def test_a_stepped_engine_runs_in_a_thread_and_gets_prompts_as_bytes_without_a_model(tmp_path: Path) -> None:
    engine, encode = await open_engine(config("Stepped", "rollout.simulated.mean_tokens=4"), tmp_path)
    assert isinstance(engine, EngineThread)
    assert encode("ab").tolist() == [97, 98]
    trajectory = await engine.generate(
        Request(id=1, prompt_ids=np.ones(2, np.int32), sampling=Sampling(max_new_tokens=8))
    )
    assert len(trajectory.token_ids)
    await engine.close()


@pytest.mark.parametrize(
    ("engine", "options", "text"),
    [
        ("mine", (), r'rollout.engine is "mine"; it must be one of .*"vllm_server", or module:Class or file.py:Class'),
        (f"{HERE}:Missing", (), "has no Missing"),
        (f"{HERE}:Silent", (), r"it has no interrupt, abort, load, .*; the methods of an engine without step are gen"),
        (f"{HERE}:Echo", ("rollout.engine_options={speed=2}",), "unexpected keyword argument 'speed'"),
        ("simulated", ("rollout.engine_options={speed=2}",), 'engine_options is "speed"; these are keyword arguments'),
    ],
)
def test_what_is_no_engine_is_refused_before_the_run_starts(engine: str, options: tuple[str, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        present(load(SIMULATED, (f"rollout.engine={engine}", *options)))


def test_the_methods_that_are_checked_are_those_of_the_contract() -> None:
    for contract, names in ((Engine, STEPPED), (AsyncEngine, ASYNC)):
        own = vars(contract).items()
        assert {name for name, value in own if inspect.isfunction(value) and name[0] != "_"} == set(names)
