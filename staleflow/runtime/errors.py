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


class Refused(Exception):
    """A server answered no; ``code`` says why, ``detail`` says it to a person."""

    def __init__(self, code: Code, detail: str) -> None:
        super().__init__(f"{code.value}: {detail}" if detail else code.value)
        self.code = code
        self.detail = detail


class Unavailable(Exception):
    """No final answer from ``address`` within ``waited_s``; ``why`` is the server's last "busy", if it said so."""

    def __init__(self, address: str, waited_s: float, why: str = "") -> None:
        super().__init__(f"no answer from {address} for {waited_s:.1f} s" + (f" (busy: {why})" if why else ""))
        self.address = address
        self.waited_s = waited_s
        self.why = why
