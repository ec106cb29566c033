"""The simulated model of the shipped training loop: its weights prove which batches were trained, and in which order.

``train`` compares every row of a batch with the payloads that rollout workers pushed. The state is a hash chain over
the digests of the trained batches, and a version's bytes are a function of the state, so ``reconcile`` knows each
version's bytes. The published weights are those of the state at the moment at which they are read, as the tensors of a
model are: read too late, they are those of the next version.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from staleflow.clients.trainer.backends.base import StepResult, Stopped, Stopping, Untrainable
from staleflow.clients.trainer.data.batch import NO_VERSION, TrainBatch
from staleflow.configs.stages import stages
from staleflow.protocols.consistency.ids import GroupId, Step, Version
from staleflow.protocols.wire.messages import Batch, MemberRef
from staleflow.protocols.wire.stages import is_per_token, short_name
from staleflow.protocols.wire.tensors import Array
from staleflow.protocols.wire.trajectory import GroupPayload
from staleflow.sim.faults.journal import Fetched
from staleflow.sim.faults.lockstep import Lockstep
from staleflow.sim.faults.payload import Learned, columns_of, is_untrainable, tensors_of, weights_of
from staleflow.sim.faults.scene import Scene

STATE = "learned"
NUMBERS = "numbers"
WRITE_S = 0.005
"""Delay between two files of a checkpoint."""


class GatheredWeights:
    """The tensors of the model, gathered one by one."""

    def __init__(self, read: Callable[[], bytes]) -> None:
        self._read = read

    def items(self) -> Iterator[tuple[str, Array]]:
        yield from tensors_of(self._read())


class LiveWeights(Mapping[str, Array]):
    """The tensors of the model in main memory."""

    def __init__(self, read: Callable[[], bytes]) -> None:
        self._read = read

    def __getitem__(self, name: str) -> Array:
        return dict(tensors_of(self._read()))[name]

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, _ in tensors_of(self._read())])

    def __len__(self) -> int:
        return len(tensors_of(self._read()))


class Learner:
    """A ``StreamingBackend`` in virtual time."""

    def __init__(self, scene: Scene, thread: Lockstep) -> None:
        self._scene = scene
        self._thread = thread
        self._rng = random.Random(scene.rng.getrandbits(64))
        self._stages = stages(scene.config)
        self._state = Learned()
        self._parts: list[TrainBatch] = []
        self._weights = GatheredWeights if random.Random(f"weights {scene.seed}").random() < 0.3 else LiveWeights
        self._before_update: Callable[[], None] = lambda: None

    def check(self, directory: Path) -> None:
        """Do nothing: every complete checkpoint can be loaded."""

    def load(self, directory: Path | None) -> None:
        self._state = Learned() if directory is None else Learned.from_bytes((directory / STATE).read_bytes())

    def save(self, directory: Path) -> None:
        (directory / NUMBERS).write_text(str(self._state.steps))
        self._thread.sleep(WRITE_S)
        (directory / STATE).write_bytes(self._state.to_bytes())
        self._thread.sleep(WRITE_S)

    def set_before_update(self, wait: Callable[[], None]) -> None:
        self._before_update = wait

    def weights(self) -> GatheredWeights | LiveWeights:
        return self._weights(lambda: weights_of(self._scene.seed, self._state))

    def train(self, batch: TrainBatch, step: Step, stopping: Stopping) -> StepResult:
        self.begin()
        self.add(batch, stopping, last=True)
        return self.finish(batch, step)

    def begin(self) -> None:
        self._scene.counts["a step began again"] += bool(self._parts)
        self._parts = []

    def add(self, part: TrainBatch, stopping: Stopping, *, last: bool) -> None:
        self._parts.append(part)
        if self._scene.untrainable:
            self._refuse_untrainable(part)
        share = len(set(part.group_ids.tolist())) / self._scene.config.trainer.batch_size
        self._thread.sleep(self._scene.step_s * share * (0.5 + self._rng.random()))
        if stopping():
            raise Stopped

    def finish(self, batch: TrainBatch, step: Step) -> StepResult:
        self._parts = []
        self._check(batch)
        self._wait_to_update()
        self._state, bad = self._state.after(batch.digest)
        return StepResult(bad="the loss is nan") if bad else StepResult(values={"loss": 0.0})

    def evaluate(self, version: Version, stopping: Stopping) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Do nothing: no resource is held."""

    def _wait_to_update(self) -> None:
        conductor, counts = self._scene.conductor, self._scene.counts
        now_s = conductor.now_s
        self._before_update()
        counts["a step waited for the version before" if conductor.now_s > now_s else "a step did not wait"] += 1

    def _refuse_untrainable(self, part: TrainBatch) -> None:
        groups = [GroupId(group) for group in dict.fromkeys(part.group_ids.tolist()) if is_untrainable(group)]
        if groups:
            self._scene.counts["a group could not be trained"] += len(groups)
            raise Untrainable(groups, "the loss raises")

    # --- checks of the input -------------------------------------------------------------------------------------

    def _check(self, batch: TrainBatch) -> None:
        scene = self._scene
        groups = tuple(dict.fromkeys(batch.group_ids.tolist()))
        sealed = scene.journal.batches.get(batch.batch)
        scene.journal.fetched.append(Fetched(batch.batch, batch.lineage, batch.step, batch.digest, groups))
        if sealed is None or [member.group for member in sealed.members] != list(groups):
            scene.journal.mismatches.append(f"a trainer trains batch {batch.batch}, which the scheduler did not name")
            return
        first = 0
        for member in sealed.members:
            payload = scene.journal.payloads.get(member.sha)
            scene.journal.checked["trainer"] += 1
            end = first + scene.samples
            if payload is None or not self._is_right(batch, slice(first, end), payload, member, sealed):
                scene.journal.mismatches.append(f"a trainer got bytes of group {member.group} that no worker wrote")
            first = end

    def _is_right(
        self, batch: TrainBatch, rows: slice, payload: GroupPayload, member: MemberRef, sealed: Batch
    ) -> bool:
        """Compare a group's rows with its payload and with the columns of its stages."""
        prompt, versions = len(payload.prompt_ids), payload.token_versions()
        written = batch.completions[rows]
        trained = np.where(versions >= sealed.mask_below, payload.loss_mask, 0).astype(np.bool_)
        pairs: list[tuple[Array, Array]] = [
            (batch.group_ids[rows], np.full(payload.num_samples, member.group)),
            (batch.completion_lengths[rows], payload.lengths),
            (batch.sequence_lengths[rows], payload.lengths + prompt),
            (batch.input_ids[rows, :prompt], np.tile(payload.prompt_ids, (payload.num_samples, 1))),
            (batch.input_ids[rows][written], payload.token_ids),
            (batch.behavior_logprobs[rows][written], payload.logprobs),
            (batch.token_versions[rows][written], versions),
            (batch.loss_mask[rows][written], trained),
        ]
        for stage in self._stages:
            for name, column in columns_of(stage, replace(payload, stages={})).items():
                tokens = is_per_token(name)
                column_rows = (batch.token_stages if tokens else batch.sample_stages).get(short_name(name))
                if column_rows is None:
                    return False
                pairs.append((column_rows[rows][written] if tokens else column_rows[rows], column))
        outside = ~written
        return (
            all(np.array_equal(actual, expected) for actual, expected in pairs)
            and not batch.loss_mask[rows][outside].any()
            and bool((batch.token_versions[rows][outside] == NO_VERSION).all())
        )
