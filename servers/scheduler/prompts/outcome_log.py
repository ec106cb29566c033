"""Log of the outcomes of submitted rows in the scheduler's store, and the mean rewards of the stored rows."""

import struct

import msgspec

from staleflow.protocols.consistency.ids import GroupId, Step
from staleflow.protocols.wire.messages import SUBMITTED_ROWS, Outcome, RowResult
from staleflow.store.base import Read, Write, key_number, number_key

OUTCOMES, REWARDS = "outcomes", "rewards"
TABLES = (OUTCOMES, REWARDS)
"""Store tables: outcomes by their number, and mean rewards by row."""
MAX_OUTCOMES = 65_536
"""Maximum number of stored outcomes; beyond it, the oldest one is deleted."""
_REWARD = struct.Struct("<d")


class OutcomeLog:
    """Appends outcomes; the owner saves them with the next commit."""

    def __init__(self) -> None:
        self.newest = 0
        """Number of the newest durable outcome; 0: none."""
        self._new: list[Outcome] = []
        self._rewards: dict[int, float] = {}
        self._changed_rewards: set[int] = set()

    def score(self, row: int, reward: float) -> None:
        """Record the mean reward of a row, for its outcome."""
        self._rewards[row] = reward
        self._changed_rewards.add(row)

    def forget(self, row: int) -> None:
        """Delete the reward of a row that no group needs any more; no-op if it has none."""
        if self._rewards.pop(row, None) is not None:
            self._changed_rewards.add(row)

    def add(self, group: GroupId, result: RowResult, step: Step | None = None) -> None:
        """Append the outcome of a group's row."""
        row = group % SUBMITTED_ROWS
        number = self.newest + len(self._new) + 1
        reward = self._rewards.get(row)
        self._new.append(Outcome(number=number, row=row, result=result, group=group, step=step, reward=reward))

    # --- storage -------------------------------------------------------------------------------------------------

    def load(self, txn: Read) -> None:
        """Restore the last saved state."""
        self._new, self._changed_rewards, self.newest = [], set(), 0
        for key in txn.keys(OUTCOMES):
            self.newest = key_number(key)
        self._rewards = {key_number(key): _REWARD.unpack(value)[0] for key, value in txn.items(REWARDS)}

    @property
    def changed(self) -> bool:
        """True if unsaved changes exist."""
        return bool(self._new or self._changed_rewards)

    def save(self, txn: Write) -> None:
        """Write the changes since the last call of ``saved``, and delete the oldest outcomes."""
        for outcome in self._new:
            txn.put(OUTCOMES, number_key(outcome.number), msgspec.msgpack.encode(outcome))
            if outcome.number > MAX_OUTCOMES:
                txn.delete(OUTCOMES, number_key(outcome.number - MAX_OUTCOMES))
        for row in sorted(self._changed_rewards):
            if (reward := self._rewards.get(row)) is None:
                txn.delete(REWARDS, number_key(row))
            else:
                txn.put(REWARDS, number_key(row), _REWARD.pack(reward))

    def saved(self) -> None:
        """Note that the changes of ``save`` are durable."""
        self.newest += len(self._new)
        self._new, self._changed_rewards = [], set()


def outcomes_after(txn: Read, number: int, at_most: int) -> list[Outcome]:
    """Return the first ``at_most`` committed outcomes after ``number``, in order."""
    found = list[Outcome]()
    for _, value in txn.items(OUTCOMES, number_key(number + 1)):
        if len(found) == at_most:
            break
        found.append(msgspec.msgpack.decode(value, type=Outcome))
    return found
