"""Cost of a simulated run: its engines while they live, and the hardware of its trainer.

The cost of a step is the price of everything during the steps that ``measure.steps_per_min`` counts, divided by their
number, so that neither the idle start nor the end distorts it.
"""

from collections.abc import Iterable

from staleflow.configs.schema import Config
from staleflow.sim.measure import counted_steps
from staleflow.sim.result import EngineRow, StepRow

HOUR_S = 3600.0


def trainer_price(config: Config) -> float:
    """Return the price of the trainer's hardware for an hour."""
    launch = config.launch
    return config.simulation.trainer_price or launch.trainer_nodes * launch.trainer_price


def cost_per_step(config: Config, lives: Iterable[tuple[float, EngineRow]], rows: list[StepRow], skip: int) -> float:
    """Return the cost of a step from the price for an hour of each engine's life; 0 without prices or steps."""
    counted, began_s, ended_s = counted_steps(rows, skip)
    if not counted:
        return 0.0
    lived = sum(price * max(min(life.ended_s, ended_s) - max(life.began_s, began_s), 0.0) for price, life in lives)
    return (lived + trainer_price(config) * (ended_s - began_s)) / HOUR_S / counted


def cost_per_1000(config: Config, per_step: float) -> float:
    """Return the cost of 1,000 trained trajectories."""
    return 1000.0 * per_step / (config.trainer.batch_size * config.rollout.group_size)
