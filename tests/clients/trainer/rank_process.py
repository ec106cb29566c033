# pyright: basic, reportMissingImports=false
"""One rank of a trainer without a service. Its argument is the path of the task."""

import faulthandler
import json
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from staleflow.clients.trainer.backends.base import StepResult, Stopped, Untrainable
from staleflow.clients.trainer.backends.collectives import ManyRanks, open_ranks
from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.clients.trainer.data.micro_batches import concatenated
from staleflow.clients.trainer.evaluation.factory import open_evaluation
from staleflow.clients.trainer.gradients import Passes
from staleflow.clients.trainer.torch_trainer import TorchTrainer
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import Step, Version
from staleflow.protocols.wire.routed_experts import NAME
from tests.clients.trainer.making import header, piece_shares, share

PATIENCE_S = 180.0


def keep(trainer: TorchTrainer, leads: bool, file: str) -> None:
    """Save the weights that would be published now; every rank takes part."""
    weights = {name: array.copy() for name, array in trainer.weights().items()}
    if leads:
        save: Any = np.savez
        save(file, **weights)


def keep_spans(trainer: TorchTrainer, world: int, file: str) -> None:
    """Save what this rank would upload of the weights; check that no collective is needed for it."""
    before, shards = collectives(), trainer.sharded_weights()
    spans = {str(span.offset): np.frombuffer(span.data, np.uint8) for span in shards.spans()}
    layout = np.frombuffer(msgspec.msgpack.encode(shards.layout()), np.uint8)
    assert collectives() == before
    for _ in shards.items():
        pass
    assert collectives() > before or world == 1, "a gather counts"
    save: Any = np.savez
    save(file, layout=layout, **spans)


def collectives() -> int:
    """Return the number of collectives so far, over all process groups of this rank."""
    groups: Any = torch.distributed.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups)


def save(trainer: TorchTrainer, leads: bool, task: dict[str, Any]) -> None:
    """Save a checkpoint, and the weights that would be published with it."""
    trainer.save(Path(task["save"]))
    keep(trainer, leads, task["out"] + "-saved.npz")


def count_tokens(trainer: TorchTrainer) -> list[int]:
    """Record the tokens of the rows that this rank divides into passes, at each division."""
    gradients, tokens = trainer._gradients, list[int]()
    passes = gradients.passes

    def counted(batch: TrainBatch, rows: NDArray[np.int64] | None = None) -> Passes:
        tokens.append(int(batch.sequence_lengths.sum()))
        return passes(batch, rows)

    gradients.passes = counted  # type: ignore[method-assign]
    return tokens


def streamed(trainer: TorchTrainer, parts: list[TrainBatch], step: int) -> StepResult:
    """Train one step in pieces, after a first attempt with another piece was started and abandoned."""
    trainer.begin()
    trainer.add(parts[-1], lambda: False, last=False)
    trainer.begin()
    for part in parts:
        trainer.add(part, lambda: False, last=part is parts[-1])
    return trainer.finish(concatenated(parts, header(step)), Step(step))


def lack_memory(trainer: TorchTrainer, call: int) -> None:
    """Let one backward pass run out of memory, before it computes anything."""
    backward, calls = trainer.learner.backward, iter(range(1, 999))

    def fails(loss: Any, *, last: bool) -> None:
        if next(calls) == call:
            raise torch.OutOfMemoryError("CUDA out of memory")
        backward(loss, last=last)

    trainer.learner.backward = fails  # type: ignore[method-assign]


def record_experts(data: TrainBatch, experts: int) -> None:
    """Add records for router replay that depend on the tokens alone: two layers, two experts per token."""
    first = data.input_ids[..., None, None] + np.arange(2)[:, None]
    data.token_columns[NAME] = ((first + np.arange(2)) % experts).astype(np.uint8)


def main() -> None:
    """Run the task; rank 0 writes the results."""
    faulthandler.dump_traceback_later(PATIENCE_S, file=2)  # print the stack of a rank that hangs
    task: dict[str, Any] = json.loads(Path(sys.argv[1]).read_bytes())
    config = msgspec.convert(task["config"], Config)
    ranks = open_ranks(config.trainer.backend)
    directory = Path(task["directory"])
    trainer = TorchTrainer(config, directory, open_evaluation(config, directory), ranks)
    if task.get("load"):
        trainer.check(Path(task["load"]))
        initial = weakref.ref(trainer.model)
        trainer.load(Path(task["load"]))
        assert initial() is None, "two models in memory"
    where, results = ranks.place, list[dict[str, Any]]()
    computed = count_tokens(trainer)
    if task.get("save_after") == -1:
        save(trainer, where.leads, task)
    if "no_room" in task and where.rank == task["no_room"][0]:
        lack_memory(trainer, task["no_room"][1])
    for step in task["steps"]:
        data = share(step, where.rank, where.world, groups=task.get("groups", 3), longest=task.get("longest", 1))
        if "experts" in task:
            record_experts(data, task["experts"])
        if step in task.get("bad", []) and where.rank == where.world - 1:
            data.behavior_logprobs[data.completions] = np.nan
        if step in task.get("surprising", []) and 2 in data.group_ids:
            data.behavior_logprobs[(data.group_ids == 2)[:, None] & data.completions] = -60.0
        looks = [False] * task.get("looks", 1)
        asked = iter([*looks, where.rank == where.world - 1] if step in task.get("stopped", []) else [])
        try:
            if "pieces" in task:
                result = streamed(trainer, piece_shares(step, where.rank, where.world, task["pieces"], groups=6), step)
            else:
                result = trainer.train(data, Step(step), lambda asked=asked: next(asked, False))  # type: ignore[misc]
        except Stopped:
            results.append({"bad": "stopped"})
        except Untrainable as error:
            results.append({"bad": str(error)})
        else:
            results.append(
                {
                    **result.values,
                    "bad": result.bad,
                    "micro_tokens": trainer._passes.micro_tokens,
                    "computed": ranks.gather(np.array(computed[-1:])).tolist(),
                }
            )
        if step in task.get("evaluated", []) and (where.leads or trainer.together):
            results[-1] |= trainer.evaluate(Version(step + 1), lambda: False)
        if step == task.get("save_after"):
            save(trainer, where.leads, task)
            if "background" in task:
                write = trainer.begin_save(Path(task["background"]))
    keep(trainer, where.leads, task["out"] + ".npz")
    if "background" in task:  # no file may exist before, and every later step is trained
        assert not [*Path(task["background"]).iterdir()]
        ranks.any(False)  # every rank has looked
        writer = threading.Thread(target=write)
        writer.start()
        writer.join()
    if trainer.together:
        keep_spans(trainer, where.world, f"{task['out']}-spans-{where.rank}.npz")
    if where.leads:
        Path(task["out"] + ".json").write_text(json.dumps(results))
    trainer.close()
    if isinstance(ranks, ManyRanks):
        ranks.close()
