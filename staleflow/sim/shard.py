"""A simulated trajectory server and its reward workers: registers what is pushed, and lets it train a little later."""

from collections.abc import Callable

import numpy as np

from staleflow.protocols.consistency.effects import Code, ReleaseWhy
from staleflow.protocols.consistency.ids import LeaseId, Lineage, Segment, Version, WorkerId
from staleflow.protocols.wire.messages import (
    FEATURES,
    Assign,
    Attach,
    Op,
    Operations,
    PromptFeatures,
    PromptFeaturesReply,
    RegisterOccupy,
    RegisterPush,
    RegisterRelease,
    Reply,
    Result,
    Results,
)
from staleflow.protocols.wire.tensors import specs_and_frames
from staleflow.sim.asking import Ask
from staleflow.sim.sample import Sample
from staleflow.sim.timeline import Timeline
from staleflow.sim.workload import Workload

RETRY_S = 1.0
DESCRIBE_S = 0.02
"""Time to describe a chunk of prompts."""


class SimShard:
    """One shard; ``taken`` gets the samples of each group that it took."""

    def __init__(
        self,
        shard: int,
        workload: Workload,
        timeline: Timeline,
        ask: Ask,
        *,
        reward_s: float,
        describes: bool,
        taken: dict[LeaseId, list[Sample]],
    ) -> None:
        self.worker = WorkerId(f"trajectories-{shard}")
        self._shard = shard
        self._workload = workload
        self._timeline = timeline
        self._ask = ask
        self._reward_s = reward_s
        self._describes = describes
        self._taken = taken
        self.partials: dict[LeaseId, list[Sample]] = {}
        """Samples that were begun under a lease and go on under another one."""

    def attach(self) -> None:
        """Join the run with the prompts."""
        self._ask(
            Attach(
                worker=self.worker,
                name=self.worker,
                role="trajectories",
                endpoint=f"sim://{self.worker}",
                shard=self._shard,
                rows=self._workload.rows,
                prompts_sha="simulated",
            ),
            lambda _: self._describe([]) if self._describes else None,
        )

    def _describe(self, rows: list[int]) -> None:
        """What is known of the lengths of these prompts is their first feature; the others are 0."""
        features = np.zeros((len(rows), FEATURES), np.float16)
        features[:, 0] = [self._workload.deviate(row) for row in rows]
        specs, frames = specs_and_frames({"features": features} if rows else {})
        self._ask(PromptFeatures(shard=self._shard, rows=rows, frames=specs), self._asked, frames)

    def _asked(self, reply: Reply) -> None:
        if isinstance(reply, PromptFeaturesReply):
            self._timeline.after(DESCRIBE_S, lambda: self._describe(reply.rows))

    def push(self, assign: Assign, worker: WorkerId, samples: list[Sample], settled: Callable[[Result], None]) -> None:
        """Register a finished group; ``settled`` gets the scheduler's verdict."""
        op = RegisterPush(
            group=assign.group,
            lease=assign.lease,
            worker=worker,
            shard=self._shard,
            sha=f"{assign.lease:064x}",
            nbytes=sum(sample.written for sample in samples),
            truncated=any(sample.truncated for sample in samples),
            segments=segments_of(samples),
            samples=[sample.written for sample in samples],
            sequence_tokens=sum(sample.written for sample in samples),
        )
        self._operate(op, lambda result: self._registered(assign, samples, result, settled))

    def _registered(
        self, assign: Assign, samples: list[Sample], result: Result, settled: Callable[[Result], None]
    ) -> None:
        settled(result)
        if result.code is None:
            self._taken[assign.lease] = samples
            self._timeline.after(self._reward_s, lambda: self._rewarded(assign))

    def _rewarded(self, assign: Assign) -> None:
        if self._workload.filtered(assign.group, assign.lease):
            self._operate(RegisterRelease(group=assign.group, lease=assign.lease, why=ReleaseWhy.FILTERED))
        else:
            self._operate(RegisterOccupy(group=assign.group, lease=assign.lease))

    def _operate(self, op: Op, settled: Callable[[Result], None] = lambda _: None) -> None:
        def answered(reply: Reply) -> None:
            if isinstance(reply, Results) and reply.results[0].code is not Code.BUSY:
                settled(reply.results[0])
            else:
                self._timeline.after(RETRY_S, lambda: self._operate(op, settled))

        self._ask(Operations(ops=[op]), answered)


def segments_of(samples: list[Sample]) -> list[Segment]:
    """Tokens of all samples by version, ascending."""
    tokens: dict[tuple[Lineage, Version], int] = {}
    for sample in samples:
        for lineage, version, count in sample.segments:
            tokens[lineage, version] = tokens.get((lineage, version), 0) + count
    return [Segment(*weights, tokens[weights]) for weights in sorted(tokens)]
