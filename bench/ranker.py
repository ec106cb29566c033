# pyright: basic, reportMissingImports=false
# mypy: disable-error-code="no-untyped-call"
"""How well rankers order real answers by length: SmolLM2-135M-Instruct on tasks of reasoning-gym.

The model answers each question in two groups of samples. The rankers see the first groups of half of the questions, one
batch after the other as in a run, and order the other half, which they never saw. The table has Kendall's tau of
expected and real lengths, over all questions, and the mean over tasks of the tau within a task:

- *prompt length*: the number of characters of the question, without learning
- *task*: the mean of the seen answers to questions of the same task
- *learned*: the shipped ranker (``coordination.ranker = "learned"``), from features of the text of a question
- *a small model*: ridge regression from the last hidden state of the model itself after the prompt, after StreamRL
  (arXiv 2504.15930), whose ranker is a small language model that is trained to order prompts by length
- *history*: the other group of the same question, as in a later epoch: what knowing the question is worth

    python -m bench.ranker [--questions 480] [--samples 2] [--tasks gcd,...] [--lengths FILE]

``--lengths`` keeps the answers' lengths: the command continues where it was stopped, and rankers can be compared
again. Needs the extras ``smollm2``, ``reasoning-gym`` and ``ranker``.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import click
import msgspec
import numpy as np
import torch
from sklearn.linear_model import RidgeCV

from bench.progress import tracked
from staleflow.clients.models.files import load_model
from staleflow.clients.prompts import Encode
from staleflow.clients.rollout.engines.base import Request, Sampling
from staleflow.clients.rollout.engines.transformers.engine import TransformersEngine
from staleflow.clients.tokens import encoder, open_tokenizer
from staleflow.examples.reasoning import prompts
from staleflow.examples.smollm2 import build
from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.wire.tensors import Array
from staleflow.servers.scheduler.lengths.expected import Lengths, kendall_tau
from staleflow.servers.trajectories.prompt_features import feature_matrix

TASKS: Final = (
    *("chain_sum", "gcd", "word_sorting", "letter_counting"),
    *("spell_backward", "basic_arithmetic", "number_sorting", "simple_equations"),
)
MAX_NEW_TOKENS: Final = 256
SLOTS: Final = 64
BATCH: Final = 32
"""Groups that finish between two training steps of the learned ranker."""
ALPHAS: Final = np.logspace(0, 6, 13)


class Question(msgspec.Struct, kw_only=True):
    """A question and the numbers of tokens of its answers."""

    task: str
    prompt: str
    groups: list[list[int]] = []


def questions(tasks: Sequence[str], count: int, seed: int) -> list[Question]:
    """Return ``count`` questions, one of each task in turn."""
    rows = {task: prompts(seed, dataset=task, size=2 * count) for task in tasks}
    return [
        Question(task=task, prompt=next(rows[task])["prompt"])
        for task, _ in zip(cycle(tasks), range(count), strict=False)
    ]


def answer(asked: Sequence[Question], engine: TransformersEngine, encode: Encode, samples: int, seed: int) -> None:
    """Let the engine answer each question in two groups."""
    sampling, finished = Sampling(max_new_tokens=MAX_NEW_TOKENS), dict[int, int]()
    for number, question in enumerate(asked):
        ids = encode(question.prompt)
        for name in range(number * 2 * samples, (number + 1) * 2 * samples):
            engine.submit(Request(id=name, prompt_ids=ids, sampling=sampling, seed=(seed << 32) + name))
    while len(finished) < 2 * samples * len(asked):
        finished |= {one.id: len(one.token_ids) for one in engine.step()}
    for number, question in enumerate(asked):
        lengths = [finished[name] for name in range(number * 2 * samples, (number + 1) * 2 * samples)]
        question.groups = [lengths[:samples], lengths[samples:]]


def answered(
    asked: list[Question], engine: TransformersEngine, encode: Encode, samples: int, file: Path | None
) -> list[Question]:
    """Return the questions with their lengths, those in ``file`` first; add the others to it, some at a time."""
    known = list[Question]()
    if file is not None and file.exists():
        known = msgspec.json.decode(file.read_bytes(), type=list[Question])
        if [one.prompt for one in known[: len(asked)]] != [one.prompt for one in asked[: len(known)]]:
            raise click.UsageError(f"--lengths {file} has other questions: another seed, number or set of tasks")
    starts = range(len(known), len(asked), SLOTS)
    for start in tracked("questions", starts):
        part = asked[start : start + SLOTS]
        answer(part, engine, encode, samples, start)
        known += part
        if file is not None:
            file.write_bytes(msgspec.json.encode(known))
    return known[: len(asked)]


def learned(seen: Sequence[Question], unseen: Sequence[Question]) -> Array:
    """Return the expected lengths of the shipped ranker."""
    ranker, every = Lengths("learned"), [*seen, *unseen]
    ranker.rows = len(every)
    ranker.describe(range(len(every)), feature_matrix([{"prompt": one.prompt} for one in every]))
    for row, question in enumerate(seen):
        ranker.observe(GroupId(row), question.groups[0], truncated=False)
        if row % BATCH == BATCH - 1:
            ranker.learn()
    return np.array(ranker.expected_of([GroupId(len(seen) + row) for row in range(len(unseen))]))


@torch.inference_mode()
def hidden(asked: Sequence[Question], model: Any, encode: Encode) -> Array:
    """Return the last hidden state after each prompt, [len(asked), width]."""
    states: list[Array] = []
    for question in tracked("prompts", asked, lambda one: one.task):
        ids = torch.from_numpy(encode(question.prompt).astype(np.int64))[None]
        states.append(model.model(input_ids=ids).last_hidden_state[0, -1].float().numpy())
    return np.stack(states)


def tau(expected: Sequence[float] | Array, asked: Sequence[Question]) -> tuple[float, float]:
    """Return Kendall's tau over all questions, and the mean of those within a task."""
    pairs = [(float(one), _log_mean(question.groups[0])) for one, question in zip(expected, asked, strict=True)]
    tasks = sorted({question.task for question in asked})
    within = [
        kendall_tau([pair for pair, question in zip(pairs, asked, strict=True) if question.task == task])
        for task in tasks
    ]
    return kendall_tau(pairs), statistics.fmean(within)


def _log_mean(lengths: Sequence[int]) -> float:
    return float(np.log(lengths).mean())


def _names(_: click.Context, __: click.Parameter, value: str) -> list[str]:
    return [name.strip() for name in value.split(",") if name.strip()]


@click.command(help=__doc__)
@click.option("--questions", "count", default=480, show_default=True, type=click.IntRange(min=64))
@click.option("--samples", default=2, show_default=True, type=click.IntRange(min=1), help="Of a group.")
@click.option("--tasks", default=",".join(TASKS), show_default=True, callback=_names)
@click.option("--seed", default=0, show_default=True)
@click.option("--lengths", type=click.Path(path_type=Path, dir_okay=False), help="File of the answers' lengths.")
def main(count: int, samples: int, tasks: list[str], seed: int, lengths: Path | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder, "model"), 0)
        model = load_model(Path(folder, "model"), "float32", torch.device("cpu"))
        tokenizer = open_tokenizer(Path(folder, "model"))
    engine = TransformersEngine(model, [tokenizer.eos_token_id], slots=SLOTS)
    encode = encoder(tokenizer, chat_template=True)
    asked = answered(questions(tasks, count, seed), engine, encode, samples, lengths)
    half = len(asked) // 2
    seen, unseen = asked[:half], asked[half:]
    began = time.perf_counter()
    states = hidden(asked, model, encode)
    hidden_ms = 1000 * (time.perf_counter() - began) / len(asked)
    known = [_log_mean(question.groups[0]) for question in seen]
    small = RidgeCV(ALPHAS).fit(states[:half], known).predict(states[half:])
    means = {task: statistics.fmean(_log_mean(one.groups[0]) for one in seen if one.task == task) for task in tasks}
    rows: dict[str, tuple[float, float]] = {
        "prompt length": tau([len(question.prompt) for question in unseen], unseen),
        "task": tau([means[question.task] for question in unseen], unseen),
        "learned": tau(learned(seen, unseen), unseen),
        "a small model": tau(small, unseen),
        "history": tau([_log_mean(question.groups[1]) for question in unseen], unseen),
    }
    every = [length for question in asked for group in question.groups for length in group]
    low, middle, high = np.quantile(every, (0.1, 0.5, 0.9))
    cut = statistics.fmean(length >= MAX_NEW_TOKENS for length in every)
    click.echo(
        f"{len(asked)} questions of {len({one.task for one in asked})} tasks, two groups of {len(asked[0].groups[0])}; "
        f"tokens of an answer: median {middle:.0f}, 10 % and 90 % {low:.0f} and {high:.0f}; {cut:.0%} of the "
        f"answers cut at {MAX_NEW_TOKENS}; the small model takes {hidden_ms:.1f} ms a prompt\n"
    )
    click.echo("| ranker | tau | within a task |\n| --- | ---: | ---: |")
    for name, (overall, within) in rows.items():
        click.echo(f"| {name} | {overall:.2f} | {within:.2f} |")


if __name__ == "__main__":
    main()
