"""One group from prompt to payload: generate its samples and turn the first ones to end into columns.

A group may leave the worker before it is finished, as the samples so far, and continue at another instance (or here).
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.rollout.engines.base import AsyncEngine, ColumnError, Request, Sampling, TokenSegment, Trajectory
from staleflow.configs.columns import typed_columns
from staleflow.configs.rules.coordination import groups_held, samples_started
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import LeaseId, Lineage, Version
from staleflow.protocols.wire.messages import Assign
from staleflow.protocols.wire.trajectory import Finish, GroupPayload
from staleflow.protocols.wire.typed_columns import TypedColumn, encode_columns

Ended = TypeVar("Ended")

_ids = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Generation parameters of the groups of a run."""

    group_size: int
    started: int
    """Number of samples started. Samples beyond ``group_size`` are redundant, and the last ones are aborted."""
    sampling: Sampling
    seed: int
    columns: tuple[TypedColumn, ...] = ()
    """Typed columns of the run."""

    @classmethod
    def of(cls, config: Config) -> "Recipe":
        rollout = config.rollout
        return cls(
            group_size=rollout.group_size,
            started=samples_started(rollout),
            sampling=Sampling.of(rollout),
            seed=config.seed,
            columns=typed_columns(config.column, router_replay=config.trainer.router_replay),
        )

    def capacity(self, slots: int) -> int:
        """Return the groups in flight that keep ``slots`` rows busy, as samples of a group end at different times."""
        return groups_held(slots, self.started)

    def sample_seed(self, assign: Assign, sample: int, origin: LeaseId | None = None) -> int:
        """Return the seed of one sample.

        A new lease uses new seeds, as a group that was too long once need not be so again. A group that continues the
        tokens of an earlier lease also continues that lease's seeds; ``origin`` is that lease.
        """
        entropy = (self.seed, assign.group, origin or assign.lease, sample)
        return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])


@dataclass(slots=True)
class ActiveLease:
    """A lease that the worker is producing."""

    assign: Assign
    requests: list[int] = field(default_factory=list[int])
    """Requests that the engine has."""
    interrupted: bool = False
    leaving: bool = False
    """The group must continue at another instance."""
    on_interrupt: Callable[[], None] | None = None
    """Called once on an interrupt, by producers that must end more than ``requests``."""
    pushing: bool = False
    """The samples are finished; the lease now belongs to the push."""
    task: "asyncio.Task[None] | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialGroup:
    """A group in the state in which another instance left it."""

    origin: LeaseId
    """The lease under which it was started."""
    payload: GroupPayload
    """All started samples. Unfinished ones are marked interrupted and may have no tokens."""

    def fits(self, prompt_ids: NDArray[np.int32], recipe: Recipe) -> bool:
        """Return whether a group of this prompt and recipe can continue from it."""
        return self.payload.num_samples == recipe.started and np.array_equal(self.payload.prompt_ids, prompt_ids)

    def newest(self) -> tuple[Lineage, Version] | None:
        """Return the newest weights that generated any of it; None if it has no tokens."""
        rows = self.payload.segments
        return max(((Lineage(int(row[1])), Version(int(row[2]))) for row in rows), default=None)


class GroupSamples:
    """The samples of one group while it is produced."""

    def __init__(
        self,
        engine: AsyncEngine,
        active: ActiveLease,
        prompt_ids: NDArray[np.int32],
        recipe: Recipe,
        partial: PartialGroup | None = None,
    ) -> None:
        """``partial`` is ignored if its prompt or recipe differs."""
        self._engine = engine
        self._active = active
        self._prompt_ids = prompt_ids
        self._recipe = recipe
        self.origin = active.assign.lease
        self._samples = [Trajectory(id=n, segments=(), finish=Finish.INTERRUPTED) for n in range(recipe.started)]
        if partial is not None and partial.fits(prompt_ids, recipe):
            self.origin = partial.origin
            self._samples = trajectories(partial.payload, recipe.columns)

    async def run(self) -> bool:
        """Generate until ``group_size`` samples have ended, then abort the others. Return False if it must leave.

        Raise ``RequestError`` if a sample cannot be served.
        """
        while True:
            left = [sample.id for sample in self._samples if not self._is_over(sample)]
            if len(self._samples) - len(left) >= self._recipe.group_size:
                return True
            if self._active.leaving and not self._active.interrupted:
                return False
            await self._write(left)

    def payload(self) -> GroupPayload:
        """Return the finished group."""
        done = [sample for sample in self._samples if self._is_over(sample)]
        return payload(self._prompt_ids, done[: self._recipe.group_size], self._recipe.columns)

    def partial(self) -> PartialGroup:
        """Return the group in its current state."""
        group = payload(self._prompt_ids, self._samples, self._recipe.columns, unfinished=True)
        return PartialGroup(origin=self.origin, payload=group)

    def _is_over(self, sample: Trajectory) -> bool:
        """Return whether a sample is finished. An interrupt finishes it only once it has a token."""
        return sample.finish is not Finish.INTERRUPTED or (self._active.interrupted and bool(sample.segments))

    async def _write(self, left: Sequence[int]) -> None:
        """Generate these samples until enough have ended, or until the engine has returned all of them."""
        requests = {request_id(): sample for sample in left}
        tasks = [asyncio.ensure_future(self._engine.generate(self._request(*item))) for item in requests.items()]
        self._active.requests = list(requests)
        missing = self._recipe.group_size - (len(self._samples) - len(left))
        try:
            await asyncio.sleep(0)  # let each task submit its request: the engine ignores unknown ids
            if self._active.interrupted:
                interrupt(self._engine, self._active)
            elif self._active.leaving:
                leave(self._engine, self._active)
            for ended in asyncio.as_completed(tasks):
                trajectory = await ended
                sample = requests[trajectory.id]
                self._samples[sample] = replace(trajectory, id=sample)
                missing -= self._is_over(self._samples[sample])
                if not missing:
                    break
        finally:
            self._active.requests = []
            await _cancelled(tasks)

    def _request(self, id: int, sample: int) -> Request:
        return Request(
            id=id,
            prompt_ids=self._prompt_ids,
            sampling=self._recipe.sampling,
            seed=self._recipe.sample_seed(self._active.assign, sample, self.origin),
            prefix=self._samples[sample].segments,
        )


async def first_ended(tasks: Sequence["asyncio.Task[Ended]"], count: int) -> list[Ended]:
    """Return the results of the first ``count`` to end, in that order, and cancel the others. A failure fails all."""
    results: list[Ended] = []
    try:
        for ended in asyncio.as_completed(tasks):
            results.append(await ended)
            if len(results) == count:
                break
    finally:
        await _cancelled(tasks)
    return results


async def _cancelled(tasks: Sequence["asyncio.Task[Ended]"]) -> None:
    """Cancel the tasks and return once none of them runs."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def request_id() -> int:
    """Return an id that is unique in this worker."""
    return next(_ids)


def interrupt(engine: AsyncEngine, active: ActiveLease) -> None:
    """Finish with the tokens so far; a group that has not started finishes as soon as it has."""
    active.interrupted = True
    for request in active.requests:
        engine.interrupt(request)
    if active.on_interrupt is not None:
        active.on_interrupt()


def leave(engine: AsyncEngine, active: ActiveLease) -> None:
    """Return with the tokens so far, to continue at another instance."""
    active.leaving = True
    for request in active.requests:
        engine.interrupt(request, least=0)


def payload(
    prompt_ids: NDArray[np.int32],
    samples: Sequence[Trajectory],
    columns: Sequence[TypedColumn] | None = (),
    *,
    unfinished: bool = False,
) -> GroupPayload:
    """Return the arrays of a group. The policy generated every token, so the loss mask is 1 throughout.

    ``columns``: those of the run; None: leave out all that the samples have. ``unfinished``: columns may be missing.
    Raise ``ColumnError`` for the first typed column that is wrong.
    """
    lengths = [sum(len(s.token_ids) for s in trajectory.segments) for trajectory in samples]
    segments = [
        (sample, segment.lineage, segment.version, len(segment.token_ids))
        for sample, trajectory in enumerate(samples)
        for segment in trajectory.segments
    ]
    try:
        given = [] if columns is None else [_columns_of(one) for one in samples]
        typed = encode_columns(columns or (), given, lengths, fill=unfinished)
    except ValueError as error:
        raise ColumnError(str(error)) from error
    return GroupPayload(
        prompt_ids=prompt_ids,
        lengths=np.array(lengths, np.int32),
        token_ids=np.concatenate([trajectory.token_ids for trajectory in samples]),
        logprobs=np.concatenate([trajectory.logprobs for trajectory in samples]),
        loss_mask=np.ones(sum(lengths), np.uint8),
        segments=np.array(segments, np.int64).reshape(-1, 4),
        finish=np.array([trajectory.finish for trajectory in samples], np.uint8),
        columns=typed,
    )


def _columns_of(trajectory: Trajectory) -> dict[str, Any]:
    """Return the typed columns of a sample, those of its segments joined."""
    shares: dict[str, list[NDArray[Any]]] = {}
    for segment in trajectory.segments:
        for name, column in segment.columns.items():
            shares.setdefault(name, []).append(column)
    return {**trajectory.columns, **{name: np.concatenate(parts) for name, parts in shares.items()}}


def trajectories(group: GroupPayload, columns: Sequence[TypedColumn] = ()) -> list[Trajectory]:
    """Return the samples of a group in order: the inverse of ``payload``."""
    segments_of: dict[int, list[TokenSegment]] = {sample: [] for sample in range(group.num_samples)}
    present = [column for column in columns if column.key in group.columns]
    per_token = {column.name: group.columns[column.key] for column in present if column.per == "token"}
    per_sample = {column.name: column.split(group.columns, ()) for column in present if column.per == "sample"}
    start = 0
    for sample, lineage, version, tokens in group.segments.tolist():
        end = start + tokens
        segments_of[sample].append(
            TokenSegment(
                lineage=Lineage(lineage),
                version=Version(version),
                token_ids=group.token_ids[start:end],
                logprobs=group.logprobs[start:end],
                columns={name: array[start:end] for name, array in per_token.items()},
            )
        )
        start = end
    return [
        Trajectory(
            id=sample,
            segments=tuple(segments),
            finish=Finish(int(group.finish[sample])),
            columns={name: values[sample] for name, values in per_sample.items()},
        )
        for sample, segments in segments_of.items()
    ]


def truncated(group: GroupPayload) -> bool:
    """Return whether an interrupt cut any of the group's samples."""
    return Finish.INTERRUPTED in group.finish.tolist()
