"""Constants of a run: the staleness bound, the sizes and the policies of the ledger."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

MAX_STALENESS: Final = 1024
"""Largest accepted ``max_staleness``. The window has one step for each version of staleness and the status one row for
each step, so the cost grows with it, and data a thousand versions old is useless for training."""


class Bound(StrEnum):
    """Unit to which the staleness bound applies."""

    TRAJECTORY = "trajectory"
    """Every token of a trained group is at most ``max_staleness`` versions old."""
    TOKEN = "token"
    """Every trained token is at most ``max_staleness`` versions old; older tokens of a group stay as context with loss
    mask 0."""


class OnOverdue(StrEnum):
    """Policy for a group that pins the step the trainer waits for (trajectory bound)."""

    WAIT = "wait"
    TRUNCATE = "truncate"
    RETRY = "retry"
    DROP = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The constants of a ledger. ``ValueError`` names the field, its value and the allowed range."""

    max_staleness: int
    """Largest number of versions between a group's oldest token and the step that trains it."""
    batch_size: int
    """Number of groups that one train step consumes."""
    lease_ms: int = 30_000
    """Milliseconds without a renewal after which a holder loses its leases."""
    bound: Bound = Bound.TRAJECTORY
    on_overdue: OnOverdue = OnOverdue.WAIT
    min_trainable: float = 0.0
    """Token bound: share of trainable tokens, in [0, 1], below which an occupied group is dropped."""
    max_spares: int = 0
    """Maximum number of live spare (redundant) groups, in addition to the counted ones."""
    debug: bool = False
    """Check every invariant after every event. Each check costs a pass over the ledger."""

    def __post_init__(self) -> None:
        if self.max_staleness > MAX_STALENESS:
            raise ValueError(f"max_staleness is {self.max_staleness}; it must be at most {MAX_STALENESS}")
        for name, low in (("max_staleness", 0), ("batch_size", 1), ("lease_ms", 1), ("max_spares", 0)):
            if (value := getattr(self, name)) < low:
                raise ValueError(f"{name} is {value}; it must be at least {low}")
        if not 0.0 <= self.min_trainable <= 1.0:
            raise ValueError(f"min_trainable is {self.min_trainable}; it must lie in [0, 1]")
