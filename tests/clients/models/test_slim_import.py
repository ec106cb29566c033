"""Processes that compute with models do not import packages that only other users of transformers need."""

import subprocess
import sys

import pytest

PACKAGES = ("sklearn", "scipy", "pandas")
SCRIPT = """
import sys
from staleflow.clients.models.slim_import import hide_unused_packages
hide_unused_packages()
import staleflow.clients.trainer.torch_trainer, staleflow.clients.rollout.engines.transformers.model
print(*(name for name in {packages} if name in sys.modules))
import sklearn.linear_model, scipy.optimize
"""


@pytest.mark.xdist_group("machine")
def test_no_package_that_transformers_alone_would_use_is_imported_and_each_can_be_imported_later() -> None:
    script = SCRIPT.format(packages=PACKAGES)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert (ran.returncode, ran.stdout.split()) == (0, []), ran.stderr
