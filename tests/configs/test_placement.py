"""GPUs that no key names are spread over the processes of a run."""

from pathlib import Path
from typing import Any

import pytest

from staleflow.configs.loading.load import load
from staleflow.configs.placement import Placement, place

GPU = Path(__file__).parent.parent.parent / "configs" / "gpu"
VLLM = ["rollout.engine=vllm"]


def placed(file: str, available: int, *overrides: str) -> dict[int, list[str]]:
    return dict(place(load(GPU / file, [*overrides]), available).table())


def test_workers_without_named_gpus_are_spread_and_the_trainer_has_its_own() -> None:
    """Before, every process saw all GPUs and took the first."""
    assert placed("one-gpu.toml", 8, *VLLM, "rollout.workers=4") == {
        0: ["rollout-0"],
        1: ["rollout-1"],
        2: ["rollout-2"],
        3: ["rollout-3"],
        7: ["trainer"],
    }


def test_more_workers_than_gpus_take_turns() -> None:
    assert placed("one-gpu.toml", 3, "rollout.workers=4") == {
        0: ["rollout-0", "rollout-2"],
        1: ["rollout-1", "rollout-3"],
        2: ["trainer"],
    }


def test_one_gpu_is_shared() -> None:
    assert placed("one-gpu.toml", 1) == {0: ["rollout-0", "trainer"]}


def test_the_reference_is_not_beside_an_engine() -> None:
    """Before, it was on GPU 0, most of which vLLM reserves."""
    kl = "trainer.algorithm.kl_coef=0.01"
    assert placed("split.toml", 2, *VLLM, kl) == {0: ["rollout-0"], 1: ["trainer", "reference-0"]}
    assert placed("split.toml", 3, *VLLM, kl) == {0: ["rollout-0"], 1: ["trainer"], 2: ["reference-0"]}
    assert placed("one-gpu.toml", 1, kl) == {0: ["rollout-0", "trainer", "reference-0"]}


def test_models_of_stages_take_turns_on_the_gpus_without_an_engine() -> None:
    models = ["trainer.algorithm.kl_coef=0.01", "trainer.algorithm.advantage=gae", "reference.workers=2"]
    assert placed("one-gpu.toml", 4, *models) == {
        0: ["rollout-0"],
        1: ["reference-0", "critic-0"],
        2: ["reference-1"],
        3: ["trainer"],
    }


def test_engines_and_ranks_of_several_gpus_are_placed_whole() -> None:
    wide = [*VLLM, "rollout.workers=2", "rollout.vllm.tensor_parallel=2"]
    ranks = ["trainer.backend=fsdp", "trainer.nproc=4"]
    config = load(GPU / "one-gpu.toml", [*wide, *ranks])
    assert place(config, 8) == Placement(rollout=[(0, 1), (2, 3)], trainer=(4, 5, 6, 7))


@pytest.mark.parametrize(
    ("overrides", "rollout", "trainer"),
    [
        (["rollout.gpus=[2,3]"], [(2,), (3,)], (7,)),
        (["trainer.gpus=[0]"], [(1,), (2,)], (0,)),
        (["rollout.gpus=[6,7]"], [(6,), (7,)], (5,)),
        (["rollout.gpus=[0]", "trainer.gpus=[0]"], [(0,), (0,)], (0,)),
    ],
)
def test_named_gpus_are_obeyed_and_the_rest_is_placed_around_them(
    overrides: list[str], rollout: list[Any], trainer: tuple[int, ...]
) -> None:
    config = load(GPU / "one-gpu.toml", ["rollout.workers=2", *overrides])
    assert place(config, 8) == Placement(rollout=rollout, trainer=trainer)


def test_without_gpus_nothing_is_placed() -> None:
    assert place(load(GPU / "one-gpu.toml", []), 0) == Placement(rollout=[()])


def test_a_machine_with_too_few_gpus_places_nothing_there() -> None:
    """The engine and torch name the missing GPUs themselves."""
    config = load(GPU / "one-gpu.toml", [*VLLM, "rollout.vllm.tensor_parallel=4"])
    assert place(config, 2) == Placement(rollout=[()], trainer=(1,))
    config = load(GPU / "one-gpu.toml", ["trainer.backend=ddp", "trainer.nproc=4"])
    assert place(config, 2).trainer == ()
