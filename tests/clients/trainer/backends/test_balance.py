# pyright: basic, reportMissingImports=false
"""Ranks with very unequal groups train the same number of tokens, and take the steps of one rank."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.clients.trainer.torch_trainer import TorchTrainer
from staleflow.protocols.consistency.ids import Step
from tests.clients.trainer.backends.test_backends import case, going_on, settings
from tests.clients.trainer.making import batch, share
from tests.clients.trainer.ranked import ranked

pytestmark = pytest.mark.slow

LONGEST = 8
"""The third group has four times the tokens of the two others together."""
METRICS = ("loss", "grad_norm", "reward/mean", "length/p99", "length/mean", "trainer/tokens", "mismatch_kl", "entropy")
USERS = """
def careful(logprobs, old, behavior, advantages, row):
    if (behavior < -50).any():
        raise ValueError("a token of probability 0")
    return -(logprobs - old).exp() * advantages
"""

BACKENDS = [
    case("ddp", 2, 2, short=True),
    case("fsdp", 2, 2, short=False),
    case("deepspeed", 2, 2, short=False),
    case("deepspeed", 3, 2, short=False),
]


@pytest.mark.parametrize(("backend", "stage", "nproc"), BACKENDS)
def test_ranks_exchange_trajectories_and_take_the_steps_of_one(
    model_directory: Path, tmp_path: Path, backend: str, stage: int, nproc: int
) -> None:
    """In step 1, both ranks have trajectories of the group that the loss refuses; step 2 is stopped on rank 1."""
    (tmp_path / "users.py").write_text(USERS)
    keys: dict[str, Any] = {"algorithm": {"loss": f"{tmp_path}/users.py:careful"}, "mask_truncated": True}
    alone = TorchTrainer(settings(**keys), model_directory)
    expected = [alone.train(batch(step, longest=LONGEST), Step(step), going_on).values for step in (0, 3)]
    task: dict[str, Any] = {"steps": [0, 1, 2, 3], "longest": LONGEST, "surprising": [1], "stopped": [2]}
    outcome = ranked(settings(backend, stage, **keys), model_directory, tmp_path, nproc, **task)
    first, refused, stopped, last = outcome.results
    assert refused["bad"].startswith("groups 2: ")
    assert stopped["bad"] == "stopped"
    for values, found in zip(expected, (first, last), strict=True):
        assert found["bad"] == ""
        assert {name: found[name] for name in METRICS} == pytest.approx(
            {name: values[name] for name in METRICS}, rel=1e-4, abs=2e-6
        )
        whole = [int(share(0, rank, 2, longest=LONGEST).sequence_lengths.sum()) for rank in range(2)]
        assert max(whole) > 1.4 * sum(whole) / 2
        assert sum(found["computed"]) == sum(whole)
        assert max(found["computed"]) <= 1.05 * sum(whole) / 2
    for name, array in alone.weights().items():
        assert np.allclose(outcome.weights[name], array, atol=2e-4), name


@pytest.mark.long
def test_advantages_and_a_cutoff_of_the_whole_batch_are_those_of_one_rank(
    model_directory: Path, tmp_path: Path
) -> None:
    """REINFORCE++ whitens over all ranks before the exchange, M2PO surveys all log-probabilities after it."""
    keys: dict[str, Any] = {"algorithm": {"loss": "m2po", "advantage": "reinforce_pp", "m2_threshold": 0.1}}
    alone = TorchTrainer(settings(**keys), model_directory)
    expected = [alone.train(batch(step, longest=LONGEST), Step(step), going_on).values for step in (0, 1)]
    outcome = ranked(settings("ddp", **keys), model_directory, tmp_path, 2, steps=[0, 1], longest=LONGEST)
    for values, found in zip(expected, outcome.results, strict=True):
        assert found["masked/token"] == values["masked/token"] > 0
        assert {name: found[name] for name in METRICS} == pytest.approx(
            {name: values[name] for name in METRICS}, rel=1e-4, abs=2e-6
        )
    for name, array in alone.weights().items():
        assert np.allclose(outcome.weights[name], array, atol=2e-4), name
