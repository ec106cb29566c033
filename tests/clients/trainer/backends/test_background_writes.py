# pyright: basic, reportMissingImports=false
"""A checkpoint whose ranks write their copies after later steps is the one that they write when they wait for it.

``test_backends`` resumes every backend from the latter.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.clients.trainer.backends.test_backends import case, settings
from tests.clients.trainer.ranked import ranked
from tests.clients.trainer.test_async_checkpoints import files

pytestmark = pytest.mark.slow

STEPS, SAVED_AFTER = [0, 1, 2, 3], 1

CASES = [
    case("ddp", 2, 2, short=False),
    case("fsdp", 2, 2, short=True),
    *(case("deepspeed", stage, 2, short=stage == 3) for stage in range(4)),
]


@pytest.mark.parametrize(("backend", "stage", "nproc"), CASES)
def test_a_checkpoint_that_ranks_write_while_they_train_is_the_one_of_its_step(
    model_directory: Path, tmp_path: Path, backend: str, stage: int, nproc: int
) -> None:
    chosen, awaited, background = settings(backend, stage), tmp_path / "awaited", tmp_path / "background"
    straight = ranked(
        *(chosen, model_directory, tmp_path / "straight", nproc),
        steps=STEPS,
        save=awaited,
        save_after=SAVED_AFTER,
        background=background,
    )
    assert any(not np.array_equal(straight.saved[name], array) for name, array in straight.weights.items())
    assert files(background) == files(awaited)
