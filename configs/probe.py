"""Tries user code in a process of its own: is it importable, does it take its options, how many rows does it give.

``python -m staleflow.configs.probe`` reads one JSON object on stdin and writes one on stdout; the process that asks
stays free of whatever the user's modules import.
"""

import inspect
import json
import os
import subprocess
import sys
from typing import Any, cast

from staleflow.configs.errors import ConfigError
from staleflow.configs.imports import load_object
from staleflow.configs.row_files import prompt_row
from staleflow.configs.stages import check_row

Question = dict[str, Any]
"""``specs``: key -> import path; ``calls``: key -> (positional count, keyword names) that it must take;
``sources``: key -> (keyword arguments, renames of its columns, whether to count its rows); ``rows``: key -> columns of
a file's first row; ``scored``: stage columns that ``reward.run`` is given besides those of a row, and whether there may
be more."""

REWARD = "reward.run"

OFFERED = {"trainer.algorithm.advantage": ("stages",), "trainer.algorithm.loss": ("stages",)}
"""key -> keyword arguments that it is given if it has them."""


def ask(question: Question, timeout_s: float = 120.0) -> dict[str, int]:
    """Rows of each source (1 where not counted), or the ``ConfigError`` that the other process found."""
    command = [sys.executable, "-m", "staleflow.configs.probe"]
    sent = json.dumps(question)
    try:
        done = subprocess.run(command, input=sent, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError("import paths", str(question["specs"]), f"importing took over {timeout_s:g} s") from None
    reply = _reply(done.stdout)
    if error := reply.get("error"):
        raise ConfigError(*error)
    if "rows" not in reply:
        last = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        raise ConfigError("import paths", str(question["specs"]), f"importing them ended Python: {last}")
    rows: dict[str, int] = reply["rows"]
    return rows


def _reply(text: str) -> dict[str, Any]:
    try:
        return cast(dict[str, Any], json.loads(text.rpartition("\n")[2]))
    except ValueError:
        return {}


def count_gpus(timeout_s: float = 120.0) -> int:
    """GPUs that torch sees here, asked in a process of its own: none without torch, or when it cannot say."""
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        return int(done.stdout.strip().rpartition("\n")[2])
    except (subprocess.TimeoutExpired, ValueError):
        return 0


def answer(question: Question) -> dict[str, int]:
    """Imports and calls what ``question`` names; ``ConfigError`` for what cannot be."""
    specs: dict[str, str] = question["specs"]
    found = {key: load_object(spec, key) for key, spec in specs.items()}
    for key, (positional, names) in question["calls"].items():
        _takes(found[key], key, specs[key], positional, names)
    read = {key: _rows(found[key], key, specs[key], *how) for key, how in question["sources"].items()}
    if REWARD in found:
        columns = {**question["rows"], **{key: first for key, (_, first) in read.items()}}
        for key, first in columns.items():
            _scores(found[REWARD], specs[REWARD], key, first, *question["scored"])
    return {key: number for key, (number, _) in read.items()}


def _rows(
    source: Any, key: str, spec: str, options: dict[str, Any], columns: dict[str, str], count: bool
) -> tuple[int, list[str]]:
    """How many there are (1 where not counted), and the columns of the first."""
    try:
        rows = iter(source(**options))
        first: Any = next(rows, None)
        number = (first is not None) + (sum(1 for _ in rows) if count else 0)
    except Exception as error:  # user code: whatever it raises is the operator's to read
        raise ConfigError(key, spec, f"calling it failed ({type(error).__name__}: {error})") from error
    if first is None:
        raise ConfigError(key, spec, "it gave no rows")
    return number, prompt_row(key, spec, "row 0", first, columns)[0]


def _scores(reward: Any, spec: str, key: str, columns: list[str], needs: list[str], more: bool) -> None:
    """The reward takes what it is called with for a row of ``key``."""
    check_row(needs, columns, key)
    arguments = (*columns, *(need.partition("/")[2] for need in needs))
    names = [name for name in arguments if name not in ("prompt", "completion")]
    given = f"(prompt, completion{''.join(f', {name}=...' for name in names)}), as the rows of {key} are"
    _takes(reward, REWARD, spec, 2, names, given, more)


def _takes(
    function: Any, key: str, spec: str, positional: int, names: list[str], given: str = "", more: bool = False
) -> None:
    """``more``: it may be given other keyword arguments too, so none is missing."""
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
    os.dup2(2, 1)  # what user modules print must not mix with the answer
    try:
        reply: dict[str, Any] = {"rows": answer(json.load(sys.stdin))}
    except ConfigError as error:
        reply = {"error": [error.what, error.value, error.allowed]}
    os.write(out, b"\n" + json.dumps(reply).encode())
    return 0


if __name__ == "__main__":
    os._exit(main())  # tearing down what the user's modules imported may take seconds
