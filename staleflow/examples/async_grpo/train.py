# pyright: basic, reportMissingImports=false, reportPrivateImportUsage=false, reportArgumentType=false
"""Train a run with TRL: the function of ``trainer.run`` in configs/trl.toml."""

from pathlib import Path

from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

import staleflow
from staleflow.examples.async_grpo.rollouts import Rollouts, newest_checkpoint


def train(run_dir: Path) -> None:
    with staleflow.connect(run_dir) as run:
        rollouts, output = Rollouts(run), str(run_dir / "trl")
        trainer = AsyncGRPOTrainer(
            model=rollouts.model_dir,
            args=AsyncGRPOConfig(output, bf16=False, gradient_checkpointing=False, **rollouts.arguments()),
            train_dataset=Dataset.from_dict({"prompt": [""]}),  # TRL wants one; the prompts are the run's
            rollout_worker=rollouts,
            weight_transfer=rollouts,
            callbacks=[rollouts],
        )
        trainer.train(resume_from_checkpoint=newest_checkpoint(output))
