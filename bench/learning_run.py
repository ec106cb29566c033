# pyright: basic, reportMissingImports=false
"""One run in one thread: the shipped ledger, engine and trainer take turns, so that staleness is exact and repeatable.

The window is always full: every group that the ledger admits is started at once, by the newest weights that the engine
has. With a full window the trainer's data is as old as the bound allows; after the first ``max_staleness`` steps every
batch is.

The engine meets new weights in one of two ways. *Drained* (``decode_steps`` 0): all started trajectories are finished
before a train step, so each trajectory has one version. *In place*: a train step comes every ``decode_steps`` tokens,
and trajectories continue with the new weights; with the token bound, tokens that they wrote too early are masked.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from staleflow.clients.models.files import load_model
from staleflow.clients.rollout.engines.base import Request, Sampling, Trajectory
from staleflow.clients.rollout.engines.transformers.engine import TransformersEngine
from staleflow.clients.rollout.groups import payload
from staleflow.clients.trainer.backends.tensors import to_arrays
from staleflow.clients.trainer.data.batch import FetchedGroup, TrainBatch, assemble
from staleflow.clients.trainer.torch_trainer import TorchTrainer
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.effects import Dropped, Effect, Released, Sealed
from staleflow.protocols.consistency.events import Consume, Deliver, Event, Join, Occupy, Publish, Push, Reserve
from staleflow.protocols.consistency.ids import BatchId, GroupId, LeaseId, Lineage, Step, Version, WorkerId
from staleflow.protocols.consistency.limits import Bound, Limits
from staleflow.protocols.consistency.machine import Machine
from staleflow.protocols.wire.messages import Batch
from staleflow.protocols.wire.trajectory import GroupPayload

ENGINE, TRAINER = WorkerId("rollout-0"), WorkerId("trainer")
REWARD = "stage/reward/reward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A prompt and the judge of its completions."""

    prompt_ids: tuple[int, ...]
    reward: Callable[[Sequence[int]], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The inputs of a run: configuration, initial model, endless problems, and those for evaluation."""

    config: Config
    directory: Path
    problems: Iterator[Problem]
    held_out: Sequence[Problem]
    stop_ids: Sequence[int]


@dataclass(slots=True, kw_only=True)
class _Live:
    """A group from its lease to its batch."""

    problem: Problem
    lease: LeaseId
    done: list[Trajectory] = field(default_factory=list[Trajectory])
    payload: GroupPayload | None = None


class Loop:
    """Engine, ledger and trainer of one run. Call ``step`` repeatedly; ``evaluate`` in between changes no state."""

    def __init__(
        self,
        config: Config,
        directory: Path,
        problems: Iterator[Problem],
        *,
        stop_ids: Sequence[int],
        decode_steps: int = 0,
        debug: bool = False,
    ) -> None:
        self._config, self._problems, self._decode_steps = config, problems, decode_steps
        staleness, size = config.staleness, config.trainer.batch_size
        self.machine = Machine(
            Limits(
                max_staleness=staleness.max_staleness,
                batch_size=size,
                bound=staleness.bound,
                min_trainable=staleness.min_trainable,
                debug=debug,
            )
        )
        self.trainer = TorchTrainer(config, directory)
        slots = size * config.rollout.group_size * (staleness.max_staleness + 2)
        model = load_model(directory, config.model.dtype, torch.device("cpu"))
        self.engine = TransformersEngine(model, stop_ids, slots=slots)
        self._judge = TransformersEngine(model, stop_ids, slots=slots)
        self._sampling = Sampling(max_new_tokens=config.rollout.max_new_tokens, temperature=config.rollout.temperature)
        self._live: dict[int, _Live] = {}
        self._groups = 0
        self._apply(Join(trainer=TRAINER, lineage=Lineage(0), version=Version(0)))
        self._apply(Publish(trainer_term=self.machine.trainer_term, sha=self._load(), nbytes=1))

    def step(self) -> dict[str, float]:
        """Fill the window, train the next batch, publish, load; metrics of the step."""
        began = time.process_time()
        sealed = self._write()
        written = time.process_time()
        batch = self._batch(sealed)
        self._apply(Deliver(batch=sealed.batch, trainer_term=sealed.trainer_term, rank=0))
        result = self.trainer.train(batch, sealed.step, lambda: False)
        event = Consume(
            batch=sealed.batch, step=sealed.step, trainer_term=sealed.trainer_term, sha=self._load(), nbytes=1
        )
        self._apply(event)
        for member in sealed.members:
            del self._live[member.group]
        mean, largest = batch.off_policy()
        return result.values | {
            "step": float(sealed.step),
            "reward": float(batch.rewards.mean()),
            "samples": float(len(batch.rewards)),
            "off_policy/mean": mean,
            "off_policy/max": float(largest),
            "masked": batch.masked_tokens / max(1, int(batch.completion_lengths.sum())),
            "bad": float(bool(result.bad)),
            "time/write": written - began,  # CPU time: other processes do not count
            "time/train": time.process_time() - written,
        }

    def evaluate(self, problems: Sequence[Problem]) -> float:
        """Mean reward of the newest weights, sampled as in training, always with the same random numbers."""
        for number, problem in enumerate(problems):
            self._judge.submit(self._request(number, problem, seed=(1 << 60) + number))
        done: dict[int, Trajectory] = {}
        while len(done) < len(problems):
            done.update((trajectory.id, trajectory) for trajectory in self._judge.step())
        return float(np.mean([problem.reward(done[n].token_ids.tolist()) for n, problem in enumerate(problems)]))

    def _load(self) -> str:
        """Copy the trainer's weights into the engine, as the next version; return their digest."""
        version = Version(self.machine.version + 1)
        tensors = to_arrays(self.trainer.model.state_dict())
        self.engine.load(tensors, Lineage(0), version)
        return hashlib.sha256(b"".join(tensor.tobytes() for tensor in tensors.values())).hexdigest()

    def _write(self) -> Sealed:
        """Let the engine write until the next batch is complete, and longer if the mode requires it."""
        self._admit()
        for _ in range(self._decode_steps):
            self._decode()
        while not (sealed := self._sealed()) or (self._decode_steps == 0 and self._busy()):
            if not self._busy():
                raise RuntimeError(f"nothing is written and step {self.machine.version} has no batch")
            self._decode()
        return sealed

    def _sealed(self) -> Sealed | None:
        return self.machine.sealed_batch(Step(self.machine.version))

    def _busy(self) -> bool:
        stats = self.engine.stats()
        return stats.running + stats.waiting > 0

    def _decode(self) -> None:
        for trajectory in self.engine.step():
            self._ended(trajectory)
        self._admit()

    def _admit(self) -> None:
        """Start every group that the ledger has room for, with the weights that the engine has."""
        version = self.machine.version
        for _ in range(self.machine.room(version)):
            group = self._groups
            self._groups += 1
            self._apply(Reserve(group=GroupId(group), worker=ENGINE, version=version))
            live = _Live(problem=next(self._problems), lease=self.machine.lease_hi)
            self._live[group] = live
            for sample in range(self._config.rollout.group_size):
                number = group * self._config.rollout.group_size + sample
                self.engine.submit(self._request(number, live.problem, seed=(self._config.seed << 40) + number))

    def _request(self, number: int, problem: Problem, *, seed: int) -> Request:
        return Request(id=number, prompt_ids=np.array(problem.prompt_ids, np.int32), sampling=self._sampling, seed=seed)

    def _ended(self, trajectory: Trajectory) -> None:
        """Handle the end of a sample. The last of a group makes its payload, its rewards, and the ledger's push and
        occupy."""
        size = self._config.rollout.group_size
        group = trajectory.id // size
        live = self._live[group]
        live.done.append(trajectory)
        if len(live.done) < size:
            return
        pushed = payload(np.array(live.problem.prompt_ids, np.int32), sorted(live.done, key=lambda one: one.id))
        rewards = [live.problem.reward(one.token_ids.tolist()) for one in sorted(live.done, key=lambda one: one.id)]
        pushed.stages[REWARD] = np.array(rewards, np.float32)
        pushed.check()
        live.payload = pushed
        push = Push(
            group=GroupId(group),
            lease=live.lease,
            worker=ENGINE,
            shard=0,
            sha=hashlib.sha256(pushed.token_ids.tobytes() + pushed.logprobs.tobytes()).hexdigest(),
            nbytes=pushed.token_ids.nbytes,
            truncated=False,
            segments=tuple(pushed.segment_summary()),
            sequence_tokens=pushed.num_tokens + pushed.num_samples * len(pushed.prompt_ids),
        )
        self._apply(push)
        self._apply(Occupy(group=GroupId(group), lease=live.lease))

    def _apply(self, event: Event) -> None:
        effects: tuple[Effect, ...] = self.machine.apply(event, 0)
        for effect in effects:
            if isinstance(effect, Released | Dropped):
                self._live.pop(effect.group, None)

    def _batch(self, sealed: Sealed) -> TrainBatch:
        """The batch as the trajectory server and the trainer's client make it."""
        token_bound = self._config.staleness.bound is Bound.TOKEN
        below = max(-1, sealed.step - self._config.staleness.max_staleness) if token_bound else -1
        header = Batch(
            batch=BatchId(sealed.batch),
            lineage=sealed.lineage,
            step=sealed.step,
            attempt=1,
            members=[],
            digest=sealed.digest,
            mask_below=Version(below),
        )
        return assemble(header, [self._fetched(member.group) for member in sealed.members])

    def _fetched(self, group: GroupId) -> FetchedGroup:
        pushed = self._live[group].payload
        assert pushed is not None
        row: dict[str, Any] = {}
        return FetchedGroup(group=group, row=row, payload=pushed)
