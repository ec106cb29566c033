"""What can go wrong inside the ledger. A peer's normal no is a ``Refused`` effect, never an exception.

::

    ConsistencyError
    ├── TransitionError   an event that the state does not allow came past the refusals: a bug of the caller
    ├── InvariantError    I1-I6 does not hold: a bug of ours
    └── RestoreError      a stored ledger cannot be read back
"""


class ConsistencyError(Exception):
    """Base of the ledger's errors; carries the story of the id it is about, if there is one."""

    def __init__(self, message: str, story: tuple[str, ...] = ()) -> None:
        super().__init__("\n  ".join((message, *story)))


class TransitionError(ConsistencyError):
    """The event is illegal in this state. Nothing was changed."""


class InvariantError(ConsistencyError):
    """The ledger contradicts an invariant of docs/consistency.md."""


class RestoreError(ConsistencyError):
    """A stored row or the stored globals are not a ledger."""
