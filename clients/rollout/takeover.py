"""A group that a client takes over from another worker, or hands over to one: between samples and a partial group.

A run may start more samples than a group has (``rollout.redundancy.samples``). A partial group has all of them, the
caller works on ``group_size``; the others keep the state in which they came.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.rollout.engines.base import Trajectory
from staleflow.clients.rollout.groups import PartialGroup, Recipe, payload, trajectories
from staleflow.clients.rollout.samples import Lease, LeaseError, LoadedDuring, Prefix, Sample, group_payload
from staleflow.protocols.consistency.ids import LeaseId
from staleflow.protocols.wire.trajectory import Finish

_FINISHES: Final[dict[Finish, Literal["stop", "length", "interrupted"]]] = {
    Finish.STOP: "stop",
    Finish.LENGTH: "length",
    Finish.INTERRUPTED: "interrupted",
}
_EMPTY = Trajectory(id=0, segments=(), finish=Finish.INTERRUPTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Takeover:
    """The state in which a lease starts: the samples of another worker, or none."""

    origin: LeaseId
    """The lease whose seeds the samples use."""
    started: Sequence[Trajectory]
    """Every sample that the run starts."""
    chosen: Sequence[int]
    """Positions in ``started`` of the samples that the caller works on, ascending."""
    prompt_ids: NDArray[np.int32] | None = None

    @classmethod
    def none(cls, lease: LeaseId, recipe: Recipe) -> "Takeover":
        """Return the state of a group that starts from its prompt."""
        return cls(origin=lease, started=[_EMPTY] * recipe.started, chosen=range(recipe.group_size))

    @classmethod
    def of(cls, partial: PartialGroup, recipe: Recipe) -> "Takeover":
        """Return the state of a group that another worker left: finished samples are taken first."""
        started = trajectories(partial.payload, recipe.columns)
        order = sorted(started, key=lambda sample: sample.finish is Finish.INTERRUPTED)
        chosen = sorted(sample.id for sample in order[: recipe.group_size])
        prompt_ids = np.array(partial.payload.prompt_ids)
        return cls(origin=partial.origin, started=started, chosen=chosen, prompt_ids=prompt_ids)

    def samples(self) -> tuple[Sample, ...]:
        """Return the samples that the caller continues; none if the group starts from its prompt."""
        return () if self.prompt_ids is None else tuple(_sample(self.started[n]) for n in self.chosen)

    def prefixes(self) -> list[Prefix]:
        """Return the tokens that those samples have."""
        return [
            Prefix(
                sample.token_ids,
                sample.logprobs,
                [(segment.lineage, segment.version, len(segment.token_ids)) for segment in sample.segments],
            )
            for sample in (self.started[n] for n in self.chosen)
            if sample.segments
        ]

    def partial(
        self,
        lease: Lease,
        prompt_ids: Sequence[int] | NDArray[np.integer[Any]],
        samples: Sequence[Sample],
        loaded: LoadedDuring,
        recipe: Recipe,
    ) -> PartialGroup:
        """Return the group with these samples of the caller. Raise ``LeaseError`` for the first thing that is wrong."""
        group = group_payload(lease, prompt_ids, samples, loaded, recipe.columns, unfinished=True)
        limit = lease.sampling.max_new_tokens
        for number, sample in enumerate(samples):
            if sample.finish == "interrupted" and len(sample.token_ids) >= limit:
                allowed = f'rollout.max_new_tokens allows {limit}, so its finish is "length"'
                raise LeaseError(f"{lease}, sample {number}: {limit} tokens and not finished; {allowed}")
            if sample.loss_mask is not None and not np.all(sample.loss_mask):
                raise LeaseError(f"{lease}, sample {number}: loss_mask has a 0; samples with such tokens do not move")
        if recipe.started == recipe.group_size:
            return PartialGroup(origin=self.origin, payload=group)
        started = list(self.started)
        for place, current in zip(self.chosen, trajectories(group, recipe.columns), strict=True):
            started[place] = current
        whole = payload(group.prompt_ids, started, recipe.columns, unfinished=True)
        return PartialGroup(origin=self.origin, payload=whole)


def _sample(trajectory: Trajectory) -> Sample:
    """Return a sample with arrays of its own. One that is unfinished has no columns of the sample yet."""
    columns: dict[str, Any] = {}
    for name in trajectory.segments[0].columns if trajectory.segments else ():
        columns[name] = np.concatenate([segment.columns[name] for segment in trajectory.segments])
    if trajectory.finish is not Finish.INTERRUPTED:
        columns |= trajectory.columns
    versions = [np.full(len(s.token_ids), s.version, np.int64) for s in trajectory.segments]
    return Sample(
        token_ids=np.array(trajectory.token_ids),
        logprobs=np.array(trajectory.logprobs),
        versions=np.concatenate(versions) if versions else np.zeros(0, np.int64),
        finish=_FINISHES[trajectory.finish],
        columns=columns,
    )
