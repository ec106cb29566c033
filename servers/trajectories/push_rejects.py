"""Report pushes that the shard rejected to the scheduler, so that the trace has a ``reject`` line for them.

At most one report per worker and code is in flight; rejections in the meantime are counted into the next one. A worker
that sends only garbage therefore cannot fill the queue to the scheduler.
"""

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import PushItem, RegisterReject, Result
from staleflow.servers.trajectories.registrar import Registrar


class PushRejects:
    """Count rejected pushes until they are reported to the scheduler."""

    def __init__(self, registrar: Registrar) -> None:
        self._registrar = registrar
        self._pending: dict[tuple[WorkerId, Code], RegisterReject | None] = {}
        """Next report per worker and code whose previous report is in flight."""

    def note(self, item: PushItem, code: Code) -> None:
        """Report one rejected push."""
        key = item.worker, code
        reject = RegisterReject(group=item.group, lease=item.lease, worker=item.worker, code=code)
        if key not in self._pending:
            self._send(reject)
        elif (waiting := self._pending[key]) is None:
            self._pending[key] = reject
        else:
            self._pending[key] = RegisterReject(
                group=item.group, lease=item.lease, worker=item.worker, code=code, count=waiting.count + 1
            )

    def _send(self, reject: RegisterReject) -> None:
        key = reject.worker, reject.code
        self._pending[key] = None

        def sent(_: Result) -> None:
            following = self._pending.pop(key)
            if following is not None:
                self._send(following)

        self._registrar.add(reject, sent)
