"""One group from prompt to payload: its samples through the engine, the first ones to end as columns.

A group may leave before it is done, as the samples so far, and go on from them at another instance (or here again).
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.rollout.engines.base import AsyncEngine, Request, Sampling, TokenSegment, Trajectory
from staleflow.configs.rules.coordination import groups_held, samples_started
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import LeaseId, Lineage, Version
from staleflow.protocols.wire.messages import Assign
from staleflow.protocols.wire.trajectory import Finish, GroupPayload

Ended = TypeVar("Ended")

_ids = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How every group of a run is written."""

    group_size: int
    started: int
    """Samples that are started; those beyond ``group_size`` are redundant, and the last ones are aborted."""
    sampling: Sampling
    seed: int

    @classmethod
    def of(cls, config: Config) -> "Recipe":
        rollout = config.rollout
        return cls(
            group_size=rollout.group_size,
            started=samples_started(rollout),
            sampling=Sampling(max_new_tokens=rollout.max_new_tokens, temperature=rollout.temperature),
            seed=config.seed,
        )

    def capacity(self, slots: int) -> int:
        """Groups in flight that keep ``slots`` rows busy although samples of a group end at different times."""
        return groups_held(slots, self.started)

    def sample_seed(self, assign: Assign, sample: int, origin: LeaseId | None = None) -> int:
        """Of one sample's draws. A new lease draws anew: a group that was too long once need not be so again. One that
        goes on with what an earlier lease wrote goes on with the draws of that one, its ``origin``."""
        entropy = (self.seed, assign.group, origin or assign.lease, sample)
        return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])


@dataclass(slots=True)
class Held:
    """A lease that the worker works on."""

    assign: Assign
    requests: list[int] = field(default_factory=list[int])
    """Those that the engine has."""
    interrupted: bool = False
    leaving: bool = False
    """It is to go on elsewhere."""
    on_interrupt: Callable[[], None] | None = None
    """Called once when it is interrupted: whoever has more to end than ``requests``."""
    pushing: bool = False
    """Its samples are done; the lease now belongs to the push."""
    task: "asyncio.Task[None] | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A group as another instance left it."""

    origin: LeaseId
    """The lease that it began under."""
    payload: GroupPayload
    """All samples that were started; what has not ended is marked interrupted, and may have no token."""

    def fits(self, prompt_ids: NDArray[np.int32], recipe: Recipe) -> bool:
        """Whether a group of this prompt and recipe can go on from it."""
        return self.payload.num_samples == recipe.started and np.array_equal(self.payload.prompt_ids, prompt_ids)

    def newest(self) -> tuple[Lineage, Version] | None:
        """The newest weights that wrote any of it; None when nothing is written."""
        rows = self.payload.segments
        return max(((Lineage(int(row[1])), Version(int(row[2]))) for row in rows), default=None)


class Samples:
    """The samples of one group in the making."""

    def __init__(
        self, engine: AsyncEngine, held: Held, prompt_ids: NDArray[np.int32], recipe: Recipe, begun: Begun | None = None
    ) -> None:
        """``begun`` is left aside when it is not of this prompt and recipe."""
        self._engine = engine
        self._held = held
        self._prompt_ids = prompt_ids
        self._recipe = recipe
        self.origin = held.assign.lease
        self._samples = [Trajectory(id=n, segments=(), finish=Finish.INTERRUPTED) for n in range(recipe.started)]
        if begun is not None and begun.fits(prompt_ids, recipe):
            self.origin = begun.origin
            self._samples = trajectories(begun.payload)

    async def go_on(self) -> bool:
        """True when ``group_size`` samples have ended, the others aborted; False when it is to leave before they have.

        ``RequestError`` when one cannot be served.
        """
        while True:
            left = [sample.id for sample in self._samples if not self._over(sample)]
            if len(self._samples) - len(left) >= self._recipe.group_size:
                return True
            if self._held.leaving and not self._held.interrupted:
                return False
            await self._write(left)

    def payload(self) -> GroupPayload:
        """The group that is done."""
        done = [sample for sample in self._samples if self._over(sample)]
        return payload(self._prompt_ids, done[: self._recipe.group_size])

    def begun(self) -> Begun:
        """The group as it stands."""
        return Begun(origin=self.origin, payload=payload(self._prompt_ids, self._samples))

    def _over(self, sample: Trajectory) -> bool:
        """Whether it ended by itself, or by an interrupt, which leaves nobody without a token."""
        return sample.finish is not Finish.INTERRUPTED or (self._held.interrupted and bool(sample.segments))

    async def _write(self, left: Sequence[int]) -> None:
        """Give these samples to the engine until enough have ended, or all of them are back."""
        requests = {request_id(): sample for sample in left}
        tasks = [asyncio.ensure_future(self._engine.generate(self._request(*item))) for item in requests.items()]
        self._held.requests = list(requests)
        missing = self._recipe.group_size - (len(self._samples) - len(left))
        try:
            await asyncio.sleep(0)  # each task has said its request by now
            if self._held.interrupted:
                interrupt(self._engine, self._held)
            elif self._held.leaving:
                leave(self._engine, self._held)
            for ended in asyncio.as_completed(tasks):
                trajectory = await ended
                sample = requests[trajectory.id]
                self._samples[sample] = replace(trajectory, id=sample)
                missing -= self._over(self._samples[sample])
                if not missing:
                    break
        finally:
            self._held.requests = []
            await _cancelled(tasks)

    def _request(self, id: int, sample: int) -> Request:
        return Request(
            id=id,
            prompt_ids=self._prompt_ids,
            sampling=self._recipe.sampling,
            seed=self._recipe.sample_seed(self._held.assign, sample, self.origin),
            prefix=self._samples[sample].segments,
        )


async def first_ended(tasks: Sequence["asyncio.Task[Ended]"], count: int) -> list[Ended]:
    """The results of the first ``count`` to end, in that order; the others are cancelled. One that fails fails all."""
    done: list[Ended] = []
    try:
        for ended in asyncio.as_completed(tasks):
            done.append(await ended)
            if len(done) == count:
                break
    finally:
        await _cancelled(tasks)
    return done


async def _cancelled(tasks: Sequence["asyncio.Task[Ended]"]) -> None:
    """Returns when none of them runs any more."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def request_id() -> int:
    """Unique in this worker."""
    return next(_ids)


def interrupt(engine: AsyncEngine, held: Held) -> None:
    """Finish with the tokens so far; before anything is started, as soon as it is."""
    held.interrupted = True
    for request in held.requests:
        engine.interrupt(request)
    if held.on_interrupt is not None:
        held.on_interrupt()


def leave(engine: AsyncEngine, held: Held) -> None:
    """Come back with the tokens so far, to go on elsewhere."""
    held.leaving = True
    for request in held.requests:
        engine.interrupt(request, least=0)


def payload(prompt_ids: NDArray[np.int32], samples: Sequence[Trajectory]) -> GroupPayload:
    """The columns of a group. Every token was written by the policy, so the loss mask is 1 throughout."""
    lengths = [sum(len(s.token_ids) for s in trajectory.segments) for trajectory in samples]
    segments = [
        (sample, segment.lineage, segment.version, len(segment.token_ids))
        for sample, trajectory in enumerate(samples)
        for segment in trajectory.segments
    ]
    return GroupPayload(
        prompt_ids=prompt_ids,
        lengths=np.array(lengths, np.int32),
        token_ids=np.concatenate([trajectory.token_ids for trajectory in samples]),
        logprobs=np.concatenate([trajectory.logprobs for trajectory in samples]),
        loss_mask=np.ones(sum(lengths), np.uint8),
        segments=np.array(segments, np.int64).reshape(-1, 4),
        finish=np.array([trajectory.finish for trajectory in samples], np.uint8),
    )


def trajectories(group: GroupPayload) -> list[Trajectory]:
    """The samples of a group by number: what ``payload`` was made of."""
    found: dict[int, list[TokenSegment]] = {sample: [] for sample in range(group.num_samples)}
    start = 0
    for sample, lineage, version, tokens in group.segments.tolist():
        end = start + tokens
        found[sample].append(
            TokenSegment(
                lineage=Lineage(lineage),
                version=Version(version),
                token_ids=group.token_ids[start:end],
                logprobs=group.logprobs[start:end],
            )
        )
        start = end
    return [
        Trajectory(id=sample, segments=tuple(segments), finish=Finish(int(group.finish[sample])))
        for sample, segments in found.items()
    ]


def truncated(group: GroupPayload) -> bool:
    """Whether an interrupt cut any of its samples."""
    return Finish.INTERRUPTED in group.finish.tolist()
