# pyright: basic, reportMissingImports=false
"""Every rank of a sharded model has its own bytes of each tensor, also where the ranks cannot share them evenly."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.clients.trainer.backends.test_backends import needs_deepspeed, settings
from tests.clients.trainer.making import config
from tests.clients.trainer.ranked import ranked

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize("nproc", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["fsdp", pytest.param("deepspeed", marks=needs_deepspeed)])
def test_the_spans_of_all_ranks_are_the_gathered_weights(
    model_directory: Path, tmp_path: Path, backend: str, dtype: str, nproc: int
) -> None:
    model: Any = msgspec.convert({"dtype": dtype}, type(config().model))
    chosen = msgspec.structs.replace(settings(backend, 3), model=model)
    outcome = ranked(chosen, model_directory, tmp_path, nproc, steps=[0, 1])
    assert outcome.weights["model.norm.weight"].dtype == (np.uint16 if dtype == "bfloat16" else np.float32)
    outcome.check_spans()
