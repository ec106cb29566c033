"""Small configurations of simulated runs; each test passes only the settings that it varies."""

from typing import Any

from staleflow.configs.schema import Config, Coordination, Prompts, Reward, Rollout, Scheduler, Staleness
from staleflow.configs.simulation import Simulated, Simulation
from staleflow.configs.trainer import Trainer
from staleflow.protocols.consistency.limits import Bound, OnOverdue


def config(
    *,
    steps: int = 12,
    batch_size: int = 4,
    group_size: int = 2,
    max_staleness: int = 1,
    bound: Bound = Bound.TRAJECTORY,
    on_overdue: OnOverdue = OnOverdue.WAIT,
    min_trainable: float = 0.0,
    engines: int = 2,
    slots: int = 16,
    train_s: float = 2.0,
    longest: int = 400,
    lease_s: float = 5.0,
    seed: int = 0,
    lengths: dict[str, Any] | None = None,
    **simulation: Any,
) -> Config:
    """Two engines whose steps last 10 ms, lognormal lengths around 64 tokens, a trainer of two seconds a step."""
    given: dict[str, Any] = {"k1": 0.0, "k2": 0.01, "k3": 0.0, "sigma": 1.0, **(lengths or {})}
    simulated = Simulated(**given)
    return Config(
        seed=seed,
        prompts=Prompts(source="nobody:opens"),
        reward=Reward(run="nobody:calls"),
        staleness=Staleness(
            max_staleness=max_staleness, bound=bound, on_overdue=on_overdue, min_trainable=min_trainable
        ),
        rollout=Rollout(
            engine="simulated",
            workers=engines,
            group_size=group_size,
            max_inflight=slots,
            max_new_tokens=longest,
            filter="none",
            simulated=simulated,
        ),
        trainer=Trainer(
            backend="simulated", batch_size=batch_size, steps=steps, simulated_step_s=train_s, checkpoint_every=4
        ),
        scheduler=Scheduler(lease_s=lease_s),
        # simple policies, whose results can be calculated by hand
        coordination=Coordination(routing="least_loaded", admission="fill"),
        simulation=Simulation(**simulation),
    )
