"""Journal of a run: records by its workers and trainers, as a witness independent of the servers.

A line is written before its message leaves, and a reply when it arrives. Times are virtual.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from staleflow.protocols.consistency.ids import BatchId, GroupId, LeaseId, Lineage, Step, TrainerTerm, Version
from staleflow.protocols.wire.messages import Batch
from staleflow.protocols.wire.trajectory import GroupPayload
from staleflow.sim.faults.payload import sha_of


class Key(NamedTuple):
    group: GroupId
    lease: LeaseId


@dataclass(slots=True)
class Sent:
    """One payload that a worker has pushed, or tried to push."""

    worker: str
    sha: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A push that was acknowledged."""

    key: Key
    sha: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Fetched:
    """A batch that a trainer has received completely."""

    batch: BatchId
    lineage: Lineage
    step: Step
    digest: str
    groups: tuple[GroupId, ...]


@dataclass(frozen=True, slots=True)
class Committed:
    """A version whose publish was acknowledged to a trainer."""

    term: TrainerTerm
    lineage: Lineage
    version: Version
    sha: str
    batch: BatchId | None


@dataclass(frozen=True, slots=True)
class FailedStage:
    """A stage worker that failed at a group.

    ``broken``: it fails at every group, and another worker of its stage takes its groups.
    """

    worker: str
    broken: bool

    @property
    def stage(self) -> str:
        return stage_of(self.worker)


def stage_of(worker: str) -> str:
    """Return the stage of a stage worker."""
    return worker.rpartition("-")[0]


@dataclass(slots=True)
class Reported:
    """One report of a worker that was acknowledged."""

    sent_s: float
    answered_s: float


@dataclass(slots=True)
class Journal:
    """All journals of one run."""

    assigned: dict[GroupId, dict[LeaseId, None]] = field(default_factory=dict[GroupId, dict[LeaseId, None]])
    """Leases of each group that were assigned to rollout workers."""
    payloads: dict[str, GroupPayload] = field(default_factory=dict[str, GroupPayload])
    """Pushed payloads, by sha."""
    sent: dict[Key, list[Sent]] = field(default_factory=dict[Key, list[Sent]])
    acknowledged: list[Acknowledged] = field(default_factory=list[Acknowledged])
    refused: Counter[str] = field(default_factory=Counter[str])
    """Refusals of pushes, by code."""
    batches: dict[BatchId, Batch] = field(default_factory=dict[BatchId, Batch])
    """Sealed batches as the scheduler named them to a trainer."""
    fetched: list[Fetched] = field(default_factory=list[Fetched])
    published: dict[tuple[Lineage, Version], set[str]] = field(default_factory=dict[tuple[Lineage, Version], set[str]])
    """Shas of the weights that some trainer sent as that version."""
    committed: list[Committed] = field(default_factory=list[Committed])
    submissions: list[tuple[int, list[int]]] = field(default_factory=list[tuple[int, list[int]]])
    """Number of each part of the prompts that a client has submitted, and the acknowledged numbers of its rows."""
    pulled: list[tuple[Lineage, Version, str]] = field(default_factory=list[tuple[Lineage, Version, str]])
    reports: dict[str, list[Reported]] = field(default_factory=dict[str, list[Reported]])
    tried_stages: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """Stage workers that received a pushed group, whatever the result, by the sha of the group."""
    poisoned: set[tuple[Key, str]] = field(default_factory=set[tuple[Key, str]])
    """(group and lease, sha) of pushes that no engine of the run can have written."""
    suspect_s: dict[str, float] = field(default_factory=dict[str, float])
    """Time of the last failure of each stage worker for which a shard may have held it."""
    failed_stages: dict[str, list[FailedStage]] = field(default_factory=dict[str, list[FailedStage]])
    """Failures of stage workers at a pushed group, by its sha."""
    gave_up: list[str] = field(default_factory=list[str])
    """Reasons with which a trainer ended the run."""
    mismatches: list[str] = field(default_factory=list[str])
    """Served bytes that no process had written."""
    checked: Counter[str] = field(default_factory=Counter[str])
    """Number of checked payloads, by checker."""
    ends: Counter[str] = field(default_factory=Counter[str])
    """Reasons for which workers and trainers ended by themselves."""

    def send(self, key: Key, worker: str, sha: str, at_s: float, payload: GroupPayload) -> None:
        """Record a push that is about to leave."""
        self.payloads[sha] = payload
        sent = self.sent.setdefault(key, [])
        if all(one.sha != sha for one in sent):
            sent.append(Sent(worker, sha, at_s))

    def was_pushed(self, group: GroupId, payload: GroupPayload) -> bool:
        """Return whether some worker pushed these bytes of that group."""
        sha = sha_of(payload)
        return any(one.sha == sha for key in self.assigned.get(group, {}) for one in self.sent.get(Key(group, key), ()))
