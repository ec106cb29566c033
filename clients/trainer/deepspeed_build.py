"""The one operation that DeepSpeed builds for CPUs, made ahead and with a limit: a lock left behind hangs it."""

import logging
import shutil
import subprocess
import sys
from functools import cache

from staleflow.configs.errors import ConfigError
from staleflow.runtime.builds import clear_stale_locks, extensions

log = logging.getLogger(__name__)

BUILD_LIMIT_S = 600.0
"""It takes half a minute on an idle core, minutes on a busy one."""
_OPERATION = "deepspeed_shm_comm"
_BUILD = """
import os
os.environ.setdefault("DS_ACCELERATOR", "cpu")
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
ShareMemCommBuilder().load(verbose=False)
"""


@cache
def build(device: str) -> None:
    """Returns when every start finds it built, in ``extensions()``; looks once a process. ``ConfigError`` without a
    compiler."""
    if device != "cpu":
        return
    if shutil.which("g++") is None:
        allowed = "on a CPU it builds an operation in C++ at its first start: install g++"
        raise ConfigError("trainer.backend", "deepspeed", allowed)
    for path in clear_stale_locks(extensions()):
        log.warning("removed %s: an interrupted build left it", path)
    if (extensions() / _OPERATION / f"{_OPERATION}.so").is_file():
        return  # what it would take to hear that there is nothing to do: one more interpreter, with DeepSpeed in it
    try:
        done = subprocess.run(
            [sys.executable, "-c", _BUILD], capture_output=True, text=True, timeout=BUILD_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as late:
        raise TimeoutError(f"DeepSpeed's operation was not built in {BUILD_LIMIT_S:g} s") from late
    if done.returncode != 0:
        raise RuntimeError(f"DeepSpeed's operation was not built:\n{done.stderr[-2000:]}")
