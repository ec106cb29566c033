"""Messages to the scheduler: prompts that clients submit at run time, and their outcomes."""

from enum import StrEnum
from typing import Any

from staleflow.protocols.consistency.ids import GroupId, Step
from staleflow.protocols.wire.messages.base import Count, Message, Part

SUBMITTED_ROWS = 10**9
"""Maximum number of rows that clients may submit to one run. Group ``n * SUBMITTED_ROWS + row`` is the n-th return of
a row."""


MAX_ROWS = 1024
"""Maximum number of rows in one message: checking and encoding them blocks other requests for some milliseconds."""


class SubmitPrompts(Message, frozen=True, kw_only=True):
    """Append rows to the prompts of the run, in order. -> SubmitPromptsReply, once they are durable

    The same ``id`` with the same rows has one effect; with other rows it is a ``conflict``. ``busy`` while too many
    rows are pending.
    """

    id: str
    """Name of this submission, chosen by the client: 1 to 200 bytes."""
    rows: list[dict[str, Any]]
    """Columns of each row, as in a file of prompts; at most 1,024 rows, and at most ``prompts.max_pending``."""
    last: bool = False
    """No client will submit any more rows: the run ends as with a finite source."""


class SubmitPromptsReply(Message, frozen=True, kw_only=True):
    """The rows are durable, and numbered in their order."""

    first: Count
    """Number of the first row."""


class GetSubmittedRows(Message, frozen=True, kw_only=True):
    """A shard requests submitted rows that it does not have. -> SubmittedRows"""

    rows: list[int]
    """Numbers of at most 1,024 rows."""
    most_bytes: Count = 16 << 20
    """Maximum size of the reply's frame; its first row may exceed it."""


class SubmittedRows(Message, frozen=True, kw_only=True):
    """As many of the first requested rows as fit, in one frame, one after another."""

    sizes: list[int]
    """Size of each row, msgpack, in bytes; -1: the row is deleted, or was never submitted."""


class RowResult(StrEnum):
    """The end of a row."""

    TRAINED = "trained"
    FILTERED = "filtered"
    """Its rewards were equal (``rollout.filter``)."""
    GIVEN_UP = "given_up"
    """It failed too often, or the trainer could not train it."""


class Outcome(Part, frozen=True, kw_only=True):
    """The end of one row."""

    number: Count
    """Outcomes count from 1. A gap means that the run deleted the outcomes between."""
    row: Count
    """Number of the row, as returned by its submission."""
    result: RowResult
    """``trained``, ``filtered`` (``rollout.filter``), or ``given_up`` (after failures)."""
    group: GroupId
    step: Step | None = None
    """Step that trained it. After a rollback the row may be trained again: its newest outcome counts."""
    reward: float | None = None
    """Mean reward of its samples; None if they have none."""


class GetOutcomes(Message, frozen=True, kw_only=True):
    """Request the outcomes after number ``since``. -> Outcomes, at once or within ``wait_ms``"""

    since: Count = 0
    """Number of the last outcome that the client has; 0: none."""
    most: Count = 1000
    """Maximum number of outcomes in the reply."""
    wait_ms: int = 10_000


class Outcomes(Message, frozen=True, kw_only=True):
    """Reply to ``GetOutcomes``."""

    outcomes: list[Outcome]
    """In the order of their numbers; empty after ``wait_ms``."""
    ended: bool = False
    """The run has ended: there are no later outcomes."""
