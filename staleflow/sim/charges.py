"""Durations of a simulated run: from its cost file, and from the constants of its configuration where that has none."""

import math
from dataclasses import dataclass
from pathlib import Path

from staleflow.clients.rollout.engines.simulated_lengths import normal, share
from staleflow.configs.costs import Costs
from staleflow.configs.loading.cost_file import read_costs
from staleflow.configs.schema import Config
from staleflow.sim.cost import StepCost

_REWARD = 3
"""Added to the seed for draws of rewards, so that they are independent of the other draws of a group."""


@dataclass(frozen=True, slots=True)
class Charges:
    """Durations in seconds."""

    config: Config
    costs: Costs

    @classmethod
    def of(cls, config: Config) -> "Charges":
        """Read the cost file of the configuration. Raise ``ConfigError`` if it is wrong."""
        path = config.simulation.costs
        return cls(config, read_costs(Path(path)) if path else Costs())

    # --- engines ---------------------------------------------------------------------------------------------

    def step_cost(self, speed: float = 1.0, compute: float = 0.0) -> StepCost:
        """Return the durations of the steps of an engine; ``compute``: speed of its arithmetic, 0 if it is the same."""
        engine = self.costs.engine
        if engine is not None:
            return StepCost.of(engine, prefill_s=engine.prefill_s, speed=speed, compute=compute)
        config, simulated = self.config, self.config.rollout.simulated
        return StepCost.of(simulated, prefill_s=config.simulation.prefill_s, speed=speed, compute=compute)

    def pull_s(self, *, remote: bool = False) -> float:
        pull = self.costs.pull
        if pull is None:
            return self.config.simulation.pull_s
        each_s = pull.gib_s + pull.network_gib_s if remote else pull.gib_s
        return pull.fixed_s + each_s * self._gib

    def load_s(self) -> float:
        load = self.costs.load
        return self.config.simulation.load_s if load is None else load.fixed_s + load.gib_s * self._gib

    def reward_worker_s(self) -> float:
        """Return the time for which a group occupies a reward worker."""
        reward = self.costs.reward
        return 0.0 if reward is None else reward.group_s

    def reward_s(self, group: int, draw: int) -> float:
        """Return the time of the reward of a group beyond that; another ``draw`` (such as its lease) gives another
        one."""
        reward = self.costs.reward
        if reward is None:
            return self.config.simulation.reward_s
        if not reward.mean_s:
            return reward.fixed_s
        seed = self.config.seed + _REWARD
        if reward.distribution == "exponential":
            return reward.fixed_s - reward.mean_s * math.log(share(seed, group, draw))
        deviate = normal(seed, group, draw)
        return reward.fixed_s + reward.mean_s * math.exp(reward.sigma * deviate - reward.sigma**2 / 2)

    def longest_reward_s(self) -> float:
        """Return a time that a reward practically never exceeds."""
        reward = self.costs.reward
        if reward is None:
            return self.config.simulation.reward_s
        batch_s = reward.group_s * self.config.trainer.batch_size * (self.config.staleness.max_staleness + 1)
        return reward.fixed_s + 20.0 * reward.mean_s + batch_s

    # --- trainer ---------------------------------------------------------------------------------------------

    def train_s(self, groups: int, tokens: int, *, last: bool = True) -> float:
        """Return the time to train that many groups of a batch with that many tokens, prompts included; ``last``: they
        complete the batch."""
        trainer, batch_size = self.costs.trainer, self.config.trainer.batch_size
        if trainer is None:
            return self.config.trainer.simulated_step_s * (groups / batch_size)
        trajectories = groups * self.config.rollout.group_size
        fixed_s = trainer.fixed_s if last else 0.0
        return fixed_s + trainer.token_s * tokens + trainer.trajectory_s * trajectories

    def between_s(self) -> float:
        """Return the time between two steps, apart from publishing and checkpoints."""
        trainer = self.costs.trainer
        return 0.0 if trainer is None else trainer.between_s

    def publish_s(self) -> float:
        publish = self.costs.publish
        return 0.0 if publish is None else publish.fixed_s + publish.gib_s * self._gib

    def checkpoint_s(self) -> float:
        """Return the time for which training stands still at a checkpoint."""
        checkpoint = self.costs.checkpoint
        if checkpoint is None or checkpoint.asynchronous:
            return 0.0
        return checkpoint.fixed_s + checkpoint.gib_s * self._gib

    def written_s(self) -> float:
        """Return the time from the step of a checkpoint until it is complete."""
        checkpoint = self.costs.checkpoint
        return 0.0 if checkpoint is None else checkpoint.fixed_s + checkpoint.gib_s * self._gib

    @property
    def _gib(self) -> float:
        return self.config.simulation.model_gib
