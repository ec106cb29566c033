"""The numbers of a run that are reckoned alike for the service and for its peers."""

from itertools import pairwise

from staleflow.configs.schema import Config
from staleflow.configs.simulation import Fleet
from staleflow.sim.cost import StepCost
from staleflow.sim.engine import SimEngine
from staleflow.sim.result import EngineRow, StepRow


def steps_per_min(rows: list[StepRow], skip: int) -> float:
    """Steps a minute without the first and the last ``skip`` steps, or thirds of them; 0 when there are none.

    The first ones begin with idle engines; at the last ones nothing new is begun for steps that will not be.
    """
    if not rows:
        return 0.0
    skip = min(skip, (len(rows) - 1) // 3)
    counted = len(rows) - 2 * skip
    seconds = rows[skip + counted - 1].ended_s - (rows[skip - 1].ended_s if skip else 0.0)
    return 60.0 * counted / seconds if seconds > 0 else float("inf")


def rollout_limit(config: Config, fleet: list[Fleet], drawn: list[int]) -> float:
    """Steps a minute if every engine had all of its slots running all the time, at the mean length of its contexts."""
    if not drawn:
        return float("inf")
    mean = sum(drawn) / len(drawn)
    context = config.simulation.prompt_tokens + sum(length * length for length in drawn) / (2 * sum(drawn))
    rate = 0.0
    for kind in fleet:
        running = min(kind.slots, max(int(kind.kv_tokens / context), 1)) if kind.kv_tokens else kind.slots
        rate += StepCost.of(config.rollout.simulated, speed=kind.speed).tokens_per_s(running, round(running * context))
    return 60.0 * rate / (config.trainer.batch_size * config.rollout.group_size * mean)


def engine_row(name: str, engine: SimEngine, *, began_s: float, ended_s: float) -> EngineRow:
    """What there is to tell of one life of an engine."""
    seen = engine.seen()
    return EngineRow(
        name=name,
        began_s=began_s,
        ended_s=max(ended_s, began_s),
        busy_s=busy_s(engine.changes, ended_s),
        running=engine.changes,
        loads=[(begin, end, int(version)) for begin, end, version in engine.loads],
        generated=seen.generated,
        preempted=seen.preempted,
    )


def busy_s(changes: list[tuple[float, int]], until_s: float) -> float:
    """Seconds up to ``until_s`` with something running."""
    busy = 0.0
    for (begin_s, running), (end_s, _) in pairwise([*changes, (until_s, 0)]):
        if running and begin_s < until_s:
            busy += min(end_s, until_s) - begin_s
    return busy
