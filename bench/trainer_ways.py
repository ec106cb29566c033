# pyright: basic, reportMissingImports=false, reportPrivateImportUsage=false
# mypy: disable-error-code="no-untyped-call, misc"
"""One way to train, in a process of its own: ``python -m bench.trainer_ways WAY MODEL SHAPE THREADS STEPS``.

Prints one JSON object: medians of the seconds, CPU seconds and peak memory of the steps after the first, tokens of a
step, share of matmul.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from bench.trainer import OURS
from bench.trainer_data import SHAPES, Shape, batch
from staleflow.clients.models.passes import padded_passes
from staleflow.clients.trainer.algorithms.advantages import grpo
from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.configs.schema import Config
from staleflow.process.host import reuse_memory

LR, CAP, CLIP = 1e-5, 2.0, 1.0
MATMUL, MATMUL_TURNS = 1024, 20


@dataclass(slots=True)
class Measure:
    """Seconds and peak memory of the measured steps."""

    seconds: list[float] = field(default_factory=list[float])
    cpu_seconds: list[float] = field(default_factory=list[float])
    peaks_mib: list[float] = field(default_factory=list[float])

    @contextmanager
    def step(self) -> Iterator[None]:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of the resident memory
        held, started, used = memory("VmRSS"), time.perf_counter(), time.process_time()
        yield
        self.seconds.append(time.perf_counter() - started)
        self.cpu_seconds.append(time.process_time() - used)
        self.peaks_mib.append((memory("VmHWM") - held) / 1024)


def memory(name: str) -> int:
    """Return a line of ``/proc/self/status`` in KiB."""
    text = Path("/proc/self/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith(name)).split()[1])


def hand_written(directory: Path, shape: Shape, measure: Measure, steps: int) -> None:
    """Train as a script would: right padding without a mask, logits of the completions only."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        data = batch(shape, step, model.config.vocab_size)
        with measure.step():
            advantages = grpo(torch.from_numpy(data.rewards), torch.from_numpy(data.group_ids))
            for rows in padded_passes(data.sequence_lengths, shape.micro_tokens):
                longest = int(data.sequence_lengths[rows].max())
                ids = torch.from_numpy(data.input_ids[rows, :longest])
                trained = torch.from_numpy(data.loss_mask[rows, :longest])
                behavior = torch.from_numpy(data.behavior_logprobs[rows, :longest])[trained]
                hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
                logits = model.lm_head(hidden[:, :-1][trained[:, 1:]])
                logprobs = torch.log_softmax(logits, -1).gather(-1, ids[trained].unsqueeze(-1)).squeeze(-1)
                each = advantages[rows].unsqueeze(1).expand(-1, longest)[trained]
                weight = (logprobs.detach() - behavior).exp().clamp(max=CAP)
                ratio = (logprobs - logprobs.detach()).exp()
                loss = -torch.minimum(ratio * each, ratio.clamp(0.8, 1.2) * each) * weight
                (loss.sum() / data.trained_tokens).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def ours(directory: Path, shape: Shape, measure: Measure, steps: int, settings: tuple[str, ...], threads: int) -> None:
    """Train with the shipped trainer."""
    from staleflow.clients.trainer.torch_trainer import TorchTrainer

    trainer: dict[str, Any] = {"lr": LR, "grad_clip": CLIP, "micro_tokens": shape.micro_tokens, "threads": threads}
    for text in settings:
        key, _, value = text.partition("=")
        trainer[key] = json.loads(value)
    table = {
        "prompts": {"source": "somewhere:prompts"},
        "reward": {"run": "somewhere:reward"},
        "rollout": {"max_new_tokens": shape.completion[1], "group_size": shape.samples},
        "trainer": trainer,
    }
    backend = TorchTrainer(msgspec.convert(table, Config), directory)
    for step in range(steps):
        data = batch(shape, step, backend.limits.vocabulary)
        with measure.step():
            result = backend.train(data, data.step, lambda: False)
        assert not result.bad, result.bad


def trl(directory: Path, shape: Shape, measure: Measure, steps: int) -> None:
    """Train with ``GRPOTrainer``, whose generation is replaced by the given trajectories."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rows = shape.groups * shape.samples
    longest = shape.prompt[1] + shape.completion[1]
    micro = next(size for size in range(min(rows, shape.micro_tokens // longest), 0, -1) if rows % size == 0)
    batches: list[TrainBatch] = []

    class Given(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
            return inputs_of(batches[-1])

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self._open: Any = None

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            batches.append(batch(shape, len(batches), vocabulary))
            self._open = measure.step()
            self._open.__enter__()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self._open.__exit__(None, None, None)

    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=rows // micro,
            num_generations=shape.samples,
            max_completion_length=shape.completion[1],
            max_steps=steps,
            learning_rate=LR,
            adam_beta2=0.95,
            max_grad_norm=CLIP,
            beta=0.0,
            loss_type="dapo",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_steps=1_000_000,
            model_init_kwargs={"dtype": "float32"},
        )
        trainer = Given(
            model=str(directory),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": "1"}] * (rows * (steps + 1))),
        )
        model: Any = trainer.model
        vocabulary = int(model.config.vocab_size)
        trainer.add_callback(Clock())
        trainer.train()


def inputs_of(data: TrainBatch) -> dict[str, torch.Tensor]:
    """Return a batch as TRL's trainer holds it: prompts padded on the left, completions on the right."""
    prompts = data.sequence_lengths - data.completion_lengths
    widest, longest = int(prompts.max()), int(data.completion_lengths.max())
    rows = len(prompts)
    prompt_ids, prompt_mask = np.zeros((2, rows, widest), np.int64)
    completion_ids, completion_mask = np.zeros((2, rows, longest), np.int64)
    for row, (prompt, length) in enumerate(zip(prompts, data.completion_lengths, strict=True)):
        prompt_ids[row, widest - prompt :] = data.input_ids[row, :prompt]
        prompt_mask[row, widest - prompt :] = 1
        completion_ids[row, :length] = data.input_ids[row, prompt : prompt + length]
        completion_mask[row, :length] = 1
    return {
        "prompt_ids": torch.from_numpy(prompt_ids),
        "prompt_mask": torch.from_numpy(prompt_mask),
        "completion_ids": torch.from_numpy(completion_ids),
        "completion_mask": torch.from_numpy(completion_mask),
        "advantages": grpo(torch.from_numpy(data.rewards), torch.from_numpy(data.group_ids)),
        "num_items_in_batch": torch.tensor(data.trained_tokens),
    }


def matmul_flops() -> float:
    """Return the FLOP/s of a large float32 matrix product with the threads of this process."""
    left, right = torch.randn(MATMUL, MATMUL), torch.randn(MATMUL, MATMUL)
    left @ right
    started = time.perf_counter()
    for _ in range(MATMUL_TURNS):
        left @ right
    return MATMUL_TURNS * 2 * MATMUL**3 / (time.perf_counter() - started)


def main(way: str, model: str, shape_name: str, threads: str, steps: str) -> None:
    torch.set_num_threads(int(threads))
    reuse_memory()  # as in every process of staleflow; otherwise page faults cost up to an eighth of a short step
    directory, shape, measure, count = Path(model), SHAPES[shape_name], Measure(), int(steps) + 1
    run: Callable[[], None]
    if way == "torch":
        run = lambda: hand_written(directory, shape, measure, count)  # noqa: E731
    elif way == "TRL":
        run = lambda: trl(directory, shape, measure, count)  # noqa: E731
    else:
        run = lambda: ours(directory, shape, measure, count, OURS[way], int(threads))  # noqa: E731
    run()
    parameters = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(directory).parameters())
    tokens = statistics.median(int(batch(shape, step, 8).sequence_lengths.sum()) for step in range(1, count))
    seconds = statistics.median(measure.seconds[1:])
    values = {
        "seconds": seconds,
        "cpu_seconds": statistics.median(measure.cpu_seconds[1:]),
        "tokens": tokens,
        "matmul_share": 6.0 * parameters * tokens / seconds / matmul_flops(),
        "peak_mib": statistics.median(measure.peaks_mib[1:]),
    }
    print(json.dumps(values))


if __name__ == "__main__":
    main(*sys.argv[1:])
