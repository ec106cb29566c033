# pyright: basic, reportMissingImports=false
# mypy: disable-error-code="no-untyped-call"
"""The rollout side of a run, as TRL's ``AsyncGRPOTrainer`` expects it.

Consumes: the batch of each step, and of the step after it, because the data loader of TRL reads one micro-batch ahead.
Produces: one version for each optimizer step. A step that did not consume exactly its batch is not published.
"""

import os
import queue
from collections.abc import Generator, Iterator
from itertools import cycle, islice
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

import staleflow
from staleflow.examples.async_grpo.cpu import use_cpu
from staleflow.examples.async_grpo.samples import SampleQueue, samples_of

NAMES = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr"}
"""TRL's names of numbers, and the run's."""


class Rollouts(TrainerCallback, ExportableState):
    """Pass one object as ``rollout_worker``, as ``weight_transfer`` and in ``callbacks``."""

    def __init__(self, run: staleflow.Run) -> None:
        config = run.config
        if config.staleness.max_staleness < 1:
            allowed = "at least 1, better 2: TRL's data loader reads one micro-batch ahead"
            raise staleflow.ConfigError("staleness.max_staleness", config.staleness.max_staleness, allowed)
        if config.coordination.admission != "fill":
            allowed = '"fill": the run cannot measure when a trainer that reads ahead needs the next groups'
            raise staleflow.ConfigError("coordination.admission", config.coordination.admission, allowed)
        if not torch.accelerator.is_available():
            use_cpu()
        self._run, self._config = run, config
        self._step_samples = config.trainer.batch_size * config.rollout.group_size
        self._ahead_samples = 0
        self._client: staleflow.TrainerClient | None = None
        self._lineage: Any = 0
        self._offset = 0
        """TRL's number of a version minus the run's."""
        self._batches: Generator[Any] = _none()
        self._pending: list[Any] = []
        """Batches that TRL has, in part at least, and has not trained."""
        self._last: Any = None
        """The batch of the newest version."""
        self._num_trained = 0
        self._first_sync, self._ended = True, False
        self.rollout_buffer = SampleQueue(self._refill)
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self.model_dir = str(run.model_dir)

    def arguments(self, micro_batch: int = 0) -> dict[str, Any]:
        """Return the arguments of ``AsyncGRPOConfig`` that the run's configuration decides.

        ``micro_batch``: samples of one forward pass on one device; 0: its whole share of the batch.
        """
        trainer, rollout = self._config.trainer, self._config.rollout
        world = int(os.environ.get("WORLD_SIZE", "1"))
        micro = micro_batch or max(self._step_samples // world, 1)
        if self._step_samples % (micro * world):
            allowed = f"times {world} processes it must divide the {self._step_samples} samples of a batch"
            raise staleflow.ConfigError("micro_batch", micro, allowed)
        return {
            **self._required(),
            "per_device_train_batch_size": micro,
            "gradient_accumulation_steps": self._step_samples // (micro * world),
            "num_generations": rollout.group_size,
            "max_completion_length": rollout.max_new_tokens,
            "learning_rate": trainer.lr,
            "warmup_steps": trainer.warmup_steps,
            "adam_beta1": trainer.betas[0],
            "adam_beta2": trainer.betas[1],
            "weight_decay": trainer.weight_decay,
            "max_grad_norm": trainer.grad_clip,
            "epsilon": trainer.algorithm.clip_low,
            "epsilon_high": trainer.algorithm.clip_high,
            "save_steps": trainer.checkpoint_every,
            "save_total_limit": trainer.keep_checkpoints,
            "seed": self._config.seed,
            "use_cpu": not torch.accelerator.is_available(),
        }

    def _required(self) -> dict[str, Any]:
        """Return the arguments without which a step of TRL is not a step of the run."""
        return {
            "max_steps": self._config.trainer.steps,
            "max_staleness": self._config.staleness.max_staleness,  # TRL must not drop what the run has admitted
            "weight_sync_steps": 1,
            "token_budget": 0,  # a number of samples, not of tokens, makes a micro-batch
            "temperature": self._config.rollout.temperature,
        }

    # TrainerCallback --------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Join the run with the weights that TRL has loaded: the initial model, or a checkpoint."""
        self._check(args)
        if not state.is_world_process_zero:
            return
        saved = state.stateful_callbacks.get("Rollouts", {}).get("attributes", {})
        self._client = self._run.trainer()
        reply = self._client.join(saved.get("_lineage", 0), state.global_step)
        self._lineage, self._first_sync = reply.lineage, reply.version < 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the training with this step if the run was drained."""
        ended = torch.tensor(int(self._ended), device=args.device)
        if torch.distributed.is_initialized():
            torch.distributed.broadcast(ended, 0)
        if ended and state.global_step < args.max_steps:
            control.should_training_stop = control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Register the checkpoint: the run then deletes payload that only older ones need."""
        if self._client is not None:
            self._client.checkpointed(self._lineage, state.global_step, keep=self._config.trainer.keep_checkpoints)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Send the numbers of the step to the run's metrics."""
        if self._client is None or self._last is None or not logs or "loss" not in logs:
            return
        batch = self._last
        mean_age, max_age = batch.off_policy()
        values = {own: float(logs[name]) for name, own in NAMES.items() if name in logs}
        values |= {"off_policy/mean": mean_age, "off_policy/max": float(max_age)}
        values |= {"reward/mean": float(batch.rewards.mean()), "reward/std": float(batch.rewards.std())}
        values |= {"length/mean": float(batch.sampled_lengths.mean()), "trainer/tokens": float(batch.trained_tokens)}
        self._client.metrics(batch.step, values)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint of TRL keeps for ``on_train_begin``."""
        return {"args": {}, "attributes": {"_lineage": int(self._lineage)}}

    # RolloutWorkerProtocol --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Request the first batch."""
        assert self._client is not None
        self._batches = self._client.batches(self._config.trainer.steps, ahead=True)

    def update_model_version(self, model_version: int) -> None:
        """Learn TRL's number of the run's newest version."""
        assert self._client is not None
        self._offset = model_version - self._client.version

    def check_health(self, stale_after_s: float) -> None:
        """Do nothing: the client raises in ``rollout_buffer.get`` if the run has failed."""

    def stop(self) -> None:
        """End the run if its last step is trained or it was drained. Otherwise it waits for the next trainer."""
        self._batches.close()
        client = self._client
        if client is not None and (client.version >= self._config.trainer.steps or client.drained):
            client.finished()

    # WeightTransferProtocol -------------------------------------------------------------------------------------

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish a version: the joined one at first, then one for each optimizer step."""
        client = self._client
        assert client is not None
        weights = {name: tensor.detach().cpu() for name, tensor in iterator}
        if self.rollout_buffer.num_taken:
            self._check_consumed()
            client.commit(weights)
            self._num_trained += 1
            self._last = self._pending.pop(0)
        elif self._first_sync:
            client.publish_initial(weights)
        else:
            client.holds(weights)

    def destroy(self) -> None:
        """Leave the run."""
        if self._client is not None:
            self._client.close()

    # ------------------------------------------------------------------------------------------------------------

    def _refill(self) -> None:
        """Put the samples of the next batch.

        After the last batch, put samples that TRL reads ahead and never trains: its loader cannot end.
        """
        assert self._client is not None
        try:
            batch = next(self._batches, None)
        except staleflow.NoBatch as error:
            self._client.finished(str(error))
            raise
        if batch is not None:
            self._pending.append(batch)
            samples = samples_of(batch, self._offset)
        elif self._pending:
            self._ended = True
            repeated = cycle(samples_of(self._pending[-1], self._offset))
            samples = list(islice(repeated, self._ahead_samples))
        else:
            raise RuntimeError(f"the run has no batch for TRL: {self._client.drained or 'it was interrupted'}")
        for sample in samples:
            self.rollout_buffer.put(sample)

    def _check(self, args: Any) -> None:
        wanted = self._required()
        for name, value in wanted.items():
            if getattr(args, name) != value:
                raise staleflow.ConfigError(
                    name, getattr(args, name), f"it must be {value}, as in Rollouts.arguments()"
                )
        self._ahead_samples = args.per_device_train_batch_size * args.world_size
        step = self._ahead_samples * args.gradient_accumulation_steps
        if step != self._step_samples:
            size = f"{args.per_device_train_batch_size} x {args.gradient_accumulation_steps} x {args.world_size}"
            allowed = f"a step must have the {self._step_samples} samples of a batch, as in Rollouts.arguments()"
            what = "per_device_train_batch_size x gradient_accumulation_steps x processes"
            raise staleflow.ConfigError(what, size, allowed)

    def _check_consumed(self) -> None:
        """Raise unless TRL has trained exactly the batches up to this step, and has read one micro-batch ahead."""
        taken = self.rollout_buffer.num_taken
        wanted = (self._num_trained + 1) * self._step_samples + self._ahead_samples
        if taken != wanted:
            raise RuntimeError(
                f"after {self._num_trained + 1} steps TRL has taken {taken} samples, not {wanted}: it has dropped "
                "some, or its steps are not the run's; nothing was published"
            )


def newest_checkpoint(folder: str) -> str | None:
    """Return the newest checkpoint of TRL in ``folder``, for ``train(resume_from_checkpoint=...)``."""
    return get_last_checkpoint(folder) if os.path.isdir(folder) else None


def _none() -> Generator[Any]:
    yield from ()
