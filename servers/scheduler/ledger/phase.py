"""Where the run is in its life, as far as it is not in the ledger.

What was acknowledged of it is stored with the commit of the answer. A scheduler that starts again within its session
continues in that phase; the first start of a new session (``--resume``) clears it.
"""

from dataclasses import dataclass

import msgspec

from staleflow.store.base import Read, Write

_KEY = b"phase"


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """What survives the process."""

    session: str = ""
    """The start of the run, or its newest resumption."""
    drained: str = ""
    finished: bool = False
    error: str = ""


@dataclass(slots=True)
class Phase:
    """Only ever moves forward, but for ``suspected`` and ``stuck``."""

    session: str = ""
    suspected: str = ""
    """Why no further step may ever be trained: nothing new starts until the groups under way have shown it."""
    stuck: str = ""
    """Why no further step can ever be trained, as things are now."""
    stopping: bool = False
    """This process of the scheduler ends; the run does not."""
    drained: str = ""
    """Why the run was asked to end early; empty while it was not."""
    finished: bool = False
    """The trainer reported its end, or a drained run has no trainer."""
    error: str = ""
    """Why the trainer gave up."""
    closed: bool = False
    """The trace is closed: nothing changes any more."""

    @property
    def ending(self) -> bool:
        """The run ends, or has ended: only a new session continues it."""
        return self.finished or bool(self.drained)

    @property
    def draining(self) -> bool:
        """No new leases."""
        return self.stopping or self.ending

    def save(self, txn: Write) -> None:
        """Put it into the transaction of the answer that announces it."""
        stored = Stored(session=self.session, drained=self.drained, finished=self.finished, error=self.error)
        txn.put("meta", _KEY, msgspec.msgpack.encode(stored))


def load(txn: Read, session: str) -> Phase:
    """The stored phase. A ``session`` that is not the stored one begins a new phase, which its caller saves."""
    raw = txn.get("meta", _KEY)
    stored = Stored() if raw is None else msgspec.msgpack.decode(raw, type=Stored)
    if session and session != stored.session:
        return Phase(session=session)
    return Phase(session=stored.session, drained=stored.drained, finished=stored.finished, error=stored.error)
