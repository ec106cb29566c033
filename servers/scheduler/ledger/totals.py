"""Counters since the start of the run. They are stored with the ledger and continue across restarts."""

import msgspec

from staleflow.protocols.consistency.effects import (
    Consumed,
    Dropped,
    Occupied,
    Pushed,
    Released,
    Reserved,
    Sealed,
)
from staleflow.protocols.consistency.ids import Version
from staleflow.protocols.wire.messages.status import RunTotals
from staleflow.store.base import Read, Write

_KEY = b"totals"


class Totals:
    """Updates the counters from effects."""

    def __init__(self) -> None:
        self.counts = RunTotals()

    def load(self, txn: Read) -> None:
        """Restore the last saved counters."""
        raw = txn.get("meta", _KEY)
        self.counts = RunTotals() if raw is None else msgspec.msgpack.decode(raw, type=RunTotals)

    def save(self, txn: Write) -> None:
        """Write the counters."""
        txn.put("meta", _KEY, msgspec.msgpack.encode(self.counts))

    def reserved(self, _: Reserved) -> None:
        self.counts.reserves += 1

    def pushed(self, effect: Pushed) -> None:
        self.counts.pushes += 1
        self.counts.tokens_pushed += sum(segment.tokens for segment in effect.segments)

    def occupied(self, _: Occupied) -> None:
        self.counts.occupies += 1

    def released(self, effect: Released) -> None:
        _add(self.counts.releases, effect.why.value)

    def dropped(self, effect: Dropped) -> None:
        _add(self.counts.drops, effect.why.value)

    def sealed(self, effect: Sealed, oldest: Version) -> None:
        """Count violations. ``oldest``: the minimum version that the bound allows in this batch."""
        self.counts.violations += sum(member.version < oldest for member in effect.members)

    def consumed(self, effect: Consumed, sealed: Sealed, samples: int) -> None:
        """Count a trained step. ``sealed``: its batch, of ``samples`` trajectories."""
        counts = self.counts
        counts.steps += 1
        for member in sealed.members:
            age = effect.step - member.version
            counts.staleness[age] = counts.staleness.get(age, 0) + 1
        counts.tokens_trained += sealed.tokens - sealed.masked_tokens
        counts.tokens_masked += sealed.masked_tokens
        counts.samples_trained += samples

    def rejected(self, code: str, count: int) -> None:
        _add(self.counts.rejects, code, count)


def _add(counts: dict[str, int], key: str, count: int = 1) -> None:
    counts[key] = counts.get(key, 0) + count
