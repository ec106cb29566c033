"""What is fixed for a run: the bound, the sizes and the choices of the ledger."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

MAX_STALENESS: Final = 1024
"""The window has a step for each version of staleness, and a status a row for each of them. Training on data a thousand
versions old is no use to anybody."""


class Bound(StrEnum):
    """What the staleness bound is a promise about."""

    TRAJECTORY = "trajectory"
    """Every token of a trained group is at most ``max_staleness`` versions old."""
    TOKEN = "token"
    """Every trained token is; older tokens of a group stay as context with loss mask 0."""


class OnOverdue(StrEnum):
    """What happens to a group that pins the step the trainer waits for (trajectory bound)."""

    WAIT = "wait"
    TRUNCATE = "truncate"
    RETRY = "retry"
    DROP = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The constants of a ledger. ``ValueError`` names the field, its value and what is allowed."""

    max_staleness: int
    """Versions between a group's oldest token and the step that trains it."""
    batch_size: int
    """Groups that one train step consumes."""
    lease_ms: int = 30_000
    """A holder not heard from for this long loses its leases."""
    bound: Bound = Bound.TRAJECTORY
    on_overdue: OnOverdue = OnOverdue.WAIT
    min_trainable: float = 0.0
    """Token bound: an occupied group whose share of trainable tokens would fall below this is dropped."""
    max_spares: int = 0
    """Spare (redundant) groups that may be live at once, beyond those that are counted."""
    debug: bool = False
    """Check every invariant after every event. Costs a pass over the ledger each time."""

    def __post_init__(self) -> None:
        if self.max_staleness > MAX_STALENESS:
            raise ValueError(f"max_staleness is {self.max_staleness}; it must be at most {MAX_STALENESS}")
        for name, low in (("max_staleness", 0), ("batch_size", 1), ("lease_ms", 1), ("max_spares", 0)):
            if (value := getattr(self, name)) < low:
                raise ValueError(f"{name} is {value}; it must be at least {low}")
        if not 0.0 <= self.min_trainable <= 1.0:
            raise ValueError(f"min_trainable is {self.min_trainable}; it must lie in [0, 1]")
