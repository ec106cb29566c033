"""Trial of user code in a process of its own: imports, options, number of rows, and the reward of one row.

``python -m staleflow.configs.loading.probe`` reads one JSON object on stdin and writes one on stdout, so that the
calling process imports no user module.
"""

import asyncio
import inspect
import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from staleflow.configs.engines import check_methods
from staleflow.configs.errors import ConfigError
from staleflow.configs.imports import load_object
from staleflow.configs.loading.row_files import prompt_row
from staleflow.configs.rewards import (
    FACTS,
    FINISH_REASONS,
    arguments,
    list_arguments,
    listed,
    objection,
    takes_lists,
)
from staleflow.configs.stages import check_row
from staleflow.configs.vllm_options import ARGUMENTS, check_names
from staleflow.configs.vllm_options import KEY as OPTIONS

Question = dict[str, Any]
"""``specs``: import paths by key. ``calls``: (positional count, keyword names) that a callable must take, by key.
``sources``: (keyword arguments, renames of its columns, ``prompts.chat_template``, whether to count its rows), by key.
``rows``: the columns of a file's first row, and the row as it is sent, in hex, by key. ``scored``: stage columns that a
reward gets in addition to those of a row, and whether there may be more. ``tried``: the key whose first row the reward
is called with, and the time limit in seconds; None: the reward is not called. ``vllm_options``: arguments that vLLM's
engine must have, for each kind of worker that has any."""

ENGINE = ".engine"
"""End of the keys of engine classes."""
REWARD = "reward."
"""Start of the keys of reward functions."""

COMPLETION = "42"
"""Completion for the trial of the reward: short, and a plausible answer to some prompts."""

OFFERED = {"trainer.algorithm.advantage": ("stages",), "trainer.algorithm.loss": ("stages",)}
"""Optional keyword arguments that a function gets if it has them, by key."""


IMPORT_TIMEOUT_S = 120.0


def ask(question: Question) -> dict[str, int]:
    """Return the number of rows of each source (1 where not counted). Raises the other process's ``ConfigError``."""
    command = [sys.executable, "-m", "staleflow.configs.loading.probe"]
    sent = json.dumps(question)
    timeout_s = IMPORT_TIMEOUT_S + (question["tried"] or ("", 0.0))[1]
    try:
        completed = subprocess.run(command, input=sent, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            "import paths", str(question["specs"]), f"importing and trying them took over {timeout_s:g} s"
        ) from None
    reply = _reply(completed.stdout)
    if error := reply.get("error"):
        raise ConfigError(*error)
    if "rows" not in reply:
        last = completed.stderr.strip().rpartition("\n")[2] or f"exit code {completed.returncode}"
        raise ConfigError("import paths", str(question["specs"]), f"importing them ended Python: {last}")
    rows: dict[str, int] = reply["rows"]
    return rows


def _reply(text: str) -> dict[str, Any]:
    try:
        return cast(dict[str, Any], json.loads(text.rpartition("\n")[2]))
    except ValueError:
        return {}


GPU_DEVICES = ("nvidia[0-9]*", "kfd", "dxg")
"""Device files of GPUs: NVIDIA, AMD, and Windows Subsystem for Linux."""


@cache
def count_gpus(timeout_s: float = 120.0) -> int:
    """Return the number of GPUs that torch sees in a process of its own; 0 without torch or after a failure."""
    if not any(next(Path("/dev").glob(name), None) for name in GPU_DEVICES):
        return 0  # without the seconds that importing torch takes
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        return int(completed.stdout.strip().rpartition("\n")[2])
    except (subprocess.TimeoutExpired, ValueError):
        return 0


def answer(question: Question, refuse: Callable[[ConfigError], None]) -> dict[str, int]:
    """Import and call everything that ``question`` names. Raises ``ConfigError``.

    ``refuse`` ends the process with a ``ConfigError``, also from another thread.
    """
    specs: dict[str, str] = question["specs"]
    functions = {key: load_object(spec, key) for key, spec in specs.items()}
    for key in functions:
        if key.endswith(ENGINE):
            check_methods(functions[key], specs[key], key)
    for engine_options in question["vllm_options"]:
        check_names(engine_options, inspect.signature(load_object(ARGUMENTS, OPTIONS)).parameters)
    for key, (positional, names) in question["calls"].items():
        _takes(functions[key], key, specs[key], positional, names)
    read = {key: _rows(functions[key], key, specs[key], *how) for key, how in question["sources"].items()}
    firsts = {key: (columns, bytes.fromhex(row)) for key, (columns, row) in question["rows"].items()}
    firsts |= {key: first for key, (_, first) in read.items()}
    for reward in (key for key in functions if key.startswith(REWARD)):
        named = Named(functions[reward], reward, specs[reward])
        for key, (columns, _) in firsts.items():
            _scores(named, key, columns, *question["scored"])
        if question["tried"]:
            key, limit_s = question["tried"]
            _try(named, key, firsts[key][1], question["scored"][0], limit_s, refuse)
    return {key: number for key, (number, _) in read.items()}


class Named(NamedTuple):
    """A function of the user with its key and import path."""

    function: Any
    key: str
    spec: str


def _try(
    reward: Named,
    key: str,
    row: bytes,
    needs: list[str],
    limit_s: float,
    refuse: Callable[[ConfigError], None],
) -> None:
    """Call the reward once, as a worker would. Raises ``ConfigError`` if it would fail every group of the run."""
    given: dict[str, Any] = msgspec.msgpack.decode(row)
    prompt = given.pop("prompt")
    given.pop("completion", None)
    facts: dict[str, Any] = dict(zip(FACTS, ([0], 1, FINISH_REASONS[0]), strict=True))
    numbers = dict.fromkeys((need.partition("/")[2] for need in needs), 0.0)

    def wrong(what: str) -> ConfigError:
        tried = f'called with the first row of {key} and the completion "{COMPLETION}" it {what}'
        return ConfigError(reward.key, reward.spec, f"{tried}; with reward.probe = false it is not tried")

    late = threading.Timer(limit_s, lambda: refuse(wrong(f"took longer than reward.timeout_s = {limit_s:g} s")))
    late.daemon = True
    late.start()
    try:
        if lists := takes_lists(reward.function):
            prompts = [given.get("messages") or prompt]
            value = reward.function(
                **list_arguments(reward.function, prompts, [COMPLETION], [given | numbers], [facts])
            )
        else:
            positional, named = arguments(reward.function, prompt, COMPLETION, given | numbers, facts)
            value = reward.function(*positional, **named)
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
    except (Exception, SystemExit) as error:
        lines = traceback.extract_tb(error.__traceback__)[1:]
        place = f", at {os.path.basename(lines[-1].filename)}:{lines[-1].lineno}" if lines else ""
        raise wrong(f"raised {type(error).__name__}: {error!s:.300}{place}") from error
    finally:
        late.cancel()
    if problem := listed(value, 1)[1] if lists else objection(value):
        raise wrong(f"returned {problem}")


def _rows(
    source: Any, key: str, spec: str, options: dict[str, Any], columns: dict[str, str], chat: bool, count: bool
) -> tuple[int, tuple[list[str], bytes]]:
    """Return the number of rows (1 where not counted), and the columns and the encoded form of the first row."""
    try:
        rows = iter(source(**options))
        first: Any = next(rows, None)
        number = (first is not None) + (sum(1 for _ in rows) if count else 0)
    except Exception as error:  # user code may raise anything, and the operator must see it
        raise ConfigError(key, spec, f"calling it failed ({type(error).__name__}: {error})") from error
    if first is None:
        raise ConfigError(key, spec, "it gave no rows")
    return number, prompt_row(key, spec, "row 0", first, columns, chat_template=chat)


def _scores(reward: Named, key: str, columns: list[str], needs: list[str], more: bool) -> None:
    """Check that the reward accepts its arguments for a row of ``key``."""
    check_row(needs, columns, key)
    passed = (*columns, *(need.partition("/")[2] for need in needs))
    names = [name for name in passed if name not in ("prompt", "completion")]
    if takes_lists(reward.function):
        offered = list_arguments(reward.function, [""], [""], [dict.fromkeys(names)], [dict.fromkeys(FACTS)])
        given = f"lists of {', '.join(offered)}, as the rows of {key} are"
        _takes(reward.function, reward.key, reward.spec, 0, list(offered), given, more)
        return
    names += [name for name in arguments(reward.function, "", "", {}, dict.fromkeys(FACTS))[1] if name not in names]
    given = f"(prompt, completion{''.join(f', {name}=...' for name in names)}), as the rows of {key} are"
    _takes(reward.function, reward.key, reward.spec, 2, names, given, more)


def _takes(
    function: Any, key: str, spec: str, positional: int, names: list[str], given: str = "", more: bool = False
) -> None:
    """Check that ``function`` accepts these arguments. ``more``: other keyword arguments may follow, so none is
    missing.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    offered = [name for name in OFFERED.get(key, ()) if name in signature.parameters]
    bind = signature.bind_partial if more else signature.bind
    try:
        bind(*range(positional), **dict.fromkeys([*names, *offered]))
    except TypeError as error:
        given = given or ", ".join(names) or f"{positional} values"
        raise ConfigError(key, spec, f"it is called with {given}, but {error}") from error


def main() -> int:
    out = os.dup(1)
    os.dup2(2, 1)  # output of user modules must not mix with the reply

    def reply(**answers: Any) -> None:
        os.write(out, b"\n" + json.dumps(answers).encode())

    def refuse(error: ConfigError) -> None:
        reply(error=[error.what, error.value, error.allowed])
        os._exit(0)

    try:
        reply(rows=answer(json.load(sys.stdin), refuse))
    except ConfigError as error:
        refuse(error)
    return 0


if __name__ == "__main__":
    os._exit(main())  # skips teardown: modules that user code imports may need seconds for it
