"""Exceptions of the ledger. A normal refusal of a peer's request is a ``Rejected`` effect, never an exception.

::

    ConsistencyError
    ├── TransitionError   the state does not allow the event, and no refusal covers it: a bug of the caller
    ├── InvariantError    I1-I6 does not hold: a bug of the ledger
    └── RestoreError      a stored ledger cannot be read back
"""


class ConsistencyError(Exception):
    """Base of the ledger's errors. Its message includes the history of the id concerned, where one is kept."""

    def __init__(self, message: str, story: tuple[str, ...] = ()) -> None:
        super().__init__("\n  ".join((message, *story)))


class TransitionError(ConsistencyError):
    """The event is illegal in this state. Nothing was changed."""


class InvariantError(ConsistencyError):
    """The ledger contradicts an invariant of docs/consistency.md."""


class RestoreError(ConsistencyError):
    """A stored row or the stored globals are not a valid ledger."""
