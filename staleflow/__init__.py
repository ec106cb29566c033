"""Reinforcement learning post-training that never learns from data older than the bound you asked for.

``run``, ``connect`` and ``Trace`` are all there is to it from Python; docs/python.md shows them at work.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from staleflow.api import Result, Run, Trace, connect, run
    from staleflow.configs.errors import ConfigError
    from staleflow.configs.load import load

__all__ = ["ConfigError", "Result", "Run", "Trace", "connect", "load", "run"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Nothing is imported before it is asked for: ``import staleflow`` costs nothing."""
    if name in __all__:
        from staleflow import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
