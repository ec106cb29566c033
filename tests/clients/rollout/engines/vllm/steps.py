# pyright: basic, reportMissingImports=false
"""Wait for the test's permission before each step of vLLM: the ``worker_extension_cls`` of tests with ``paced``."""

import time
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from tests.clients.rollout.engines.vllm.pace import FOLDER, STEP

_execute_model = CPUWorker.execute_model


def execute_model(worker: Any, *args: Any, **more: Any) -> Any:
    while FOLDER.exists():
        try:
            STEP.unlink()
            break
        except FileNotFoundError:
            time.sleep(0.001)
    return _execute_model(worker, *args, **more)


CPUWorker.execute_model = execute_model


class Steps:
    """Adds nothing to a worker; this module waits before its steps."""
