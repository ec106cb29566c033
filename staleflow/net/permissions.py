"""Permissions: the one table of verbs and roles. The role comes from the key of a connection, not from a claim.

An endpoint calls ``denial_reason`` before a request becomes a call. A verb that is not in the table is denied.
"""

from enum import StrEnum
from typing import Any, Final

from staleflow.protocols.wire import messages as m


class Role(StrEnum):
    """Role of a key. Each key has exactly one."""

    ROLLOUT = "rollout"
    STAGE = "stage"
    TRAINER = "trainer"
    PROMPTS = "prompts"
    """Submits prompts, and reads what became of them."""
    MONITOR = "monitor"
    """Reads, and changes nothing."""
    ADMIN = "admin"
    """Reads, and drains the run."""
    SERVER = "server"
    """Scheduler, trajectory servers, parameter server and its relays, among themselves."""


_R, _S, _T, _M, _A, _O = Role.ROLLOUT, Role.STAGE, Role.TRAINER, Role.MONITOR, Role.ADMIN, Role.SERVER
_P = Role.PROMPTS

VERBS: Final[dict[type[Any], frozenset[Role]]] = {
    m.Ping: frozenset(Role),
    m.GetStatus: frozenset((_S, _T, _M, _A, _O)),
    m.Drain: frozenset((_A,)),
    m.Attach: frozenset(Role),
    m.Detach: frozenset(Role),
    m.Report: frozenset((_R,)),
    m.Pulled: frozenset((_R,)),
    m.PutScores: frozenset((_R,)),
    m.Operations: frozenset((_R, _O)),
    m.GetRetained: frozenset((_O,)),
    m.GetExpected: frozenset((_O,)),
    m.StageLoads: frozenset((_O,)),
    m.GetModelLimits: frozenset((_O,)),
    m.PromptFeatures: frozenset((_O,)),
    m.SubmitPrompts: frozenset((_P,)),
    m.GetSubmittedRows: frozenset((_O,)),
    m.GetOutcomes: frozenset((_P,)),
    m.Join: frozenset((_T,)),
    m.GetBatch: frozenset((_T,)),
    m.CheckBatch: frozenset((_T,)),
    m.GetClaims: frozenset((_T,)),
    m.QuarantineGroups: frozenset((_T,)),
    m.RegisterVersion: frozenset((_O,)),
    m.RegisterCheckpoint: frozenset((_T,)),
    m.GetRetainedVersions: frozenset((_O,)),
    m.Metrics: frozenset((_T,)),
    m.Finished: frozenset((_T,)),
    m.GetRows: frozenset((_R,)),
    m.GetSlab: frozenset((_R,)),
    m.PushGroups: frozenset((_R,)),
    m.PutPartial: frozenset((_R,)),
    m.GetStageWork: frozenset((_S,)),
    m.PutStageResults: frozenset((_S,)),
    m.GetGroups: frozenset((_T,)),
    m.BeginPublish: frozenset((_T,)),
    m.PublishChunk: frozenset((_T,)),
    m.CommitPublish: frozenset((_T,)),
    m.GetManifest: frozenset((_R, _T, _O)),
    m.GetChunk: frozenset((_R, _T, _O)),
    m.GetDelta: frozenset((_R, _T, _O)),
    m.Unpin: frozenset((_R, _T, _O)),
    m.JoinRelays: frozenset((_O,)),
    m.GetSources: frozenset((_R, _T)),
}
"""Requests, and the roles that may send them."""

OPS: Final[dict[type[Any], frozenset[Role]]] = {
    m.RegisterPush: frozenset((_O,)),
    m.RegisterOccupy: frozenset((_O,)),
    m.RegisterRelease: frozenset((_R, _O)),
    m.RegisterQuarantine: frozenset((_O,)),
    m.RegisterMissing: frozenset((_O,)),
    m.RegisterReject: frozenset((_O,)),
    m.RegisterYield: frozenset((_R,)),
}
"""Operations inside an ``Operations`` request, and the roles that may send them."""

ATTACHES_AS: Final[dict[Role, frozenset[str]]] = {
    Role.ROLLOUT: frozenset(("rollout", "monitor")),
    Role.STAGE: frozenset(("stage", "monitor")),
    Role.TRAINER: frozenset(("trainer", "monitor")),
    Role.PROMPTS: frozenset(("prompts", "monitor")),
    Role.MONITOR: frozenset(("monitor",)),
    Role.ADMIN: frozenset(("admin", "monitor")),
    Role.SERVER: frozenset(("trajectories", "parameters", "relay", "monitor")),
}
"""Roles that a process may claim when it attaches. Every worker first attaches as a monitor to get the
configuration."""

_NAMES_SENDER: Final = (
    *(m.Attach, m.Detach, m.Report, m.Pulled, m.PutScores, m.Metrics),
    *(m.GetSlab, m.GetStageWork, m.PutStageResults, m.GetManifest, m.Unpin),
)
"""Requests that name the worker that sends them."""


def denial_reason(role: Role, peer: str, body: m.Request) -> str | None:
    """Return why a peer named ``peer`` with a key of ``role`` may not send ``body``; None if it may."""
    kind = type(body)
    if role not in VERBS.get(kind, ()):
        return f"a key of role {role} may not send {kind.__name__}"
    match body:
        case m.Operations(ops=ops):
            forbidden = next((op for op in ops if role not in OPS.get(type(op), ())), None)
            if forbidden is not None:
                return f"a key of role {role} may not send {type(forbidden).__name__}"
        case m.Attach(role=claimed) if claimed not in ATTACHES_AS[role]:
            return f"a key of role {role} may not attach as {claimed}"
        case m.PushGroups(items=items):
            other = next((item.worker for item in items if item.worker != peer), peer)
            return None if other == peer else _impersonation(peer, other)
        case m.Join(trainer=trainer) if trainer != peer:
            return _impersonation(peer, trainer)
        case _:
            pass
    if isinstance(body, _NAMES_SENDER) and body.worker != peer:
        return _impersonation(peer, body.worker)
    return None


def _impersonation(peer: str, worker: str) -> str:
    return f"{peer} may not act for {worker}"
