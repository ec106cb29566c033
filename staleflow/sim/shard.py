"""A simulated trajectory server and its reward workers: registers pushed groups, and occupies them after the reward
time."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from staleflow.net.endpoint import Call
from staleflow.protocols.consistency.effects import Code, ReleaseWhy
from staleflow.protocols.consistency.ids import GroupId, LeaseId, WorkerId
from staleflow.protocols.wire.messages import (
    FEATURES,
    Attach,
    Done,
    GetRows,
    GetSlab,
    Op,
    Operations,
    PartialFrames,
    PromptFeatures,
    PromptFeaturesReply,
    PushGroups,
    PutPartial,
    RegisterOccupy,
    RegisterPush,
    RegisterRelease,
    Reply,
    Result,
    Results,
    Rows,
    Slab,
)
from staleflow.protocols.wire.tensors import arrays, specs_and_frames
from staleflow.protocols.wire.trajectory import GroupPayload
from staleflow.sim.asking import Ask
from staleflow.sim.charges import Charges
from staleflow.sim.queues import GIB, Queue
from staleflow.sim.rewards import RewardWorkers
from staleflow.sim.sample import Sample
from staleflow.sim.timeline import Timeline
from staleflow.sim.workload import Workload

RETRY_INTERVAL_S = 1.0
DESCRIBE_S = 0.02
"""Time to describe a chunk of prompts."""


class SimShard:
    """One shard; ``pushed`` receives the samples of each group that it accepted."""

    def __init__(
        self,
        shard: int,
        workload: Workload,
        timeline: Timeline,
        ask: Ask,
        *,
        charges: Charges,
        rewards: RewardWorkers,
        describes: bool,
        samples: Sequence[Sample],
        pushed: dict[LeaseId, list[Sample]],
    ) -> None:
        self.worker = WorkerId(f"trajectories-{shard}")
        self._shard = shard
        self._workload = workload
        self._timeline = timeline
        self._ask = ask
        self._charges = charges
        self._rewards = rewards
        self.core = Queue(timeline)
        """The processor time of the shard."""
        self.nbytes: dict[LeaseId, int] = {}
        """Size of the payload of each group that it accepted."""
        self._describes = describes
        self._pushed_samples = pushed
        self._samples = samples
        self._partials: dict[LeaseId, tuple[PartialFrames, list[memoryview]]] = {}
        """Samples that started under a lease and continue under another one."""

    def attach(self) -> None:
        """Attach to the run with the prompts."""
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
        """Send features of prompts: the first is the known part of their lengths; the others are 0."""
        features = np.zeros((len(rows), FEATURES), np.float16)
        features[:, 0] = [self._workload.deviate(row) for row in rows]
        specs, frames = specs_and_frames({"features": features} if rows else {})
        self._ask(PromptFeatures(shard=self._shard, rows=rows, frames=specs), self._on_features_reply, frames)

    def _on_features_reply(self, reply: Reply) -> None:
        if isinstance(reply, PromptFeaturesReply):
            self._timeline.after(DESCRIBE_S, lambda: self._describe(reply.rows))

    def on_call(self, call: Call) -> None:
        """Serve a request of a worker."""
        match call.body:
            case GetRows():
                self._rows(call, call.body)
            case PutPartial():
                self._partials[call.body.lease] = call.body.partial, call.frames
                call.reply(Done())
            case GetSlab():
                call.reply(Slab(folder="", name="", nbytes=0, known=[]))
            case PushGroups():
                self._take(call, call.body)
            case _:
                call.refuse(Code.DENIED, f"no simulated shard serves {type(call.body).__name__}")

    def _rows(self, call: Call, request: GetRows) -> None:
        rows: list[dict[str, Any]] = [{"prompt": ""}] * len(request.groups)
        left = [self._partials.pop(lease, None) for lease in request.partials]
        frames = [frame for one in left if one is not None for frame in one[1]]
        call.reply(Rows(rows=rows, partials=[None if one is None else one[0] for one in left]), frames)

    def fetch(self, groups: int, nbytes: int, done: Callable[[], object]) -> None:
        """Send payload to the trainer; call ``done`` once it has left."""
        costs = self._charges.costs.shard
        self.core.add(0.0 if costs is None else costs.fetch_group_s * groups + costs.fetch_gib_s * nbytes / GIB, done)

    def _take(self, call: Call, pushed: PushGroups) -> None:
        costs = self._charges.costs.shard
        work_s = 0.0
        if costs is not None:
            work_s = costs.push_group_s * len(pushed.items) + costs.push_gib_s * call.nbytes / GIB
        self.core.add(work_s, lambda: self._push(call, pushed))

    def _push(self, call: Call, pushed: PushGroups) -> None:
        """Register finished groups; the scheduler's verdict is the reply."""
        ops: list[Op] = []
        samples: dict[LeaseId, list[Sample]] = {}
        start = 0
        for item in pushed.items:
            end = start + len(item.frames)
            self.nbytes[item.lease] = sum(frame.nbytes for frame in call.frames[start:end])
            payload = GroupPayload.from_arrays(arrays(item.frames, call.frames[start:end]))
            lengths: list[int] = payload.lengths.tolist()
            firsts = np.cumsum(payload.lengths) - payload.lengths
            samples[item.lease] = [self._samples[number] for number in payload.token_ids[firsts].tolist()]
            ops.append(
                RegisterPush(
                    group=item.group,
                    lease=item.lease,
                    worker=item.worker,
                    shard=self._shard,
                    sha=f"{item.lease:064x}",
                    nbytes=sum(lengths),
                    truncated=item.truncated,
                    segments=payload.segment_summary(),
                    samples=lengths,
                    sequence_tokens=sum(lengths),
                )
            )
            start = end
        self._operate(ops, lambda results: self._registered(call, pushed, samples, results))

    def _registered(
        self, call: Call, pushed: PushGroups, samples: dict[LeaseId, list[Sample]], results: list[Result]
    ) -> None:
        for item, result in zip(pushed.items, results, strict=True):
            if result.code is None:
                self._pushed_samples[item.lease] = samples[item.lease]
                self._rewards.score(item.group, item.lease, partial(self._rewarded, item.group, item.lease))
        call.reply(Results(results=results))

    def _rewarded(self, group: GroupId, lease: LeaseId) -> None:
        if self._workload.filtered(group, lease):
            self._operate([RegisterRelease(group=group, lease=lease, why=ReleaseWhy.FILTERED)])
        else:
            self._operate([RegisterOccupy(group=group, lease=lease)])

    def _operate(self, ops: list[Op], settled: Callable[[list[Result]], None] = lambda _: None) -> None:
        def answered(reply: Reply) -> None:
            if isinstance(reply, Results) and all(result.code is not Code.BUSY for result in reply.results):
                settled(reply.results)
            else:
                self._timeline.after(RETRY_INTERVAL_S, self._operate, ops, settled)

        self._ask(Operations(ops=ops), answered)
