"""Reinforcement learning post-training that never learns from data older than the bound you asked for.

The public API consists of ``load``, ``run``, ``connect``, ``Trace``, the clients of a run (``TrainerClient``,
``RolloutClient``, ``StageClient``, ``PromptClient``), their results (``Run``, ``Result``) and the errors that they
raise; see docs/python.md for examples.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from staleflow.api import Result, Run, Trace, connect, run
    from staleflow.clients.prompt_client import AsyncPromptClient, PromptClient, PromptError
    from staleflow.clients.rollout.client import AsyncRolloutClient, RolloutClient
    from staleflow.clients.rollout.engines.base import LoadError, Sampling
    from staleflow.clients.rollout.samples import Lease, LeaseError, Sample
    from staleflow.clients.stage.client import AsyncStageClient, StageClient, StageError
    from staleflow.clients.stage.worker import StageGroup
    from staleflow.clients.trainer.async_client import AsyncTrainerClient
    from staleflow.clients.trainer.client import TrainerClient
    from staleflow.clients.trainer.data.prefetch import NoBatch
    from staleflow.clients.trainer.errors import BadVersion, Fenced
    from staleflow.clients.weights import PulledVersion, external
    from staleflow.clients.weights.download import fetch_weights
    from staleflow.configs.errors import ConfigError
    from staleflow.configs.loading.load import load
    from staleflow.net.errors import Refused, Unavailable
    from staleflow.protocols.wire.messages import InstanceStats, ModelLimits, Outcome, RowResult

__all__ = [
    "AsyncPromptClient",
    "AsyncRolloutClient",
    "AsyncStageClient",
    "AsyncTrainerClient",
    "BadVersion",
    "ConfigError",
    "Fenced",
    "InstanceStats",
    "Lease",
    "LeaseError",
    "LoadError",
    "ModelLimits",
    "NoBatch",
    "Outcome",
    "PromptClient",
    "PromptError",
    "PulledVersion",
    "Refused",
    "Result",
    "RolloutClient",
    "RowResult",
    "Run",
    "Sample",
    "Sampling",
    "StageClient",
    "StageError",
    "StageGroup",
    "Trace",
    "TrainerClient",
    "Unavailable",
    "connect",
    "external",
    "fetch_weights",
    "load",
    "run",
]
__version__ = "0.1.0"

_TRAINER, _ERRORS = "staleflow.clients.trainer", "staleflow.net.errors"
_ROLLOUT, _STAGE = "staleflow.clients.rollout", "staleflow.clients.stage"
_MESSAGES, _PROMPTS = "staleflow.protocols.wire.messages", "staleflow.clients.prompt_client"
_ELSEWHERE = {
    "AsyncRolloutClient": f"{_ROLLOUT}.client",
    "AsyncPromptClient": _PROMPTS,
    "PromptClient": _PROMPTS,
    "PromptError": _PROMPTS,
    "Outcome": _MESSAGES,
    "RowResult": _MESSAGES,
    "BadVersion": f"{_TRAINER}.errors",
    "Fenced": f"{_TRAINER}.errors",
    "InstanceStats": _MESSAGES,
    "Lease": f"{_ROLLOUT}.samples",
    "LeaseError": f"{_ROLLOUT}.samples",
    "LoadError": f"{_ROLLOUT}.engines.base",
    "ModelLimits": _MESSAGES,
    "PulledVersion": "staleflow.clients.weights",
    "RolloutClient": f"{_ROLLOUT}.client",
    "AsyncStageClient": f"{_STAGE}.client",
    "AsyncTrainerClient": f"{_TRAINER}.async_client",
    "external": "staleflow.clients.weights",
    "fetch_weights": "staleflow.clients.weights.download",
    "StageClient": f"{_STAGE}.client",
    "StageError": f"{_STAGE}.client",
    "StageGroup": f"{_STAGE}.worker",
    "Sample": f"{_ROLLOUT}.samples",
    "Sampling": f"{_ROLLOUT}.engines.base",
    "NoBatch": f"{_TRAINER}.data.prefetch",
    "TrainerClient": f"{_TRAINER}.client",
    "Refused": _ERRORS,
    "Unavailable": _ERRORS,
}
"""Names that a worker on another machine imports, without the rest of ``staleflow.api``."""


def __getattr__(name: str) -> object:
    """Import public names on first use, which keeps ``import staleflow`` fast."""
    if name in __all__:
        return getattr(import_module(_ELSEWHERE.get(name, "staleflow.api")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
