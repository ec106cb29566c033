# pyright: basic, reportMissingImports=false
"""Measure forward and backward of one batch with padded passes, packed passes, and passes that share prompts, in turns.

    python -m bench.shared_prompts MODEL                                          the shapes of configs/smollm2.toml
    python -m bench.shared_prompts MODEL --prompts 4 6 --answers 2 4 --groups 32  the shapes of the quickstart

``MODEL`` is a model directory. Prints the minimum over the rounds, in seconds of the processor and of the clock; on a
busy machine only the first is meaningful, with ``OMP_NUM_THREADS=1``.
"""

import argparse
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from staleflow.clients.models.files import load_model
from staleflow.clients.models.passes import computed
from staleflow.clients.trainer.backends.forward import completion_logprobs
from staleflow.clients.trainer.backends.output_layer import from_logits
from staleflow.clients.trainer.backends.prompt_attention import sharing_attention
from staleflow.clients.trainer.backends.prompt_layout import shared_lengths
from staleflow.clients.trainer.backends.shared_prompts import shared_logprobs
from staleflow.clients.trainer.data.batch import FetchedGroup, TrainBatch, assemble
from staleflow.protocols.consistency.ids import BatchId, GroupId, Lineage, Step, Version
from staleflow.protocols.wire.messages import Batch
from staleflow.protocols.wire.trajectory import GroupPayload

CPU = torch.device("cpu")


def batch_of(options: argparse.Namespace, vocabulary: int) -> TrainBatch:
    """Return a batch of random tokens."""
    random = np.random.default_rng(0)
    groups = list[FetchedGroup]()
    for number in range(options.groups):
        prompt = int(random.integers(options.prompts[0], options.prompts[1] + 1))
        lengths = random.integers(options.answers[0], options.answers[1] + 1, options.samples).astype(np.int32)
        total = int(lengths.sum())
        payload = GroupPayload(
            prompt_ids=random.integers(0, vocabulary, prompt).astype(np.int32),
            lengths=lengths,
            token_ids=random.integers(0, vocabulary, total).astype(np.int32),
            logprobs=np.full(total, -1.0, np.float32),
            loss_mask=np.ones(total, np.uint8),
            segments=np.array([(row, 0, 0, length) for row, length in enumerate(lengths)], np.int64),
            finish=np.zeros(options.samples, np.uint8),
            stages={"stage/reward/reward": np.zeros(options.samples, np.float32)},
        )
        groups.append(FetchedGroup(group=GroupId(number), row={}, payload=payload))
    header = Batch(
        batch=BatchId(1), lineage=Lineage(0), step=Step(0), attempt=1, members=[], digest="", mask_below=Version(-1)
    )
    return assemble(header, groups)


def compute(model: Any, batch: TrainBatch, way: str) -> None:
    which = np.arange(len(batch.rewards))

    def forward(**inputs: Any) -> Tensor:
        logits: Tensor = model(use_cache=False, **inputs).logits
        return logits

    model.zero_grad()
    with sharing_attention(model) if way == "shared" else nullcontext():
        if way == "shared":
            logprobs = shared_logprobs(from_logits(forward, 1.0), batch, which, CPU)
        else:
            logprobs = completion_logprobs(from_logits(forward, 1.0), batch, which, CPU, packing=way == "packed")
        logprobs.mean().backward()  # type: ignore[no-untyped-call]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompts", type=int, nargs=2, default=[30, 60], metavar=("LEAST", "MOST"))
    parser.add_argument("--answers", type=int, nargs=2, default=[5, 5], metavar=("LEAST", "MOST"))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    model = load_model(options.model, "float32", CPU)
    batch = batch_of(options, model.config.get_text_config().vocab_size)
    lengths = batch.sequence_lengths
    tokens = {
        "padded": len(lengths) * int(lengths.max()),
        "packed": int(lengths.sum()),
        "shared": computed(lengths, shared_lengths(batch), batch.group_ids)[0],
    }
    measured: dict[str, list[tuple[float, float]]] = {way: [] for way in tokens}
    for _ in range(options.rounds):
        for way in tokens:
            before = time.process_time(), time.perf_counter()
            compute(model, batch, way)
            measured[way].append((time.process_time() - before[0], time.perf_counter() - before[1]))
    table = Table("passes", "tokens", "processor s", "s")
    for way, rounds in measured.items():
        processor, wall = (min(seconds) for seconds in zip(*rounds, strict=True))
        table.add_row(way, str(tokens[way]), f"{processor:.2f}", f"{wall:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
