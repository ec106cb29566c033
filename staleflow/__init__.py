"""Reinforcement learning post-training that never learns from data older than the bound you asked for.

The public API consists of ``load``, ``run``, ``connect``, ``TrainerClient``, ``Trace``, their results (``Run``,
``Result``) and the errors that they raise; see docs/python.md for examples.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from staleflow.api import Result, Run, Trace, connect, run
    from staleflow.clients.trainer.client import BadVersion, Fenced, TrainerClient
    from staleflow.clients.trainer.data.prefetch import NoBatch
    from staleflow.configs.errors import ConfigError
    from staleflow.configs.loading.load import load
    from staleflow.net.errors import Refused, Unavailable
    from staleflow.protocols.wire.messages import ModelLimits

__all__ = [
    "BadVersion",
    "ConfigError",
    "Fenced",
    "ModelLimits",
    "NoBatch",
    "Refused",
    "Result",
    "Run",
    "Trace",
    "TrainerClient",
    "Unavailable",
    "connect",
    "load",
    "run",
]
__version__ = "0.1.0"

_TRAINER, _ERRORS = "staleflow.clients.trainer.client", "staleflow.net.errors"
_ELSEWHERE = {
    "BadVersion": _TRAINER,
    "Fenced": _TRAINER,
    "ModelLimits": "staleflow.protocols.wire.messages",
    "NoBatch": "staleflow.clients.trainer.backends.base",
    "TrainerClient": _TRAINER,
    "Refused": _ERRORS,
    "Unavailable": _ERRORS,
}
"""Names that a training loop on another machine imports, without the rest of ``staleflow.api``."""


def __getattr__(name: str) -> object:
    """Import public names on first use, which keeps ``import staleflow`` fast."""
    if name in __all__:
        return getattr(import_module(_ELSEWHERE.get(name, "staleflow.api")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
