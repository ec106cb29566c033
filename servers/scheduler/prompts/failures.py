"""Streaks of failed groups, so that ``why`` can explain a stall. Kept in memory: a restart soon observes them again."""

from dataclasses import dataclass

from staleflow.protocols.consistency.effects import Occupied, Pushed, Released, ReleaseWhy
from staleflow.protocols.wire.messages import RegisterRelease

MAX_DETAIL = 500
"""Maximum characters of a stored reason."""


@dataclass(slots=True)
class FailureStreak:
    """Number of failures in a row, and the reason of the newest one."""

    count: int = 0
    detail: str = ""
    first_ms: int = 0
    """Time of the first failure of the streak."""

    def add(self, detail: str, now_ms: int = 0) -> None:
        self.first_ms = self.first_ms if self.count else now_ms
        self.count += 1
        self.detail = detail[:MAX_DETAIL]

    def end(self) -> None:
        self.count = 0


class PromptFailures:
    """Failure streaks by kind. A group that gets past the point of failure ends the streak."""

    def __init__(self) -> None:
        self.filtered = FailureStreak()
        """Groups that the filter rejected."""
        self.failed = FailureStreak()
        """Groups that a stage gave up."""
        self.given_up = FailureStreak()
        """Groups that a rollout worker gave up before it pushed them."""

    def released(self, op: RegisterRelease, effect: Released, now_ms: int) -> None:
        """Count a group that a shard or a worker released."""
        if op.why is ReleaseWhy.FILTERED:
            self.filtered.add(op.detail)
            self.failed.end()
        elif op.why is ReleaseWhy.ABORTED and effect.pushed:
            self.failed.add(op.detail, now_ms)
        elif op.why is ReleaseWhy.ABORTED:
            self.given_up.add(op.detail, now_ms)

    def pushed(self, _: Pushed) -> None:
        self.given_up.end()

    def occupied(self, _: Occupied) -> None:
        self.filtered.end()
        self.failed.end()
