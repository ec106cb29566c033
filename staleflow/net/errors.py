"""What a caller of the runtime must be ready for.

::

    ConfigError   the operator asked for what cannot be (defined in ``configs.errors``); ends a process with exit code 2
    Refused       the server's answer is a normal no that will not change by itself
    Unavailable   no server answered in time

What a peer does wrong is a ``ProtocolError`` (``protocols.wire.codec``).
"""

from staleflow.configs.errors import ConfigError
from staleflow.protocols.consistency.effects import Code

__all__ = ["ConfigError", "Refused", "Unavailable"]


RUN_IS_OVER = "the run is over"
"""Detail of a scheduler's ``DENIED`` once its run has finished."""


class RunOver(Exception):
    """The run had finished before this process joined it. Nothing is left to do, and nothing is wrong."""

    def __init__(self) -> None:
        super().__init__(RUN_IS_OVER)


class Refused(Exception):
    """A server answered no; ``code`` says why, ``detail`` says it to a person."""

    def __init__(self, code: Code, detail: str) -> None:
        super().__init__(f"{code.value}: {detail}" if detail else code.value)
        self.code = code
        self.detail = detail

    @property
    def is_over(self) -> bool:
        """Whether the run has finished, and nothing else is the matter."""
        return self.code is Code.DENIED and self.detail == RUN_IS_OVER


class Unavailable(Exception):
    """No final answer from ``address`` within ``waited_s``; ``why`` is the server's last "busy", if it said so."""

    def __init__(self, address: str, waited_s: float, why: str = "") -> None:
        super().__init__(f"no answer from {address} for {waited_s:.1f} s" + (f" (busy: {why})" if why else ""))
        self.address = address
        self.waited_s = waited_s
        self.why = why
