"""The files with which a test permits the steps of vLLM's engine core."""

import os
import secrets
import tempfile
from pathlib import Path

FOLDER = Path(
    os.environ.setdefault("STALEFLOW_TEST_PACE", f"{tempfile.gettempdir()}/staleflow-pace-{secrets.token_hex(8)}")
)
"""While it exists, each step needs a permission. An engine core has the path from the environment of its test."""
STEP = FOLDER / "step"
"""The permission of one step."""
