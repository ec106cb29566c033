"""Arguments that all APIs share: limits, stop strings, flags, and the sampling that a call may request.

``SAMPLING`` is the one list of sampling arguments and of the values that the engines can sample with and the trainer
can train: those of the run. Every other argument that no API reads is rejected by name.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

from staleflow.clients.rollout.engines.base import Sampling
from staleflow.clients.rollout.episodes.chat.calls import MAX_CHOICES, Limits
from staleflow.clients.rollout.episodes.chat.json_values import fields
from staleflow.clients.rollout.episodes.chat.refusal import ChatRefused, malformed, unsupported

MAX_STOPS = 16
OF_THE_RUN = 'it must be {0!r}, the value of the run (environment.sampling_arguments = "override" replaces it)'

SAMPLING: Final[Mapping[str, Callable[[Sampling], tuple[object, ...]]]] = {
    "temperature": lambda sampling: (sampling.temperature,),
    "top_p": lambda sampling: (sampling.top_p,),
    "top_k": lambda sampling: (sampling.top_k,) if sampling.top_k else (-1, 0),
    "min_p": lambda sampling: (sampling.min_p,),
    "presence_penalty": lambda sampling: (sampling.presence_penalty,),
    "frequency_penalty": lambda sampling: (sampling.frequency_penalty,),
    "repetition_penalty": lambda sampling: (sampling.repetition_penalty,),
    "logit_bias": lambda _: ({},),
    "seed": lambda _: (None,),
}
"""Values that each sampling argument may have; the first is the run's. ``seed`` comes from the run."""

IGNORED = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
"""Arguments that change nothing about the answer."""


class Arguments:
    """The arguments of one call; each API takes the ones it reads, and ``check_rest`` judges the others."""

    def __init__(self, body: object) -> None:
        if not isinstance(body, dict):
            raise ChatRefused("the body must be a JSON object", "malformed")
        self._given = {name: value for name, value in cast(dict[str, Any], body).items() if value is not None}

    def take(self, name: str) -> Any:
        """Remove and return an argument; None if it is missing or null."""
        return self._given.pop(name, None)

    def flag(self, name: str) -> bool:
        """Take an argument that is true or false, by default false."""
        value = self.take(name)
        if not isinstance(value, bool | None):
            raise malformed(name, value, "it must be true or false")
        return bool(value)

    def only(self, name: str, *allowed: object, why: str = "") -> None:
        """Take an argument that must have one of these values if it is given."""
        value = self.take(name)
        if value is not None and not any(_equal(value, one) for one in allowed):
            raise unsupported(name, value, f"it must be {' or '.join(map(repr, allowed))}{why and ', '}{why}")

    def max_tokens(self, limits: Limits, *names: str) -> int:
        """Take the limit of the answer, under the first of ``names`` that is given."""
        given = [(name, value) for name in names if (value := self.take(name)) is not None]
        most = limits.sampling.max_new_tokens
        if not given:
            return most
        name, value = given[-1]
        if type(value) is not int or value < 1 or (value > most and not limits.override):
            raise malformed(name, value, f"it must be from 1 to rollout.max_new_tokens, {most}")
        return min(value, most)

    def stop(self, name: str) -> tuple[str, ...]:
        value = self.take(name)
        stops = (value,) if isinstance(value, str) else value or ()
        if isinstance(stops, Sequence):
            given = cast(Sequence[object], stops)
            texts = tuple(text for text in given if isinstance(text, str) and text)
            if len(texts) == len(given) <= MAX_STOPS:
                return texts
        raise malformed(name, value, f"it must be a text, or at most {MAX_STOPS} of them, none empty")

    def choices(self, limits: Limits) -> int:
        """Take ``n``."""
        value = self.take("n")
        if value is None:
            return 1
        if type(value) is not int or not 1 <= value <= MAX_CHOICES:
            raise malformed("n", value, f"it must be from 1 to {MAX_CHOICES}")
        if value > 1 and not limits.branches:
            why = 'with environment.branches = "refuse" it must be 1: each answer begins a conversation of its own'
            raise unsupported("n", value, why)
        return value

    def stream(self) -> tuple[bool, bool]:
        """Take ``stream`` and ``stream_options``: (stream, include usage)."""
        stream, options = self.flag("stream"), self.take("stream_options")
        if options is None:
            return stream, False
        form = 'it must be {"include_usage": true or false}, with "stream": true'
        usage = fields(options).get("include_usage", False)
        known = {"include_usage", "include_obfuscation"}
        if not stream or not fields(options) or not isinstance(usage, bool) or fields(options).keys() - known:
            raise malformed("stream_options", options, form)
        return stream, usage

    def check_rest(self, limits: Limits) -> None:
        """Judge the arguments that are left: sampling arguments must be the run's, unknown ones are rejected."""
        for name, value in self._given.items():
            if name in IGNORED:
                continue
            if name not in SAMPLING:
                raise ChatRefused(f"the argument {name} is not supported here", "unsupported", param=name)
            allowed = SAMPLING[name](limits.sampling)
            if not limits.override and not any(_equal(value, one) for one in allowed):
                if allowed[0] is None:
                    raise unsupported(name, value, "it must be left out: the run's seed determines every draw")
                raise unsupported(name, value, OF_THE_RUN.format(allowed[0]))


def _equal(value: object, allowed: object) -> bool:
    if isinstance(value, bool) or isinstance(allowed, bool):
        return value is allowed
    if isinstance(value, int | float) and isinstance(allowed, int | float):
        return math.isclose(value, allowed, rel_tol=1e-6)
    return value == allowed
