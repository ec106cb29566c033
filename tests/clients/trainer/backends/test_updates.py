# pyright: basic, reportMissingImports=false
"""Several updates in a step on every backend: those of one rank with the same mini-batches, and all of them or none."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.clients.trainer.data.mini_batches import BatchGroups
from staleflow.clients.trainer.data.prefetch import shares
from staleflow.clients.trainer.torch_trainer import TorchTrainer
from staleflow.clients.trainer.updates import Updates
from staleflow.protocols.consistency.ids import Step
from tests.clients.trainer.backends.test_backends import case, going_on, settings
from tests.clients.trainer.making import batch, members
from tests.clients.trainer.ranked import ranked

pytestmark = pytest.mark.slow

GROUPS = 3
"""Ranks have two of them and one: with three mini-batches, each update has a rank without rows."""
STEPS = [0, 1, 2, 3]

BACKENDS = [
    case("ddp", 2, 2, short=True),
    case("fsdp", 2, 2, short=False),
    *(case("deepspeed", stage, 2, short=False) for stage in range(4)),
]


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one rank use the mini-batches of two: they depend on the rank that has each group."""

    def groups(_: object, of: Any) -> BatchGroups:
        fetched = members(int(of.step), groups=GROUPS)
        first, _ = shares([item.payload.num_tokens for item in fetched], 2)
        tokens = [int(of.loss_mask[of.group_ids == group].sum()) for group in range(GROUPS)]
        ranks = [int(group not in first) for group in range(GROUPS)]
        return BatchGroups(ids=np.arange(GROUPS), ranks=np.array(ranks), tokens=np.array(tokens))

    monkeypatch.setattr(Updates, "_groups", groups)


@pytest.mark.usefixtures("divided")
@pytest.mark.parametrize(("backend", "stage", "nproc"), BACKENDS)
def test_ranks_take_the_updates_of_one_and_undo_a_step_together(
    model_directory: Path, tmp_path: Path, backend: str, stage: int, nproc: int
) -> None:
    """Step 1 is not finite from its second update on, or its third; step 2 is stopped between its passes."""
    keys: dict[str, Any] = {"minibatches": GROUPS, "epochs": 2, "batch_size": GROUPS, "share_prompts": False}
    alone = TorchTrainer(settings(**keys), model_directory)
    expected = {step: alone.train(batch(step), Step(step), going_on).values for step in (0, 3)}
    task: dict[str, Any] = {"steps": STEPS, "bad": [1], "stopped": [2], "looks": 9}
    outcome = ranked(settings(backend, stage, **keys), model_directory, tmp_path, nproc, **task)
    first, bad, stopped, last = outcome.results
    assert bad["bad"].startswith("loss is nan in update ")
    assert not bad["bad"].startswith("loss is nan in update 1 ")
    assert stopped["bad"] == "stopped"
    for step, found in ((0, first), (3, last)):
        assert found.pop("bad") == ""
        names = [name for name in expected[step] if name != "clip/low" and name != "clip/high"]
        assert {name: found[name] for name in names} == pytest.approx(
            {name: expected[step][name] for name in names}, rel=2e-3, abs=2e-5
        )
    for name, array in alone.weights().items():
        assert np.allclose(outcome.weights[name], array, atol=2e-4), name
