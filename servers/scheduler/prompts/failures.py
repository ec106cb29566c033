"""Groups that came to nothing, as far as it says why nothing comes at all. In memory: it is soon known again."""

from dataclasses import dataclass

from staleflow.protocols.consistency.effects import Occupied, Pushed, Released, ReleaseWhy
from staleflow.protocols.wire.messages import RegisterRelease

MAX_DETAIL = 500
"""Characters of what was said of one."""


@dataclass(slots=True)
class Row:
    """How often the same thing happened in a row, and the last time."""

    count: int = 0
    detail: str = ""
    first_ms: int = 0
    """When the row began."""

    def add(self, detail: str, now_ms: int = 0) -> None:
        self.first_ms = self.first_ms if self.count else now_ms
        self.count += 1
        self.detail = detail[:MAX_DETAIL]

    def end(self) -> None:
        self.count = 0


class Setbacks:
    """Every count begins anew with the first group that gets further."""

    def __init__(self) -> None:
        self.filtered = Row()
        """The filter did not want them."""
        self.failed = Row()
        """A stage gave them up."""
        self.given_up = Row()
        """A worker gave them up before they were written."""

    def released(self, op: RegisterRelease, effect: Released, now_ms: int) -> None:
        """A shard or a worker let go of a group."""
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
