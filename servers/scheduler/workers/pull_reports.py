"""Validation of ``Pulled`` reports before they are traced.

A rollout worker may report only for itself, only a published version that no rollback has abandoned, and only with the
published digest. Every other report is refused and traced as ``reject``. The digests of versions that a worker may
still load are stored beside the ledger, so that they survive a restart of the scheduler.
"""

from staleflow.net.endpoint import Call
from staleflow.protocols.consistency.effects import Code, Published
from staleflow.protocols.consistency.ids import Version
from staleflow.protocols.wire.messages import Done, Pulled
from staleflow.servers.scheduler.ledger.pending_replies import PendingReplies
from staleflow.servers.scheduler.ledger.rejects import Rejects
from staleflow.servers.scheduler.state import SchedulerState
from staleflow.store.base import Write, key_number, number_key
from staleflow.trace import events as trace_events

LATE_VERSIONS = 64
"""Number of unused versions whose digests are kept: a worker may report one that it started to load earlier."""
_PREFIX = b"sha/"


class PullReports:
    """Checks each ``Pulled`` and writes ``pull`` lines."""

    def __init__(self, state: SchedulerState, replies: PendingReplies, rejects: Rejects) -> None:
        self._interpreter, self._registry, self._instances = state.interpreter, state.registry, state.instances
        self._replies = replies
        self._rejects = rejects
        self._digests: dict[Version, str] = {}
        """Digest of the newest publish by version, possibly including versions that a rollback has abandoned."""
        with state.interpreter.store.read() as txn:
            for key, value in txn.items("meta", _PREFIX):
                if not key.startswith(_PREFIX):  # ``items`` starts at the prefix but continues to the end of the table
                    break
                self._digests[Version(key_number(key.removeprefix(_PREFIX)))] = value.decode()

    def on_published(self, effect: Published) -> None:
        """Store the digest, and discard those that no worker can load any more."""
        self._digests[effect.version] = effect.sha
        machine = self._interpreter.machine
        used = {version for _, version in machine.versions_in_use()}
        oldest = effect.version - machine.limits.max_staleness - LATE_VERSIONS
        gone = [version for version in self._digests if version < oldest and version not in used]
        for version in gone:
            del self._digests[version]

        def write(txn: Write) -> None:
            txn.put("meta", _key(effect.version), effect.sha.encode())
            for version in gone:
                txn.delete("meta", _key(version))

        self._interpreter.with_commit(write)

    def pulled(self, call: Call, body: Pulled) -> None:
        """Handle one report."""
        now = self._interpreter.clock.now_ms()
        instance = self._instances.get(body.worker)
        if call.peer != body.worker or instance is None:
            end_reason = self._registry.end_reason(body.worker)
            detail = end_reason or f"{body.worker} is not attached as a rollout worker"
            self._refuse(call, Code.FENCED if end_reason else Code.DENIED, detail)
            return
        if not body.ok:
            instance.pull_failed(now)
        if (no := self._objection(body)) is not None:
            self._refuse(call, *no)
            return
        weights = (body.lineage, body.version)
        if body.ok and weights > instance.reported:
            instance.reported = weights
            worth_a_line = True
        else:  # a failure or an older version: a worker may repeat these without end, so they are rate-limited
            worth_a_line = self._rejects.due(body.worker, "pull", now)
        if worth_a_line:
            self._interpreter.trace.add(
                trace_events.Pull(
                    worker=body.worker, lineage=body.lineage, version=body.version, sha=body.sha, ok=body.ok
                )
            )
        self._replies.add(call, Done())

    def _objection(self, body: Pulled) -> tuple[Code, str] | None:
        """Return why the report is invalid, or None. A failed pull may have no digest, because it received no bytes."""
        machine = self._interpreter.machine
        published = 0 <= body.version <= machine.version and body.lineage == machine.lineage_of(body.version)
        digest = self._digests.get(body.version) if published else None
        if digest is None:
            detail = f"version {body.version} of lineage {body.lineage} is not published, or did not survive"
            return Code.BAD_VERSION, detail
        if body.sha != digest and (body.ok or body.sha):
            detail = f"the digest of version {body.version} is {digest[:12]}, not {body.sha[:12]!a}"
            return Code.CONFLICT, detail
        return None

    def _refuse(self, call: Call, code: Code, detail: str) -> None:
        self._rejects.plain(call.peer, "pull", code.value, self._interpreter.clock.now_ms())
        self._replies.refuse(call, code, detail)


def _key(version: Version) -> bytes:
    return _PREFIX + number_key(version)
