"""Reward functions: their names and weights, their arguments, and the check of what they return.

The probe at the start and the reward process of a run use the same rules.
"""

import inspect
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Reward, RewardFunction

LARGEST = 3.4028234e38
"""Largest absolute reward: rewards are stored and sent as float32."""
FACTS: Final = ("completion_ids", "completion_tokens", "finish_reason")
"""Arguments that a function gets if it names them: token ids (list), number of tokens, and how the sample ended."""
FINISH_REASONS: Final = ("stop", "length", "interrupted")
"""``finish_reason`` by the number of ``Finish``."""
TAKEN: Final = ("reward", "mean", "std", "eval", "eval_failed")
"""Names of other columns and metrics of the reward."""
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One function of the reward."""

    key: str
    """Its key in the configuration."""
    name: str
    run: str
    weight: float


def components(reward: Reward) -> list[Component]:
    """Return the functions of the reward; none if the environment returns it. Raise ``ConfigError`` for a bad name."""
    if reward.run:
        return [Component(key="reward.run", name="reward", run=reward.run, weight=1.0)]
    return [_component(place, given) for place, given in enumerate(reward.functions)]


def check_components(reward: Reward) -> None:
    """Raise ``ConfigError`` unless the functions have valid names of their own, and no other function is set."""
    if reward.run and reward.functions:
        allowed = "with reward.functions there must be only one of the two; reward.run= leaves this one out"
        raise ConfigError("reward.run", reward.run, allowed)
    names = [component.name for component in components(reward)]
    for place, name in enumerate(names):
        if name in names[:place]:
            earlier = f"reward.functions[{names.index(name)}] has it already; give each a name of its own"
            raise ConfigError(f"reward.functions[{place}].name", name, earlier)


def _component(place: int, given: RewardFunction) -> Component:
    name, key = given.name or given.run.rpartition(":")[2], f"reward.functions[{place}]"
    if not _NAME.fullmatch(name):
        allowed = "it must be at most 40 lower-case letters, digits and '_', a letter first; without it the function's"
        raise ConfigError(f"{key}.name", name, f"{allowed} name is used")
    if name in TAKEN:
        raise ConfigError(f"{key}.name", name, f"it must be none of {', '.join(TAKEN)}")
    return Component(key=f"{key}.run", name=name, run=given.run, weight=given.weight)


def takes_lists(function: Callable[..., Any]) -> bool:
    """Return whether a function scores the samples of a group in one call, as TRL's ``reward_funcs`` do."""
    names = _parameters(function)
    return "completions" in names and "completion" not in names


def arguments(
    function: Callable[..., Any], prompt: object, completion: str, columns: Mapping[str, Any], facts: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a function that scores one sample. A column of the row replaces a fact of its name."""
    named = {name: fact for name, fact in facts.items() if name in _parameters(function) and name not in columns}
    return (prompt, completion), {**columns, **named}


def list_arguments(
    function: Callable[..., Any],
    prompts: Sequence[object],
    completions: Sequence[str],
    columns: Sequence[Mapping[str, Any]],
    facts: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the arguments of a function that scores several samples: lists with a value for each.

    Prompts of messages come as in TRL, with each completion as a list of one message.
    """
    written: list[object] = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, completions, strict=True)
    ]
    given: dict[str, Any] = {"completions": written}
    parameters = _parameters(function)
    anything = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    offered = {"prompts": list(prompts)} | {name: [its[name] for its in facts] for name in FACTS if name in facts[0]}
    given |= {name: values for name, values in offered.items() if anything or name in parameters}
    return given | {name: [its[name] for its in columns] for name in columns[0]}


def objection(value: object) -> str:
    """Return the objection to a reward, to follow ``the reward is`` or ``it returned``; "" for a finite real number."""
    if not isinstance(value, numbers.Real):
        return f"{value!r:.200}; it must be a number"
    number = float(value)
    return "" if abs(number) <= LARGEST else f"{number}; it must be finite, in float32 too"


def listed(returned: object, samples: int) -> tuple[list[float], str]:
    """Return the rewards in a list that a function returned, or the objection to it. None counts as 0, as in TRL."""
    if not isinstance(returned, Sequence) or isinstance(returned, str):
        tolist = getattr(returned, "tolist", None)  # an array or a tensor
        returned = tolist() if callable(tolist) else returned
    if not isinstance(returned, Sequence) or isinstance(returned, str):
        return [], f"{returned!r:.200}; it must be a list of {samples} numbers, one for each of the completions"
    values = list(cast(Sequence[object], returned))
    if len(values) != samples:
        return [], f"a list of {len(values)}; it must have {samples} numbers, one for each of the completions"
    rewards = [0.0 if value is None else value for value in values]
    wrong = next((problem for value in rewards if (problem := objection(value))), "")
    return ([], wrong) if wrong else ([float(cast(float, value)) for value in rewards], "")


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
