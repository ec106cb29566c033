"""The stages of a run as a graph: the columns that each needs and makes, in topological order. Pure.

``[reward]``, ``[reference]`` and ``[critic]`` are stages of this graph, like those of ``[[stage]]``.
"""

import difflib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from staleflow.configs.algorithm import Algorithm
from staleflow.configs.errors import ConfigError
from staleflow.configs.rewards import components
from staleflow.configs.schema import Config, Stage
from staleflow.protocols.wire.stages import (
    CRITIC,
    ENVIRONMENT,
    REFERENCE,
    REWARD,
    STAGE,
    STAGES,
    full_name,
    is_per_token,
    short_name,
)

RESERVED: Final = (
    *(REWARD, REFERENCE, CRITIC, short_name(ENVIRONMENT).strip("/"), "stage"),
    *("rollout", "trainer", "scheduler", "trajectories", "parameters", "model", "relay", "prompts", "monitor"),
    *("admin", "engine"),
)
"""Names of other processes, and of columns that do not come from a user's stage."""

_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_MADE = re.compile(r"[a-z][a-z0-9_]{0,39}(:sample|:token)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One stage. Columns have their full names, ``stage/<stage>/<column>``."""

    name: str
    key: str
    """Configuration key that lists the needed columns."""
    needs: tuple[str, ...]
    makes: tuple[str, ...]

    @property
    def after(self) -> tuple[str, ...]:
        """Names of the stages that make the needed columns."""
        return tuple(dict.fromkeys(name.split("/")[1] for name in self.needs))


def stages(config: Config) -> tuple[str, ...]:
    """Return the names of all stages, each after the stages that it waits for."""
    return tuple(node.name for node in graph(config))


def graph(config: Config) -> tuple[Node, ...]:
    """Return all stages, each after the stages that it waits for.

    Raises ``ConfigError`` for an invalid name, a column that no stage makes, and a cycle, with its path.
    """
    _check_names(config.stage)
    columns = _all_columns(config)
    nodes = [*_shipped(config, columns)]
    for place, stage in enumerate(config.stage):
        key = f"stage[{place}].needs"
        makes = tuple(full_name(stage.name, column) for column in stage.makes)
        nodes.append(Node(name=stage.name, key=key, needs=_needed(key, stage.needs, columns), makes=makes))
    return _in_order(nodes)


def needs_reference(algorithm: Algorithm) -> bool:
    """Return whether a KL term or the distillation uses the log-probabilities of the reference stage."""
    return algorithm.kl_coef > 0 or (algorithm.distill_coef > 0 and algorithm.teacher == f"{REFERENCE}/logprobs")


def check_teacher(config: Config) -> None:
    """Raise ``ConfigError`` unless ``trainer.algorithm.teacher`` is a column with one number for each token."""
    algorithm = config.trainer.algorithm
    if not algorithm.distill_coef:
        return
    names = [short for short, full in _all_columns(config).items() if is_per_token(full)]
    typed = [column for column in config.column if column.per == "token" and column.dtype.startswith("float")]
    names += [column.name for column in typed if not column.shape]
    if algorithm.teacher not in names:
        allowed = f"it must be a column with one number for each token, of this run: {', '.join(names) or 'none'}"
        raise ConfigError("trainer.algorithm.teacher", algorithm.teacher, allowed)


def before_reward(config: Config) -> tuple[Node, ...]:
    """Return the reward stage and the stages that it waits for, in topological order, the reward last."""
    nodes = {node.name: node for node in graph(config)}
    needed, pending = set[str](), [REWARD]
    while pending:
        needed.add(name := pending.pop())
        pending += nodes[name].after
    return tuple(node for node in nodes.values() if node.name in needed)


def _shipped(config: Config, columns: Mapping[str, str]) -> list[Node]:
    """Return the reward stage, and the reference and critic stages if the algorithm needs their columns.

    Those two need the reward, so that they get only groups that passed the filter.
    """
    algorithm = config.trainer.algorithm
    needs = _needed("reward.needs", config.reward.needs, columns)
    _check_arguments(config.reward.needs, needs)
    parts = tuple(full_name(REWARD, given.name) for given in components(config.reward) if given.name != REWARD)
    nodes = [_node(REWARD, needs, parts)]
    rewarded = (columns["reward/reward"],)
    if needs_reference(algorithm):
        nodes.append(_node(REFERENCE, rewarded))
    if algorithm.advantage == "gae":
        costs = (columns["reference/logprobs"],) if algorithm.kl_in_reward and algorithm.kl_coef else ()
        nodes.append(_node(CRITIC, rewarded + costs))
    return nodes


def _node(stage: str, needs: tuple[str, ...], more: tuple[str, ...] = ()) -> Node:
    makes = tuple(f"{STAGE}{stage}/{column}" for column in STAGES[stage])
    return Node(name=stage, key=f"{stage}.needs", needs=needs, makes=makes + more)


def _all_columns(config: Config) -> dict[str, str]:
    """Return every column of the run: full names by short name."""
    algorithm = config.trainer.algorithm
    enabled = {REWARD: True, REFERENCE: needs_reference(algorithm), CRITIC: algorithm.advantage == "gae"}
    names = [f"{STAGE}{stage}/{column}" for stage, columns in STAGES.items() if enabled[stage] for column in columns]
    names += [full_name(REWARD, given.name) for given in components(config.reward) if given.name != REWARD]
    names += [full_name(stage.name, column) for stage in config.stage for column in stage.makes]
    return {short_name(name): name for name in names}


def _check_names(given: Sequence[Stage]) -> None:
    for place, stage in enumerate(given):
        key, name = f"stage[{place}]", stage.name
        if not _NAME.fullmatch(name):
            allowed = "it must be at most 40 lower-case letters, digits and '_', a letter first"
            raise ConfigError(f"{key}.name", name, allowed)
        if name in RESERVED:
            raise ConfigError(f"{key}.name", name, f"it must be none of {', '.join(RESERVED)}")
        if name in (earlier := [other.name for other in given[:place]]):
            raise ConfigError(f"{key}.name", name, f"stage[{earlier.index(name)}] has it already")
        if not stage.makes:
            raise ConfigError(f"{key}.makes", stage.makes, 'it must name a column at least, "score" or "values:token"')
        for column in stage.makes:
            if not _MADE.fullmatch(column):
                allowed = "a column is at most 40 lower-case letters, digits and '_', with :sample or :token behind it"
                raise ConfigError(f"{key}.makes", column, allowed)
        names = [column.partition(":")[0] for column in stage.makes]
        if twice := next((column for column in names if names.count(column) > 1), None):
            raise ConfigError(f"{key}.makes", twice, "it is listed twice")


def _needed(key: str, needs: Sequence[str], columns: Mapping[str, str]) -> tuple[str, ...]:
    """Return the full names of the needed columns. Raises ``ConfigError`` for a column that no stage makes."""
    for need in needs:
        if need not in columns:
            close = difflib.get_close_matches(need, columns, n=1)
            meant = f", did you mean {close[0]}?" if close else f"; columns of this run: {', '.join(columns)}"
            raise ConfigError(key, need, f"no stage makes it{meant}")
        if needs.count(need) > 1:
            raise ConfigError(key, need, "it is listed twice")
    return tuple(columns[need] for need in needs)


def _check_arguments(needs: Sequence[str], full: Sequence[str]) -> None:
    """Check that each needed column gives the reward one value for its sample, under a name of its own."""
    names = [need.partition("/")[2] for need in needs]
    for need, name, column in zip(needs, names, full, strict=True):
        if is_per_token(column):
            raise ConfigError("reward.needs", need, "it has a value a token; the reward takes columns of one a sample")
        if names.count(name) > 1 or name in ("prompt", "completion"):
            raise ConfigError("reward.needs", need, f'the reward has another argument "{name}" already')


def check_row(needs: Sequence[str], columns: Collection[str], key: str) -> None:
    """Raise ``ConfigError`` if a needed column has the name of a column of the rows of ``key``, because the reward gets
    both as keyword arguments.
    """
    for need in needs:
        if (name := need.partition("/")[2]) in columns:
            twice = f'the rows of {key} have a column "{name}" too, and the reward takes one value of a name'
            raise ConfigError("reward.needs", need, f"{twice}; prompts.columns renames theirs")


def _in_order(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Sort the stages topologically. Among stages that are ready the order is that of the configuration."""
    left, ordered = list(nodes), list[Node]()
    while left:
        names = {node.name for node in ordered}
        ready = next((node for node in left if names.issuperset(node.after)), None)
        if ready is None:
            raise _cycle_error({node.name: node for node in left})
        left.remove(ready)
        ordered.append(ready)
    return tuple(ordered)


def _cycle_error(stuck: Mapping[str, Node]) -> ConfigError:
    """Return the error for ``stuck``, stages that each wait for another of them: follow the needs until one repeats."""
    path = [next(iter(stuck))]
    while path[-1] not in path[:-1]:
        path.append(next(name for name in stuck[path[-1]].after if name in stuck))
    path = path[path.index(path[-1]) :]
    first = stuck[path[0]]
    need = next(short_name(name) for name in first.needs if name.split("/")[1] == path[1])
    return ConfigError(first.key, need, f"stages wait for each other in a circle: {' → '.join(path)}")


def seconds_a_group(config: Config) -> dict[str, float]:
    """Return, by stage, the maximum seconds that a healthy worker needs for one group.

    The calls of a worker to all trajectory servers share one model, or one process of user code.
    """
    reward, shards = config.reward, config.trajectories.shards
    own = {stage.name: stage.timeout_s * (stage.retries + 1) * shards for stage in config.stage}
    return own | {
        REWARD: reward.timeout_s * (reward.retries + 1) * config.rollout.group_size * shards,
        REFERENCE: config.reference.timeout_s * shards,
        CRITIC: config.critic.timeout_s * shards,
    }


def calls_a_group(config: Config, stage: str) -> int:
    """Return the number of user code calls for one group; the reward scores each sample."""
    return config.rollout.group_size if stage == REWARD else 1


def section_of(config: Config, stage: str) -> str:
    """Return the section of the configuration with the keys of a stage."""
    places = {given.name: f"stage[{place}]" for place, given in enumerate(config.stage)}
    return places.get(stage, stage)


def concurrency_of(config: Config, stage: str) -> int:
    """Return the maximum number of concurrent ``async def`` calls in one worker; 0 if a model makes the columns."""
    own = {given.name: given.concurrency for given in config.stage}
    return (own | {REWARD: config.reward.concurrency}).get(stage, 0)


def groups_at_once(config: Config, stage: str, calls: int) -> int:
    """Return the number of groups of one trajectory server that a worker has with ``calls`` concurrent calls: as many
    as these calls need, and at least ``batch``.
    """
    return max(batch_of(config, stage), math.ceil(calls / calls_a_group(config, stage)))


def batch_of(config: Config, stage: str) -> int:
    """Return the minimum number of groups of one trajectory server that a worker of a stage has at once."""
    own = {given.name: given.batch for given in config.stage}
    shipped = {REWARD: config.reward.batch, REFERENCE: config.reference.batch, CRITIC: config.critic.batch}
    return (own | shipped)[stage]


def workers_of(config: Config, stage: str) -> int:
    """Return the number of processes of a stage that the run starts. Only one critic: two would learn separately."""
    own = {given.name: given.workers for given in config.stage}
    return (own | {REWARD: config.reward.workers, REFERENCE: config.reference.workers, CRITIC: 1})[stage]


def threads_of(config: Config, stage: str) -> int:
    """Return the number of threads of the numeric libraries in a worker of a stage; 0: chosen (``configs.threads``)."""
    return {REFERENCE: config.reference.threads, CRITIC: config.critic.threads}.get(stage, 1)
