"""Life cycle of the run outside the ledger: draining, finished, failed.

A change is stored in the same commit as its reply. A scheduler that restarts within a session continues in the stored
phase; the first start of a new session (``--resume``) clears it.
"""

from dataclasses import dataclass

import msgspec

from staleflow.store.base import Read, Write

_KEY = b"phase"


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """The durable part of a ``Phase``."""

    session: str = ""
    """Id of the start of the run, or of its newest resumption."""
    drained: str = ""
    trained: bool = False
    finished: bool = False
    error: str = ""


@dataclass(slots=True)
class Phase:
    """Phase of the run. It only moves forward, except for ``suspected`` and ``stuck``."""

    session: str = ""
    suspected: str = ""
    """Why further steps may be impossible. No new leases until the groups in flight confirm or refute it."""
    stuck: str = ""
    """Why no further step can be trained in the current state; empty otherwise."""
    stopping: bool = False
    """This scheduler process is shutting down; the run continues."""
    drained: str = ""
    """Why a drain was requested; empty if it was not."""
    trained: bool = False
    """The trainer has reported its end; evaluations may remain."""
    finished: bool = False
    """The trainer has reported its end and no evaluation remains, or a drained run has no trainer."""
    error: str = ""
    """Why the trainer gave up."""
    closed: bool = False
    """The trace is closed; no state changes after this."""

    @property
    def ending(self) -> bool:
        """True if the run is drained, trained or finished: only a new session continues it."""
        return self.finished or self.trained or bool(self.drained)

    @property
    def draining(self) -> bool:
        """True if no new leases are granted."""
        return self.stopping or self.ending

    def save(self, txn: Write) -> None:
        """Write the phase; called in the transaction that its reply waits for."""
        stored = Stored(
            session=self.session,
            drained=self.drained,
            trained=self.trained,
            finished=self.finished,
            error=self.error,
        )
        txn.put("meta", _KEY, msgspec.msgpack.encode(stored))


def is_new_session(txn: Read, session: str) -> bool:
    """Return whether this is the first start of ``session``; False without a session."""
    return bool(session) and session != _stored(txn).session


def load(txn: Read, session: str) -> Phase:
    """Return the stored phase, or a new one if ``session`` is not the stored session; the caller saves it."""
    if is_new_session(txn, session):
        return Phase(session=session)
    stored = _stored(txn)
    return Phase(
        session=stored.session,
        drained=stored.drained,
        trained=stored.trained,
        finished=stored.finished,
        error=stored.error,
    )


def _stored(txn: Read) -> Stored:
    raw = txn.get("meta", _KEY)
    return Stored() if raw is None else msgspec.msgpack.decode(raw, type=Stored)
