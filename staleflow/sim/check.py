"""Checks that a configuration can be simulated. Raises ``ConfigError`` for the first violation."""

import math

from msgspec.structs import replace

from staleflow.configs.errors import ConfigError
from staleflow.configs.pools import pools
from staleflow.configs.schema import Config
from staleflow.configs.simulation import Fleet
from staleflow.sim.charges import Charges
from staleflow.sim.workload import Workload

LONGEST_STEP_S = 3_600.0
"""A decode step that takes longer is a mistake in the coefficients."""


def fleet(config: Config) -> list[Fleet]:
    """Return one entry per engine, in order of their numbers, with slots and KV capacity filled in."""
    return [
        replace(
            kind,
            count=1,
            slots=kind.slots or config.rollout.max_inflight,
            kv_tokens=kind.kv_tokens or config.simulation.kv_tokens,
        )
        for kind in kinds(config)
        for _ in range(kind.count)
    ]


def kinds(config: Config) -> list[Fleet]:
    """Return the kinds of engines, each with a name; without a fleet those of the pools, which share the price of the
    launched machines."""
    simulation, launch = config.simulation, config.launch
    listed = simulation.fleet
    if not listed:
        of_pools = pools(config)
        engines = sum(pool.workers for pool in of_pools)
        listed = [
            Fleet(
                count=pool.workers,
                slots=pool.config.rollout.max_inflight,
                price=launch.rollout_nodes * launch.rollout_price / max(engines, 1),
                preemptible=bool(simulation.preemption.per_min),
            )
            for pool in of_pools
        ]
    return [replace(kind, kind=kind.kind or f"kind-{number}") for number, kind in enumerate(listed, start=1)]


def check(config: Config, workload: Workload, charges: Charges) -> None:
    """Check that engines can hold a group, that step times are plausible, and that events name existing engines."""
    engines = fleet(config)
    _steps_take_time(config, engines, charges)
    _engines_hold_a_group(config, engines, workload)
    _events_are_possible(config, engines)
    _losses_are_possible(config, engines)


def _steps_take_time(config: Config, engines: list[Fleet], charges: Charges) -> None:
    longest = config.simulation.prompt_tokens + config.rollout.max_new_tokens
    for kind in engines:
        cost = charges.step_cost(kind.speed, kind.compute)
        kv = min(kind.slots * longest, kind.kv_tokens or kind.slots * longest)
        for running, held in ((1, 0), (kind.slots, kv)):
            seconds = cost.steps_s(1, running, held)
            if not math.isfinite(seconds) or not 0 < seconds <= LONGEST_STEP_S:
                allowed = (
                    f"with {running} running samples and {held} tokens in KV cache a step of an engine of speed "
                    f"{kind.speed:g} would last {seconds:g} s: above 0, at most {LONGEST_STEP_S:g} s"
                )
                one = charges.costs.engine or config.rollout.simulated
                key = "simulation.costs" if charges.costs.engine else "rollout.simulated"
                raise ConfigError(key, f"k1 {one.k1:g}, k2 {one.k2:g}, k3 {one.k3:g}, k4 {one.k4:g}", allowed)


def _engines_hold_a_group(config: Config, engines: list[Fleet], workload: Workload) -> None:
    for number, kind in enumerate(engines):
        if kind.slots < workload.started:
            allowed = (
                f"engine {number} must hold the {workload.started} samples of a group "
                f"(rollout.group_size x rollout.redundancy.samples): at least {workload.started}"
            )
            raise ConfigError("simulation.fleet.slots", kind.slots, allowed)
    most = max((kind.kv_tokens or math.inf) for kind in engines)
    least = config.simulation.prompt_tokens + 1
    if most < least:
        allowed = f"no engine could hold a prompt of {least - 1} tokens and one more: at least {least}, or 0 for no end"
        raise ConfigError("simulation.kv_tokens", most, allowed)


def _events_are_possible(config: Config, engines: list[Fleet]) -> None:
    late = {event.engine for event in config.simulation.events if event.what == "join"}
    engines_named = {*range(len(engines)), *late}
    for event in config.simulation.events:
        if event.engine not in engines_named:
            allowed = f'engines are 0 to {len(engines) - 1}; one beyond them has to "join" first'
            raise ConfigError("simulation.events.engine", event.engine, allowed)


def _losses_are_possible(config: Config, engines: list[Fleet]) -> None:
    if config.simulation.preemption.per_min and not any(kind.preemptible for kind in engines):
        allowed = "no engine of simulation.fleet is preemptible, so 0; or set preemptible for a kind of the fleet"
        raise ConfigError("simulation.preemption.per_min", config.simulation.preemption.per_min, allowed)
