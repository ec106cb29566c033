"""Evaluate a model directory without a run: the engine, environment and reward of a configuration, in this process."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import msgspec

from staleflow.clients.evaluation.player import SetPlayer
from staleflow.clients.evaluation.scorer import open_scorer
from staleflow.clients.rollout.groups import Recipe
from staleflow.clients.rollout.main import open_engine, open_environments
from staleflow.clients.stage.main import decoder
from staleflow.configs.errors import ConfigError
from staleflow.configs.evals import EvalSet
from staleflow.configs.loading.hub import locate_model
from staleflow.configs.loading.presence import ADAPTER, LORA, check_model_dir, check_package, check_packages
from staleflow.configs.loading.prompt_rows import open_eval_set
from staleflow.configs.schema import Config, Model
from staleflow.metrics.evaluation import set_metrics
from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.messages.evaluation import PromptScores

HELD_OUT = "held-out"
"""Name of the set of ``prompts.eval_path`` or ``prompts.eval_source``."""

Progress = Callable[[str, int, int], None]
"""Called with a set's name, its finished prompts and its prompts."""


@dataclass(frozen=True, slots=True)
class SetResult:
    """A played set."""

    given: EvalSet
    scores: list[PromptScores]

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the set under ``eval/NAME/``."""
        given = self.given
        return set_metrics(given.name, self.scores, samples=given.samples, pass_reward=given.pass_reward)


def with_checkpoint(config: Config, checkpoint: Path) -> Config:
    """Return the configuration with ``checkpoint`` as its model, or as its adapter, over the base that it names.

    ``ConfigError`` if it is neither a model directory nor an adapter.
    """
    if (checkpoint / "checkpoints").is_dir():
        saved = [path for path in (checkpoint / "checkpoints").iterdir() if path.name.isdecimal()]
        newest = max(saved, key=lambda path: int(path.name), default=checkpoint / "checkpoints" / "VERSION")
        raise ConfigError("CHECKPOINT", str(checkpoint), f"it is a run directory; give a checkpoint of it: {newest}")
    model = Model(path=str(checkpoint.resolve()), dtype=config.model.dtype)
    if (checkpoint / ADAPTER).is_file():
        check_package("CHECKPOINT", str(checkpoint), "peft", LORA)
        from staleflow.clients.models.lora import lora_of

        lora, base = lora_of(checkpoint, "CHECKPOINT")
        key = f"base_model_name_or_path of {ADAPTER}"
        directory = locate_model(base, key)
        check_model_dir(directory, key)
        model = msgspec.structs.replace(model, path=str(directory.resolve()), lora=lora)
    else:
        check_model_dir(checkpoint, "CHECKPOINT")
    return msgspec.structs.replace(config, model=model)


def chosen_sets(config: Config, names: Sequence[str]) -> list[tuple[int, EvalSet]]:
    """Return the sets with these names, all without any, each with its number in ``config.eval``.

    Without ``[[eval]]``, the held-out prompts of ``[prompts]`` are the set ``held-out``, with one completion of each
    prompt, sampled as in training.
    """
    sets = list(enumerate(config.eval)) or _held_out(config)
    if not sets:
        allowed = "the configuration has none: add an [[eval]] table with a name and a path or source"
        raise ConfigError("eval", "[]", allowed)
    known = {given.name for _, given in sets}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError("--set", unknown[0], f"it must be one of {', '.join(sorted(known))}")
    return [(place, given) for place, given in sets if not names or given.name in names]


def _held_out(config: Config) -> list[tuple[int, EvalSet]]:
    prompts, rollout = config.prompts, config.rollout
    if not prompts.eval_path and not prompts.eval_source:
        return []
    given = EvalSet(
        name=HELD_OUT,
        path=prompts.eval_path,
        source=prompts.eval_source,
        options=prompts.options if prompts.eval_source else {},
        prompts=config.trainer.eval_prompts or EvalSet(name=HELD_OUT).prompts,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
    )
    return [(0, given)]


async def evaluate(config: Config, sets: Sequence[tuple[int, EvalSet]], progress: Progress) -> list[SetResult]:
    """Play sets one after another with the model of ``config``.

    Raise ``ConfigError`` if a source, the model or a function cannot be loaded, ``EngineError`` if the engine fails.
    """
    check_packages(config, role="rollout")
    played = [(given, open_eval_set(given, config.prompts, place, seed=config.seed)) for place, given in sets]
    nowhere = Path()  # ``model.path`` is set, so that nothing is read from a run directory
    engine, encode = await open_engine(config, nowhere)
    environments = open_environments(config, nowhere, engine, Recipe.of(config))
    try:
        if config.model.lora.rank:
            from staleflow.clients.models.lora import saved_version

            version = saved_version(Path(config.model.lora.path), Path(config.model.path), config.model.dtype)
            await engine.load(version, Lineage(0), Version(0))
        if environments is not None:
            await environments.start()
        async with open_scorer(config, decoder(config, nowhere)) as scorer:
            results: list[SetResult] = []
            for given, rows in played:
                player = SetPlayer(
                    config, given, rows, engine=engine, encode=encode, environments=environments, scorer=scorer
                )
                results.append(SetResult(given, await _all(player, given.name, len(rows), progress)))
            return results
    finally:
        if environments is not None:
            await environments.close()
        await engine.close()


async def _all(player: SetPlayer, name: str, prompts: int, progress: Progress) -> list[PromptScores]:
    """Return the scores of all prompts, in order of their numbers."""
    scores: list[PromptScores] = []
    progress(name, 0, prompts)
    async with aclosing(player.play(range(prompts))) as playing:
        async for one in playing:
            scores.append(one)
            progress(name, len(scores), prompts)
    return sorted(scores, key=lambda one: one.prompt)


def run(config: Config, sets: Sequence[tuple[int, EvalSet]], progress: Progress) -> list[SetResult]:
    """Run ``evaluate`` in an event loop of its own."""
    return asyncio.run(evaluate(config, sets, progress))
