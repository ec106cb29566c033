"""Rate limit of ``reject`` and ``auth`` trace lines: one a second for each peer and code, with the number of events."""

from collections.abc import Callable

import msgspec
from msgspec import UNSET

from staleflow.protocols.consistency.effects import Rejected
from staleflow.protocols.wire.messages import RegisterPush, RegisterReject
from staleflow.trace.events import Auth, Reject, TraceEvent
from staleflow.trace.writer import Trace

LINE_INTERVAL_MS = 1_000
MAX_PEERS = 4_096
"""Maximum number of (peer, code) pairs with their own line; further peers share one line for each code."""


class Rejects:
    """Counter of refusals; ``flush`` writes the lines that are due."""

    def __init__(self, trace: Trace, rejected: Callable[[str, int], None]) -> None:
        self._trace = trace
        self._rejected = rejected
        self._next_ms: dict[tuple[str, str], int] = {}
        self._waiting: dict[tuple[str, str], Reject | Auth] = {}

    def refused(self, peer: str, effect: Rejected, now_ms: int) -> None:
        """Count a rejection by the ledger."""
        group = UNSET if effect.group is None else effect.group
        lease = UNSET if effect.lease is None else effect.lease
        self._note(
            Reject(
                op=effect.op, worker=effect.worker or peer, group=group, lease=lease, count=1, code=effect.code.value
            ),
            (peer, effect.code.value),
            now_ms,
        )
        self._rejected(effect.code.value, 1)

    def push_refused(
        self, peer: str, op: RegisterPush | RegisterReject, code: str, now_ms: int, *, count: int = 1
    ) -> None:
        """Count a push that the scheduler or the shard ``peer`` refused before it reached the ledger."""
        line = Reject(op="push", worker=op.worker, group=op.group, lease=op.lease, count=count, code=code)
        key = op.worker if isinstance(op, RegisterReject) else peer
        self._note(line, (key, code), now_ms)
        self._rejected(code, count)

    def plain(self, peer: str, op: str, code: str, now_ms: int) -> None:
        """Count a refusal outside the ledger, by the transport or the service."""
        self._note(Reject(op=op, worker=peer, count=1, code=code), (peer, code), now_ms)
        self._rejected(code, 1)

    def auth(self, peer: str, role: str, why: str, *, ok: bool, now_ms: int) -> None:
        """Count an authentication attempt of ``peer`` as ``role``, and its outcome."""
        self._note(Auth(peer=peer, role=role, ok=ok, why=why, count=1), (peer, f"auth {ok}"), now_ms)

    def due(self, peer: str, kind: str, now_ms: int) -> bool:
        """Return whether a line of that kind, which carries no count, may be written for ``peer`` now."""
        key = self._key(peer, kind)
        if now_ms < self._next_ms.get(key, 0):
            return False
        self._next_ms[key] = now_ms + LINE_INTERVAL_MS
        return True

    def _key(self, peer: str, kind: str) -> tuple[str, str]:
        key = (peer, kind)
        return key if key in self._next_ms or len(self._next_ms) < MAX_PEERS else ("", kind)

    def _note(self, line: Reject | Auth, key: tuple[str, str], now_ms: int) -> None:
        key = self._key(*key)
        waiting = self._waiting.get(key)
        if waiting is not None:
            self._waiting[key] = msgspec.structs.replace(waiting, count=waiting.count + line.count)
        elif now_ms >= self._next_ms.get(key, 0):
            self._write(key, line, now_ms)
        else:
            self._waiting[key] = line

    def flush(self, now_ms: int) -> None:
        """Write the lines whose second has passed, and forget peers without refusals for ten seconds."""
        for key in [key for key in self._waiting if self._next_ms[key] <= now_ms]:
            self._write(key, self._waiting.pop(key), now_ms)
        for key in [key for key, due_ms in self._next_ms.items() if due_ms + 10 * LINE_INTERVAL_MS < now_ms]:
            del self._next_ms[key]

    def _write(self, key: tuple[str, str], line: TraceEvent, now_ms: int) -> None:
        self._trace.add(line)
        self._next_ms[key] = now_ms + LINE_INTERVAL_MS
