"""Group ids that may never be used again, one bit each.

The prompt cursor deals ids densely, epoch after epoch, so whole pages fill up: a full page at the floor is replaced by
a higher floor. What is kept is one page for every 64 ids of the epochs under way, however long the run.
"""

PAGE_BITS = 64
FULL = (1 << PAGE_BITS) - 1


class Retired:
    """A set of ids that only grows. ``floor``: every page below it is full."""

    __slots__ = ("floor", "pages")

    def __init__(self) -> None:
        self.floor = 0
        self.pages: dict[int, int] = {}

    def __contains__(self, id: int) -> bool:
        page = id // PAGE_BITS
        return page < self.floor or (page in self.pages and bool(self.pages[page] >> id % PAGE_BITS & 1))

    def add(self, id: int) -> list[int]:
        """Retire ``id``; the pages that changed or went away."""
        page, bit = divmod(id, PAGE_BITS)
        if page < self.floor:
            return []
        self.pages[page] = self.pages.get(page, 0) | 1 << bit
        changed = [page]
        while self.pages.get(self.floor) == FULL:
            del self.pages[self.floor]
            changed.append(self.floor)
            self.floor += 1
        return changed
