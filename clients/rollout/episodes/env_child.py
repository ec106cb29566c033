"""The environment process: ``python -m staleflow.clients.rollout.episodes.env_child``, started by its runner.

It holds one object of the user's class and runs any number of episodes concurrently. Like the reward's process
(``user_code.child``), it cannot harm its worker.
"""

import asyncio
import contextlib
import inspect
import numbers
import re
import resource
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from staleflow.clients.rollout.episodes.env_client import Client
from staleflow.clients.user_code import pipe
from staleflow.clients.user_code.child import reason, serve_concurrently, take_over_pipes
from staleflow.configs.errors import ConfigError
from staleflow.configs.imports import load_object
from staleflow.configs.rewards import LARGEST

KEY = "environment.run"
NOUN = "the environment"
REWARD = "reward"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def main() -> int:
    """Serve episodes until the parent closes the pipe."""
    incoming, outgoing = take_over_pipes()
    load = pipe.to_child.decode(pipe.read(incoming) or b"")
    if not isinstance(load, pipe.Load):
        return 2
    _limit_memory(load.memory_mb)
    try:
        environment = _instantiate(load)
    except ConfigError as error:
        outgoing.write(pipe.frame(pipe.NotLoaded(why=error.allowed)))
        return 2
    outgoing.write(pipe.frame(pipe.Loaded(concurrent=True)))
    asyncio.run(serve_concurrently(partial(_play, environment), load.timeout_s, incoming, outgoing, noun=NOUN))
    return 0


def _limit_memory(memory_mb: int) -> None:
    """Limit this process's memory, and make it the first candidate of the kernel's OOM killer."""
    if memory_mb:
        limit = memory_mb << 20
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _instantiate(load: pipe.Load) -> Any:
    """Create the user's object. ``ConfigError`` names the problem with the class."""
    cls = load_object(load.run, KEY)
    try:
        environment = cls(**load.options)
    except Exception as error:  # user code may raise anything; the operator reads the reason
        raise ConfigError(KEY, load.run, reason(error, "making it")) from error
    if not inspect.iscoroutinefunction(getattr(environment, "rollout", None)):
        raise ConfigError(KEY, load.run, "it must have a method: async def rollout(self, client, row)")
    return environment


async def _play(environment: Any, call: pipe.Episode) -> pipe.Answer:
    return returned(call.id, await environment.rollout(Client(call.base_url, call.api_key), call.row))


def returned(call: int, value: object) -> pipe.Answer:
    """Convert the return value of ``rollout``: finite numbers by name, or an error that names the value."""
    if value is None:
        return pipe.Answer(id=call)
    named = cast(Mapping[object, object], value) if isinstance(value, Mapping) else {REWARD: value}
    columns: dict[str, float] = {}
    for name, number in named.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            return pipe.Answer(id=call, error=f"{NOUN} returned {value!r:.200}; {name!r:.80} is no name of a column")
        if not isinstance(number, numbers.Real) or not abs(float(number)) <= LARGEST:
            wanted = "None, a finite number, or finite numbers by name"
            return pipe.Answer(id=call, error=f"{NOUN} returned {value!r:.200}; it must return {wanted}")
        columns[name] = float(number)
    return pipe.Answer(id=call, columns=columns)


if __name__ == "__main__":
    sys.exit(main())
