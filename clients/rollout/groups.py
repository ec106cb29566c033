"""One group from prompt to payload: its samples through the engine, the first ones to end as columns."""

import asyncio
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.rollout.engine import AsyncEngine, Request, Sampling, Trajectory
from staleflow.configs.schema import Config
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
            started=math.ceil(rollout.group_size * rollout.redundancy.samples),
            sampling=Sampling(max_new_tokens=rollout.max_new_tokens, temperature=rollout.temperature),
            seed=config.seed,
        )

    def capacity(self, slots: int) -> int:
        """Groups in flight that keep ``slots`` rows busy although samples of a group end at different times."""
        return max(2, math.ceil(1.5 * slots / self.started))

    def sample_seed(self, assign: Assign, sample: int) -> int:
        """Of one sample's draws. A new lease draws anew: a group that was too long once need not be so again."""
        entropy = (self.seed, assign.group, assign.lease, sample)
        return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])


@dataclass(slots=True)
class Held:
    """A lease that the worker works on."""

    assign: Assign
    requests: list[int] = field(default_factory=list[int])
    interrupted: bool = False
    on_interrupt: Callable[[], None] | None = None
    """Called once when it is interrupted: whoever has more to end than ``requests``."""
    pushing: bool = False
    """Its samples are done; the lease now belongs to the push."""
    task: "asyncio.Task[None] | None" = None


async def produce(engine: AsyncEngine, held: Held, prompt_ids: NDArray[np.int32], recipe: Recipe) -> GroupPayload:
    """Start the samples, wait for ``group_size`` of them, abort the others. ``RequestError`` if none can be served."""
    requests = [
        Request(
            id=request_id(),
            prompt_ids=prompt_ids,
            sampling=recipe.sampling,
            seed=recipe.sample_seed(held.assign, sample),
        )
        for sample in range(recipe.started)
    ]
    tasks = [asyncio.ensure_future(engine.generate(request)) for request in requests]
    held.requests = [request.id for request in requests]

    def started() -> None:
        if held.interrupted:
            interrupt(engine, held)

    done = await first_ended(tasks, recipe.group_size, started)
    return payload(prompt_ids, sorted(done, key=lambda trajectory: trajectory.id))


async def first_ended(
    tasks: Sequence["asyncio.Task[Ended]"], count: int, started: Callable[[], None] = lambda: None
) -> list[Ended]:
    """The results of the first ``count`` to end, in that order; the others are cancelled. One that fails fails all.

    ``started`` is called once each task has had its first turn.
    """
    done: list[Ended] = []
    try:
        await asyncio.sleep(0)
        started()
        for ended in asyncio.as_completed(tasks):
            done.append(await ended)
            if len(done) == count:
                break
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return done


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


def payload(prompt_ids: NDArray[np.int32], trajectories: Sequence[Trajectory]) -> GroupPayload:
    """The columns of a group. Every token was written by the policy, so the loss mask is 1 throughout."""
    lengths = [sum(len(s.token_ids) for s in trajectory.segments) for trajectory in trajectories]
    segments = [
        (sample, segment.lineage, segment.version, len(segment.token_ids))
        for sample, trajectory in enumerate(trajectories)
        for segment in trajectory.segments
    ]
    return GroupPayload(
        prompt_ids=prompt_ids,
        lengths=np.array(lengths, np.int32),
        token_ids=np.concatenate([trajectory.token_ids for trajectory in trajectories]),
        logprobs=np.concatenate([trajectory.logprobs for trajectory in trajectories]),
        loss_mask=np.ones(sum(lengths), np.uint8),
        segments=np.array(segments, np.int64).reshape(-1, 4),
        finish=np.array([trajectory.finish for trajectory in trajectories], np.uint8),
    )


def truncated(group: GroupPayload) -> bool:
    """Whether an interrupt cut any of its samples."""
    return bool((group.finish == Finish.INTERRUPTED).any())
