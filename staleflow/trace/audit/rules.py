"""Apply the rules to one event after the other, and check the conditions between events."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from staleflow.protocols.consistency.limits import Bound, OnOverdue
from staleflow.trace import events as ev
from staleflow.trace.audit import group_rules as groups
from staleflow.trace.audit import step_rules as steps
from staleflow.trace.audit.state import Batch, Books, Rule, State

_HANDLERS: dict[type, Callable[[Books, Any], object]] = {
    ev.Open: steps.opened,
    ev.Close: steps.closed,
    ev.Publish: steps.publish,
    ev.Pull: steps.pull,
    ev.Join: steps.join,
    ev.Seal: steps.seal,
    ev.Unseal: steps.unseal,
    ev.Deliver: steps.deliver,
    ev.Consume: steps.consume,
    ev.CheckpointKept: steps.checkpoint,
    ev.Reserve: groups.reserve,
    ev.Promote: groups.promote,
    ev.Push: groups.push,
    ev.Occupy: groups.occupy,
    ev.Release: groups.release,
    ev.Drop: groups.drop,
    ev.Claim: groups.claim,
}
_AFTER_READY = (ev.Seal, ev.Promote, ev.Drop, ev.Release, ev.Publish, ev.Unseal, ev.Rollback)
"""Events that may precede the seal of a ready step in the same transaction."""
_IN_ROLLBACK = (ev.Release, ev.Drop, ev.Promote, ev.Seal)
_CHANGES = (ev.Reserve, ev.Push, ev.Occupy, ev.Release, ev.Drop, ev.Promote, ev.Claim, ev.Seal, ev.Unseal, ev.Publish)


class Recount:
    """The rules, applied to one trace. ``fail`` takes a rule, the problem, and the seq of the line."""

    def __init__(self, fail: Callable[[Rule, str, int], None], checks: Counter[str]) -> None:
        self._seq = 0
        self.books = Books(lambda rule, why: fail(rule, why, self._seq), checks)
        self.staleness: Counter[int] = Counter()
        self.steps = self.tokens = self.masked = 0
        self.closed = False
        self._ready = False
        self._must_publish = False
        self._released = -1
        """Group of the previous line, if that was a release: it may be leased again in the same transaction."""
        self._rolling_back = False
        self._replay: Batch | None = None

    def event(self, e: ev.AnyEvent, seq: int) -> None:
        """Apply one event."""
        self._seq = seq
        books = self.books
        if books.settings is None and not isinstance(e, ev.Open):
            books.fail(Rule.RECOVERY, "the trace does not begin with open")
            books.settings = _unknown()
        self._check_order(e)
        if isinstance(e, ev.Rollback):
            self._replay = steps.rollback(books, e)
            self._rolling_back = True
            return
        if isinstance(e, ev.Seal):
            books.replaying = self._replay is not None
            self._sealed(e)
        handler = _HANDLERS.get(type(e))
        if handler is not None:
            handler(books, e)
        self._update_flags(e)
        if isinstance(e, _CHANGES) and not self._rolling_back:
            self._balance()

    def _check_order(self, e: ev.AnyEvent) -> None:
        """Check what the previous event requires of this one."""
        books = self.books
        if self._must_publish or isinstance(e, ev.Publish):
            expected = self._must_publish or (isinstance(e, ev.Publish) and e.version == 0)
            books.expect(Rule.I5, expected and isinstance(e, ev.Publish), "a consume and its publish belong together")
            self._must_publish = False
        leased_again = isinstance(e, ev.Reserve) and e.group == self._released
        self._released = e.group if isinstance(e, ev.Release) else -1
        if self._ready and not leased_again and not isinstance(e, _AFTER_READY):
            books.fail(Rule.PROGRESS, f"step {books.step} was ready, but {type(e).__name__.lower()} came first")
            self._ready = False
        if self._rolling_back and not isinstance(e, _IN_ROLLBACK):
            self._rolling_back = False
            if self._replay is not None:
                books.expect(Rule.ROLLBACK, False, f"the batch of step {self._replay.step} was not sealed again")
                self._replay = None
            steps.rolled_back(books)
            self._balance()

    def _sealed(self, e: ev.Seal) -> None:
        books = self.books
        if self._replay is not None:
            same = [int(m.group) for m in e.members] == self._replay.members and e.digest == self._replay.digest
            books.expect(Rule.ROLLBACK, same, f"batch {e.batch} replays step {e.step}, but it is another batch")
            self._replay = None
        elif self._ready:
            books.count(Rule.PROGRESS)
        self._ready = False
        for member in e.members:
            self.staleness[e.step - member.version] += 1
        self.tokens += e.tokens
        self.masked += e.masked_tokens

    def _update_flags(self, e: ev.AnyEvent) -> None:
        if isinstance(e, ev.Consume):
            self.steps = int(e.step) + 1
            self._must_publish = True
        elif isinstance(e, ev.Open | ev.Close):
            self.closed = isinstance(e, ev.Close)

    def _balance(self) -> None:
        """Check Hall's condition, conservation and readiness, after an event that can change them."""
        books = self.books
        books.count(Rule.I6)
        states = books.states
        reserved = books.releases + books.occupies + states[State.LEASED] + states[State.PUSHED]
        later = states[State.SEALED] + states[State.CONSUMED] + books.consumed_total
        if books.reserves != reserved or books.occupies != books.drops + states[State.OCCUPIED] + later:
            books.fail(Rule.I6, f"{books.reserves} reserves, {books.occupies} occupies, now {dict(states)}")
            books.reserves, books.occupies = reserved, books.drops + states[State.OCCUPIED] + later
        if not books.token_bound:
            books.count(Rule.I2)
            if violation := books.hall():
                books.fail(Rule.I2, violation)
        self._ready = not self._must_publish and books.ready()

    def finish(self) -> None:
        """Check the end of a rollback; called when no further line follows for now."""
        if self._rolling_back and self._replay is None:
            steps.rolled_back(self.books)

    def state_counts(self) -> dict[str, int]:
        """Return the number of groups in each state at the end."""
        counts = {state.name.lower(): self.books.states[state] for state in State}
        return counts | {"consumed": counts["consumed"] + self.books.consumed_total}


def _unknown() -> ev.Open:
    empty = ev.Recovered(reserved=0, occupied=0, sealed=0, last_seq=0, lineage=0, version=-1)  # type: ignore[arg-type]
    return ev.Open(
        max_staleness=0,
        batch_size=1,
        group_size=1,
        bound=Bound.TRAJECTORY,
        min_trainable=0.0,
        on_overdue=OnOverdue.WAIT,
        lease_ms=1,
        protocol=0,
        config_sha="",
        recovered=empty,
    )
