"""The protocol as the paper writes it: versioned buffers of ``batch_size`` places, filled entry by entry.

The model is deliberately naive and independent of the machine: it has no counters, no Hall condition and no
deadlines-first order. Occupy is greedy: a finished entry takes the earliest buffer that still leaves the unfinished
entries a place.
"""

from dataclasses import dataclass, field


@dataclass
class Entry:
    group: int
    version: int
    """Oldest version."""
    newest: int
    occupied: int = 0
    """Rank of its occupation, counted from 1; 0 if it is not occupied."""


@dataclass
class Naive:
    """Ledger with the trajectory bound (or token bound, where an entry fits every buffer); no spares, no claims."""

    max_staleness: int
    batch_size: int
    token_bound: bool = False
    version: int = 0
    step: int = 0
    clock: int = 0
    live: list[Entry] = field(default_factory=list[Entry])
    sealed: dict[int, list[Entry]] = field(default_factory=dict[int, list[Entry]])
    """Sealed and consumed batches by step."""

    # --- buffers ---

    def latest(self, entry: Entry) -> int:
        return entry.version + self.max_staleness

    def place(self, entry: Entry, buffers: dict[int, list[Entry]], tried: set[int], first: int) -> bool:
        """Put an entry into the latest buffer allowed, moving entries between buffers if none is free."""
        for number in range(self.latest(entry), first - 1, -1):
            if number in tried:
                continue
            tried.add(number)
            buffer = buffers.setdefault(number, [])
            if len(buffer) < self.batch_size:
                buffer.append(entry)
                return True
            for other in list(buffer):
                buffer.remove(other)
                if self.place(other, buffers, tried, first):
                    buffer.append(entry)
                    return True
                buffer.append(other)
        return False

    def fits(self, entries: list[Entry], first: int, buffers: dict[int, list[Entry]] | None = None) -> bool:
        """Return True if every entry finds a place in buffers first, first + 1, ..., beside their present entries."""
        layout = {number: list(buffer) for number, buffer in (buffers or {}).items()}
        return all(self.place(entry, layout, set(), first) for entry in entries)

    def first_buffer(self) -> list[Entry]:
        """Return the entries that greedy Occupy puts into the buffer of the next step."""
        buffer: list[Entry] = []
        rest = list(self.live)
        for entry in sorted((e for e in self.live if e.occupied), key=lambda e: (self.order(e), e.occupied)):
            without = [other for other in rest if other is not entry]
            places = len(buffer) < self.batch_size
            if places and (self.token_bound or self.still_fits(buffer, entry, without)):
                buffer.append(entry)
                rest = without
        return buffer

    def still_fits(self, buffer: list[Entry], entry: Entry, rest: list[Entry]) -> bool:
        """Return True if ``rest`` has places once ``buffer`` and ``entry`` are fixed in the buffer of the next step."""
        if len(buffer) + 1 == self.batch_size:
            return self.fits(rest, self.step + 1)
        blocked = Entry(-1, self.step - self.max_staleness, self.step)
        return self.fits([blocked] * (len(buffer) + 1) + rest, self.step)

    def order(self, entry: Entry) -> int:
        return 0 if self.token_bound else entry.version

    # --- operations: return True if granted ---

    def may_reserve(self, version: int) -> bool:
        if not 0 <= version <= self.version:
            return False
        if self.token_bound:
            return len(self.live) < self.batch_size * (self.version + self.max_staleness - self.step + 1)
        return self.fits([*self.live, Entry(-1, version, version)], self.step)

    def reserve(self, group: int, version: int) -> bool:
        if not self.may_reserve(version):
            return False
        self.live.append(Entry(group, version, version))
        return True

    def push(self, group: int, newest: int) -> None:
        self.find(group).newest = newest

    def occupy(self, group: int) -> None:
        self.clock += 1
        self.find(group).occupied = self.clock

    def leave(self, group: int) -> None:
        self.live.remove(self.find(group))

    def find(self, group: int) -> Entry:
        return next(entry for entry in self.live if entry.group == group)

    def ready(self) -> list[int] | None:
        """Return the batch of the next step, or None if it cannot be sealed now."""
        if self.step > self.version + 1:
            return None
        buffer = self.first_buffer()
        return [entry.group for entry in buffer] if len(buffer) == self.batch_size else None

    def seal(self) -> list[tuple[int, list[int]]]:
        """Seal every step that is ready; return the new batches."""
        done: list[tuple[int, list[int]]] = []
        while (groups := self.ready()) is not None:
            done.append((self.step, groups))
            self.take(groups)
        return done

    def take(self, groups: list[int]) -> None:
        batch = [self.find(group) for group in groups]
        self.live = [entry for entry in self.live if entry.group not in groups]
        self.sealed[self.step] = batch
        self.step += 1

    def consume(self) -> None:
        self.version += 1

    def unseal(self, group: int) -> None:
        """Take back the batch of a member whose payload is corrupt, and all later batches."""
        at = next(step for step, batch in self.sealed.items() if any(entry.group == group for entry in batch))
        for step in [step for step in self.sealed if step >= at]:
            self.live += self.sealed.pop(step)
        self.step = at
        self.leave(group)

    def rollback(self, to: int) -> list[tuple[int, list[int]]]:
        """Roll back to version ``to``; the batch of step ``to`` is sealed again first."""
        replay = [entry.group for entry in self.sealed.get(to, [])]
        for step in [step for step in self.sealed if step >= to]:
            self.live += self.sealed.pop(step)
        self.live = [entry for entry in self.live if max(entry.version, entry.newest) <= to]
        self.version = self.step = to
        if not replay:
            return self.seal()
        self.take(replay)
        return [(to, replay), *self.seal()]
