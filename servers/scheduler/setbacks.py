"""Groups that came to nothing, as far as it says why nothing comes at all. In memory: it is soon known again."""

from dataclasses import dataclass

from staleflow.protocols.consistency.effects import Occupied, Pushed, Released, ReleaseWhy
from staleflow.protocols.consistency.ids import GroupId, WorkerId
from staleflow.protocols.wire.messages import RegisterRelease

MOST = 65_536
"""Groups that are remembered as refused."""
MOST_DETAIL = 500
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
        self.detail = detail[:MOST_DETAIL]

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
        self.refused: dict[GroupId, Row] = {}
        """Groups that an engine can never serve, how often it said so, and why; each until it is pushed after all."""
        self.refusers: dict[WorkerId, None] = {}
        """Who refused them since anything was pushed."""
        self.refused_in_a_row: dict[GroupId, None] = {}
        self.newest_refused = GroupId(-1)

    def released(self, peer: str, op: RegisterRelease, effect: Released, now_ms: int) -> None:
        """A shard or a worker let go of a group."""
        if op.why is ReleaseWhy.FILTERED:
            self.filtered.add(op.detail)
            self.failed.end()
        elif op.why is ReleaseWhy.ABORTED and effect.pushed:
            self.failed.add(op.detail, now_ms)
        elif op.why is ReleaseWhy.ABORTED:
            self.given_up.add(op.detail, now_ms)
            if op.hopeless:
                self._refused(WorkerId(peer), op)

    def _refused(self, worker: WorkerId, op: RegisterRelease) -> None:
        self.refused.setdefault(op.group, Row()).add(op.detail)
        self.newest_refused = op.group
        self.refusers[worker] = None
        self.refused_in_a_row[op.group] = None
        for kept in (self.refused, self.refused_in_a_row):
            if len(kept) > MOST:
                del kept[next(iter(kept))]

    def pushed(self, effect: Pushed) -> None:
        self.given_up.end()
        if self.refused:
            self.refused.pop(effect.group, None)
            self.refusers.clear()
            self.refused_in_a_row.clear()

    def occupied(self, _: Occupied) -> None:
        self.filtered.end()
        self.failed.end()
