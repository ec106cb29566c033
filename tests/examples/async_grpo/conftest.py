"""Silence the warning of ``trl.experimental`` that its interfaces may change: the extra pins the version."""

import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
