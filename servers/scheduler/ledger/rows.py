"""Rows of the ledger in the store, keyed by their place, so that rows that change together share pages.

Group ids arrive in shuffled order, so keys by group would dirty one page of the map per row; leases arrive in order.
"""

import msgspec

from staleflow.protocols.consistency.limits import Limits
from staleflow.protocols.consistency.machine import Machine
from staleflow.store.base import Read, Write, key_number, number_key

TABLE = "groups"

_LEDGER = b"ledger"
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[int | str | bool]).decode


class LedgerRows:
    """Reader and writer of the stored rows; knows the place of each row."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}

    def save(self, txn: Write, machine: Machine) -> None:
        """Write the changed rows and the globals."""
        places = self._places
        for key in machine.take_dirty():
            row = machine.row(key)
            before = places.get(key)
            place = -1 if row is None else machine.place(key)
            if before is not None and before != place:  # deleted, or leased again at another place
                del places[key]
                txn.delete(TABLE, number_key(before))
            if row is not None:
                places[key] = place
                txn.put(TABLE, number_key(place), _encode((key, *row)))
        txn.put("meta", _LEDGER, _encode(machine.globals_row()))

    def load(self, txn: Read, limits: Limits, now_ms: int) -> Machine:
        """Return the last saved machine and remember the places of its rows; a new machine if nothing was saved."""
        self._places.clear()
        raw = txn.get("meta", _LEDGER)
        if raw is None:
            return Machine(limits)
        rows: dict[int, list[int | str | bool]] = {}
        for place, stored in txn.items(TABLE):
            key, *row = _decode(stored)
            self._places[int(key)] = key_number(place)
            rows[int(key)] = row
        return Machine.restore(limits, _decode(raw), rows.items(), now_ms)
