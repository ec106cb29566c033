"""Consistency of ``coordination``. Keys that do not apply must be left at their defaults."""

import math
from collections.abc import Iterator

from staleflow.configs.errors import ConfigError, shown
from staleflow.configs.pools import pools
from staleflow.configs.schema import Config, Coordination, Rollout
from staleflow.configs.section import MAX_GROUPS


def groups_held(slots: int, started: int) -> int:
    """Return the number of groups in flight that keeps ``slots`` samples running.

    It exceeds ``slots`` / ``started`` because the ``started`` samples of a group end at different times.
    """
    return max(2, -(-3 * slots // (2 * started)))


def check_coordination(config: Config) -> None:
    """Raise ``ConfigError`` for the first key of ``coordination`` that contradicts the others."""
    chosen = config.coordination
    for meaningful, key, allowed in _conditions(chosen):
        default = getattr(Coordination(), key)
        if not meaningful and (value := getattr(chosen, key)) != default:
            raise ConfigError(f"coordination.{key}", value, f"{allowed}; leave it at {shown(default)}")
    if chosen.composition == "length_clustered" and chosen.ranker == "none":
        allowed = 'with coordination.ranker "none" no length is expected: "iid", or a ranker of "history" and "learned"'
        raise ConfigError("coordination.composition", chosen.composition, allowed)
    if (groups := chosen.lookahead * config.trainer.batch_size) > MAX_GROUPS and chosen.composition != "iid":
        allowed = f"{groups} groups of trainer.batch_size {config.trainer.batch_size} batches: at most {MAX_GROUPS}"
        raise ConfigError("coordination.lookahead", chosen.lookahead, allowed)
    if config.environment.run and chosen.migration != "none":
        allowed = 'it must be "none" with environment.run: an episode cannot leave the process that plays it'
        raise ConfigError("coordination.migration", chosen.migration, allowed)


def _conditions(chosen: Coordination) -> Iterator[tuple[bool, str, str]]:
    """Yield (whether the key applies, the key, its purpose)."""
    yield chosen.routing == "cost_model", "min_gain", 'it holds back groups of coordination.routing "cost_model"'
    yield chosen.sync == "threshold", "sync_threshold", 'it is the threshold of coordination.sync "threshold"'
    yield chosen.migration == "throughput", "migration_gap", 'it is the gap of coordination.migration "throughput"'
    clusters = chosen.composition == "length_clustered"
    yield clusters, "lookahead", 'it is that of coordination.composition "length_clustered"'


def samples_started(rollout: Rollout) -> int:
    """Return the number of samples started for each group, including redundant ones."""
    return math.ceil(rollout.group_size * rollout.redundancy.samples)


def check_spares(config: Config, started: int) -> None:
    """Check that the engines can hold more groups than the bound admits without spares.

    ``started`` is the number of samples started for each group.
    """
    rollout = config.rollout
    each = [(pool.key, pool.workers, pool.config.rollout.max_inflight) for pool in pools(config)]
    capacity = sum(number * groups_held(slots, started) for _, number, slots in each)
    counted = config.trainer.batch_size * (config.staleness.max_staleness + 1)
    if rollout.redundancy.groups > 1 and capacity <= counted:
        engines = " + ".join(f"{key}.workers {number} x {key}.max_inflight {slots}" for key, number, slots in each)
        allowed = (
            f"{engines} hold {capacity} groups, "
            f"the bound alone admits {counted}: no spare would ever start; leave it at 1.0, or add engines"
        )
        raise ConfigError("rollout.redundancy.groups", rollout.redundancy.groups, allowed)
