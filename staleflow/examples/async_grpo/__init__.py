"""TRL's asynchronous GRPO as the trainer of a run: ``staleflow run configs/trl.toml``."""
