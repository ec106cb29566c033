# pyright: basic, reportMissingImports=false
"""The plugin that staleflow adds to each of vLLM's processes.

``register`` is an entry point of ``vllm.general_plugins``: vLLM calls it in the engine core and in every worker, and in
any other program that uses vLLM where staleflow is installed. It does not change such other programs.
"""

import contextlib
import os
import threading
import time

from staleflow.clients.rollout.engines.vllm.package import PARENT

BACKEND = "staleflow"
POLL_INTERVAL_S = 0.5


def register() -> None:
    """Add the weight transfer backend, and tie this process to the rollout worker that started it."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    if BACKEND not in Factory._registry:
        Factory.register_engine(BACKEND, "staleflow.clients.rollout.engines.vllm.receiver", "FileWeights")
    started_by = os.environ.get(PARENT)
    if started_by and started_by != str(os.getpid()):
        with contextlib.suppress(PermissionError):
            os.setpgid(0, 0)  # Ctrl-C must reach only the worker, which drains first
        threading.Thread(target=_exit_with, args=(os.getppid(),), name="orphan watch", daemon=True).start()


def _exit_with(parent: int) -> None:
    """End this process with its parent. An orphaned engine core would keep its memory and the device's indefinitely."""
    while os.getppid() == parent:
        time.sleep(POLL_INTERVAL_S)
    os._exit(1)
