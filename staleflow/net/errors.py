"""Errors that callers of the runtime must handle.

::

    ConfigError   an impossible configuration or option (defined in ``configs.errors``); ends a process with exit code 2
    Refused       the server refused the request; repeating it does not help
    Unavailable   no reply in time

A violation of the protocol by a peer is a ``ProtocolError`` (``protocols.wire.codec``).
"""

from staleflow.configs.errors import ConfigError
from staleflow.protocols.consistency.effects import Code

__all__ = ["ConfigError", "Refused", "Unavailable"]


RUN_IS_OVER = "the run is over"
"""Detail of a scheduler's ``DENIED`` once its run has finished."""


class RunOver(Exception):
    """The run finished before this process attached. There is nothing left to do; not a failure."""

    def __init__(self) -> None:
        super().__init__(RUN_IS_OVER)


class Refused(Exception):
    """A server refused a request. ``code`` is the reason for programs, ``detail`` the reason for people."""

    def __init__(self, code: Code, detail: str) -> None:
        super().__init__(f"{code.value}: {detail}" if detail else code.value)
        self.code = code
        self.detail = detail

    @property
    def is_over(self) -> bool:
        """True if the only reason is that the run has finished."""
        return self.code is Code.DENIED and self.detail == RUN_IS_OVER


class Unavailable(Exception):
    """No final reply from ``address`` within ``waited_s``; ``why`` is the detail of the server's last ``busy``, if
    any."""

    def __init__(self, address: str, waited_s: float, why: str = "") -> None:
        super().__init__(f"no answer from {address} for {waited_s:.1f} s" + (f" (busy: {why})" if why else ""))
        self.address = address
        self.waited_s = waited_s
        self.why = why
