"""Numbers of a run that are computed in the same way for the service and for its peers."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import fmean

from staleflow.configs.schema import Config
from staleflow.sim.charges import Charges
from staleflow.sim.cost import StepCost
from staleflow.sim.engine import SimEngine
from staleflow.sim.result import EngineRow, StepRow


def steps_per_min(rows: list[StepRow], skip: int) -> float:
    """Return the steps per minute over the counted steps; 0 if there are none."""
    counted, began_s, ended_s = counted_steps(rows, skip)
    if not counted:
        return 0.0
    return 60.0 * counted / (ended_s - began_s) if ended_s > began_s else float("inf")


def counted_steps(rows: Sequence[StepRow], skip: int) -> tuple[int, float, float]:
    """Return the number of counted steps and their begin and end: all without the first and the last ``skip``, or
    thirds of them.

    The first steps start with idle engines; during the last ones no work starts for steps that will not be.
    """
    if not rows:
        return 0, 0.0, 0.0
    skip = min(skip, (len(rows) - 1) // 3)
    counted = len(rows) - 2 * skip
    return counted, rows[skip - 1].ended_s if skip else 0.0, rows[skip + counted - 1].ended_s


def rollout_limit(
    config: Config, lives: Iterable[tuple[SimEngine, EngineRow]], drawn: list[int], rows: list[StepRow], skip: int
) -> float:
    """Return the steps per minute if every engine had all slots running during its life, at the mean length of its
    contexts, over the time of the steps that ``steps_per_min`` counts; 0 if no engine lived then."""
    if not drawn:
        return float("inf")
    _, began_s, ended_s = counted_steps(rows, skip)
    rate = 0.0
    for engine, life in lives:
        lived_s = min(life.ended_s, ended_s) - max(life.began_s, began_s)
        alive = max(lived_s, 0.0) / (ended_s - began_s) if ended_s > began_s else 1.0
        rate += alive * full_rate(config, engine.cost, engine.slots, engine.kv_capacity, drawn)
    return rate


def full_rate(config: Config, cost: StepCost, slots: int, kv: int, drawn: Sequence[int]) -> float:
    """Return the steps per minute that an engine with all slots running writes, at the mean length of its contexts;
    ``kv``: capacity of its KV cache, 0 if unlimited."""
    mean = sum(drawn) / len(drawn)
    context = config.simulation.prompt_tokens + sum(length * length for length in drawn) / (2 * sum(drawn))
    running = min(slots, max(int(kv / context), 1)) if kv else slots
    tokens_per_s = cost.tokens_per_s(running, round(running * context))
    return 60.0 * tokens_per_s / (config.trainer.batch_size * config.rollout.group_size * mean)


def trainer_limit(train_s: Sequence[float], charges: Charges) -> float:
    """Return the steps per minute if a batch were always ready, from the durations of the trained steps; 0: a step
    takes no time."""
    overlaps = charges.config.trainer.overlap_publish
    step_s = fmean(train_s) if train_s else charges.config.trainer.simulated_step_s
    step_s += charges.between_s()
    step_s = max(step_s, charges.publish_s()) if overlaps else step_s + charges.publish_s()
    return 60.0 / step_s if step_s else 0.0


def engine_row(name: str, engine: SimEngine, *, began_s: float, ended_s: float) -> EngineRow:
    """Summarize one life of an engine."""
    state = engine.state()
    return EngineRow(
        name=name,
        began_s=began_s,
        ended_s=max(ended_s, began_s),
        busy_s=busy_s(engine.changes, ended_s),
        running=engine.changes,
        loads=[(begin, end, int(version)) for begin, end, version in engine.loads],
        generated=state.generated,
        preempted=state.preempted,
    )


def busy_s(changes: list[tuple[float, int]], until_s: float) -> float:
    """Return the seconds up to ``until_s`` with running samples."""
    busy = 0.0
    for (begin_s, running), (end_s, _) in pairwise([*changes, (until_s, 0)]):
        if running and begin_s < until_s:
            busy += min(end_s, until_s) - begin_s
    return busy
