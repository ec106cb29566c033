"""Names of the shipped engines, and the methods of an engine of the user."""

import inspect
from typing import Any, Final

from staleflow.configs.errors import ConfigError

ENGINES: Final = ("simulated", "transformers", "vllm", "vllm_server")
KEY: Final = "rollout.engine"

STEPPED: Final = ("submit", "step", "interrupt", "withdraw", "abort", "load", "stats")
"""Methods of an engine that its owner steps (``clients.rollout.engines.base.Engine``)."""
ASYNC: Final = ("generate", "interrupt", "abort", "load", "stats", "busy_s", "tokens_per_s", "stuck_s", "close")
"""Methods of an engine that runs its own loop (``clients.rollout.engines.base.AsyncEngine``)."""


def is_stepped(engine: object) -> bool:
    """Return whether the owner of an engine, or of its class, must step it."""
    return hasattr(engine, "step")


def check_methods(engine: Any, spec: str, key: str = KEY) -> None:
    """Raise ``ConfigError`` unless an engine, or its class, has every method. A function that returns one passes."""
    if inspect.isroutine(engine):
        return
    kind, methods = ("an engine with step", STEPPED) if is_stepped(engine) else ("an engine without step", ASYNC)
    if missing := [name for name in methods if not callable(getattr(engine, name, None))]:
        allowed = f"the methods of {kind} are {', '.join(methods)} (docs/engines.md)"
        raise ConfigError(key, spec, f"it has no {', '.join(missing)}; {allowed}")
