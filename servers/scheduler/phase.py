"""Where the run is in its life, as far as it is not in the ledger."""

from dataclasses import dataclass


@dataclass(slots=True)
class Phase:
    """Only ever moves forward, but for ``stuck``."""

    suspected: str = ""
    """Why no further step may ever be trained: nothing new starts until the groups under way have shown it."""
    stuck: str = ""
    """Why no further step can ever be trained, as things are now."""
    draining: bool = False
    """No new leases."""
    finished: bool = False
    """The trainer said that it is done, or gave up."""
    error: str = ""
    """Why it gave up."""
    closed: bool = False
    """The trace is closed: nothing changes any more."""
