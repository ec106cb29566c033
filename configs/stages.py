"""The stages of a run as a graph: what each needs and makes, in an order in which everything needed comes first. Pure.

``[reward]``, ``[reference]`` and ``[critic]`` are stages of this graph like those of ``[[stage]]``.
"""

import difflib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from staleflow.configs.errors import ConfigError
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
    *("rollout", "trainer", "scheduler", "trajectories", "parameters", "model", "relay", "monitor", "admin", "engine"),
)
"""Names of other processes, and of columns that do not come from a stage of the user's."""

_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_MADE = re.compile(r"[a-z][a-z0-9_]{0,39}(:sample|:token)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One stage. Columns by their full names, ``stage/<stage>/<column>``."""

    name: str
    key: str
    """Of the configuration, where what it needs is written."""
    needs: tuple[str, ...]
    makes: tuple[str, ...]

    @property
    def after(self) -> tuple[str, ...]:
        """Stages that make what it needs."""
        return tuple(dict.fromkeys(name.split("/")[1] for name in self.needs))


def stages(config: Config) -> tuple[str, ...]:
    """The names of all stages; each comes after those that it waits for."""
    return tuple(node.name for node in graph(config))


def graph(config: Config) -> tuple[Node, ...]:
    """All stages; each comes after those that it waits for.

    ``ConfigError`` for a name that cannot be one, a column that nobody makes, and a circle, with its path.
    """
    _check_names(config.stage)
    made = _made(config)
    nodes = [*_shipped(config, made)]
    for place, stage in enumerate(config.stage):
        key = f"stage[{place}].needs"
        makes = tuple(full_name(stage.name, column) for column in stage.makes)
        nodes.append(Node(name=stage.name, key=key, needs=_needed(key, stage.needs, made), makes=makes))
    return _in_order(nodes)


def _shipped(config: Config, made: Mapping[str, str]) -> list[Node]:
    """The reward; the others when the algorithm needs what they make, for groups that the filter has seen."""
    algorithm = config.trainer.algorithm
    needs = _needed("reward.needs", config.reward.needs, made)
    _check_arguments(config.reward.needs, needs)
    found = [_node(REWARD, needs)]
    rewarded = (made["reward/reward"],)
    if algorithm.kl_coef > 0:
        found.append(_node(REFERENCE, rewarded))
    if algorithm.advantage == "gae":
        costs = (made["reference/logprobs"],) if algorithm.kl_in_reward and algorithm.kl_coef else ()
        found.append(_node(CRITIC, rewarded + costs))
    return found


def _node(stage: str, needs: tuple[str, ...]) -> Node:
    return Node(
        name=stage, key=f"{stage}.needs", needs=needs, makes=tuple(f"{STAGE}{stage}/{c}" for c in STAGES[stage])
    )


def _made(config: Config) -> dict[str, str]:
    """Every column of the run: its short name -> its full one."""
    algorithm = config.trainer.algorithm
    there = {REWARD: True, REFERENCE: algorithm.kl_coef > 0, CRITIC: algorithm.advantage == "gae"}
    names = [f"{STAGE}{stage}/{column}" for stage, made in STAGES.items() if there[stage] for column in made]
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
            raise ConfigError(f"{key}.makes", twice, "it is there twice")


def _needed(key: str, needs: Sequence[str], made: Mapping[str, str]) -> tuple[str, ...]:
    """The full names of what is needed; ``ConfigError`` for a column that nobody makes."""
    for need in needs:
        if need not in made:
            close = difflib.get_close_matches(need, made, n=1)
            meant = f", did you mean {close[0]}?" if close else f"; columns of this run: {', '.join(made)}"
            raise ConfigError(key, need, f"no stage makes it{meant}")
        if needs.count(need) > 1:
            raise ConfigError(key, need, "it is there twice")
    return tuple(made[need] for need in needs)


def _check_arguments(needs: Sequence[str], full: Sequence[str]) -> None:
    """The reward is called with one sample: each column gives it one value, under a name of its own."""
    names = [need.partition("/")[2] for need in needs]
    for need, name, column in zip(needs, names, full, strict=True):
        if is_per_token(column):
            raise ConfigError("reward.needs", need, "it has a value a token; the reward takes columns of one a sample")
        if names.count(name) > 1 or name in ("prompt", "completion"):
            raise ConfigError("reward.needs", need, f'the reward has another argument "{name}" already')


def check_row(needs: Sequence[str], columns: Collection[str], key: str) -> None:
    """The reward is called with the columns of a row of ``key`` too: ``ConfigError`` for a name that is there twice."""
    for need in needs:
        if (name := need.partition("/")[2]) in columns:
            twice = f'the rows of {key} have a column "{name}" too, and the reward takes one value of a name'
            raise ConfigError("reward.needs", need, f"{twice}; prompts.columns renames theirs")


def _in_order(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Whatever needs nothing that is to come first, in the order of the configuration."""
    left, done = list(nodes), list[Node]()
    while left:
        names = {node.name for node in done}
        ready = next((node for node in left if names.issuperset(node.after)), None)
        if ready is None:
            raise _circle({node.name: node for node in left})
        left.remove(ready)
        done.append(ready)
    return tuple(done)


def _circle(stuck: Mapping[str, Node]) -> ConfigError:
    """Each of ``stuck`` waits for another of them; walks until one comes again."""
    path = [next(iter(stuck))]
    while path[-1] not in path[:-1]:
        path.append(next(name for name in stuck[path[-1]].after if name in stuck))
    path = path[path.index(path[-1]) :]
    first = stuck[path[0]]
    need = next(short_name(name) for name in first.needs if name.split("/")[1] == path[1])
    return ConfigError(first.key, need, f"stages wait for each other in a circle: {' → '.join(path)}")


def seconds_a_group(config: Config) -> dict[str, float]:
    """By stage: the most seconds that a worker needs for one group when nothing is wrong with it.

    A model, or a process of user code, is shared by a worker's calls to all trajectory servers.
    """
    reward, shards = config.reward, config.trajectories.shards
    own = {stage.name: stage.timeout_s * (stage.retries + 1) * shards for stage in config.stage}
    return own | {
        REWARD: reward.timeout_s * (reward.retries + 1) * config.rollout.group_size * shards,
        REFERENCE: config.reference.timeout_s * shards,
        CRITIC: config.critic.timeout_s * shards,
    }


def calls_a_group(config: Config, stage: str) -> int:
    """Calls of user code that one group takes: the reward scores each sample."""
    return config.rollout.group_size if stage == REWARD else 1


def section_of(config: Config, stage: str) -> str:
    """The section of the configuration that a stage has its keys in."""
    places = {given.name: f"stage[{place}]" for place, given in enumerate(config.stage)}
    return places.get(stage, stage)


def concurrency_of(config: Config, stage: str) -> int:
    """Calls of an ``async def`` that one worker has under way at once; 0 for a stage whose columns a model makes."""
    own = {given.name: given.concurrency for given in config.stage}
    return (own | {REWARD: config.reward.concurrency}).get(stage, 0)


def groups_at_once(config: Config, stage: str, calls: int) -> int:
    """Groups of one trajectory server that a worker has which may have so many calls of user code under way: as many as
    these take, and ``batch`` at least."""
    return max(batch_of(config, stage), math.ceil(calls / calls_a_group(config, stage)))


def batch_of(config: Config, stage: str) -> int:
    """Groups of one trajectory server that a worker of a stage has at once, at least."""
    own = {given.name: given.batch for given in config.stage}
    shipped = {REWARD: config.reward.batch, REFERENCE: config.reference.batch, CRITIC: config.critic.batch}
    return (own | shipped)[stage]


def workers_of(config: Config, stage: str) -> int:
    """Processes of a stage that the run starts. One critic: two would learn apart."""
    own = {given.name: given.workers for given in config.stage}
    return (own | {REWARD: config.reward.workers, REFERENCE: config.reference.workers, CRITIC: 1})[stage]


def threads_of(config: Config, stage: str) -> int:
    """Threads of the numeric libraries in a worker of a stage."""
    return {REFERENCE: config.reference.threads, CRITIC: config.critic.threads}.get(stage, 1)
