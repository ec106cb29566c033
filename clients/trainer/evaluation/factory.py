"""Select the evaluation of a run: single completions, or episodes of its environment."""

from pathlib import Path

from staleflow.clients.trainer.evaluation.episodes import EpisodeEvaluation
from staleflow.clients.trainer.evaluation.held_out import Evaluation, PromptEvaluation
from staleflow.configs.loading.prompt_rows import open_eval_prompts
from staleflow.configs.schema import Config


def open_evaluation(config: Config, directory: Path) -> Evaluation | None:
    """Return the evaluation of a run, or None without held-out prompts."""
    held_out = open_eval_prompts(config.prompts, seed=config.seed) if config.trainer.eval_prompts else None
    if held_out is None:
        return None
    rows = [held_out[row] for row in range(min(len(held_out), config.trainer.eval_prompts))]
    if not config.environment.run:
        return PromptEvaluation(config, directory, rows)
    return EpisodeEvaluation(config, directory, rows)
