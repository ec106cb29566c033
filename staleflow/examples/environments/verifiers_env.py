# pyright: basic, reportMissingImports=false
"""Any environment of the package ``verifiers``, unchanged: its dataset has the prompts, its rubric gives the reward.

``environment`` is the id of an installed environment, as ``verifiers.load_environment`` takes it, or the import path of
a callable that returns a ``verifiers.Environment``; ``arguments`` are passed to it. The prompts and the environment
need the same two options.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Literal

from openai import APIStatusError, AsyncOpenAI

try:
    from verifiers import Environment, InvalidModelResponseError, OpenAIChatCompletionsClient, load_environment
except ImportError as error:
    raise ImportError(f"{error}; it needs verifiers 0.3: pip install -e '.[verifiers]'") from error

from staleflow.clients.rollout.episodes.env_client import Client
from staleflow.configs.imports import load_object

INPUT = "input"
"""Column with a whole row of the dataset as JSON: functions of a rubric may need any of its columns."""

LIMITS = ("episode_over", "context_length_exceeded", "max_turns")
"""Codes of rejected calls that end an episode early; the rubric scores the conversation so far."""


class VerifiersEnvironment:
    """Rows need ``input``, as ``prompts`` and ``held_out`` return it."""

    def __init__(self, environment: str, arguments: Mapping[str, Any] | None = None) -> None:
        self._environment = _load(environment, arguments or {})
        if self._environment.requires_group_rollouts:
            wanted = "an episode is scored alone: the rubric must not compare the episodes of a group"
            raise ValueError(f"environment={environment!r} has a reward function of whole groups; {wanted}")

    async def rollout(self, client: Client, row: Mapping[str, Any]) -> dict[str, float]:
        """``reward``: the score of the rubric; and the value of each of its functions, before its weight."""
        if INPUT not in row:
            raise ValueError(f'the row has no column "{INPUT}"; set prompts.source to {__name__}:prompts')
        environment = self._environment
        async with AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as policy:
            state = await environment.rollout(
                json.loads(row[INPUT]),
                OpenAIChatCompletionsClient(policy),
                "policy",
                deepcopy(environment.sampling_args),
            )
        try:
            _check(state.get("error"))
            await environment.rubric.score_rollout(state)
        finally:
            await environment.rubric.cleanup(state)
        columns = {_column(name): value for name, value in (state["metrics"] or {}).items()}
        return {**columns, "reward": state["reward"]}


def prompts(seed: int, *, environment: str, arguments: Mapping[str, Any] | None = None) -> list[dict[str, str]]:
    """Return the rows of the environment's training dataset; the same for every ``seed``."""
    return _rows_of_process("train", environment, arguments or {})


def held_out(seed: int, *, environment: str, arguments: Mapping[str, Any] | None = None) -> list[dict[str, str]]:
    """Return the rows of the environment's evaluation dataset; the same for every ``seed``."""
    return _rows_of_process("eval", environment, arguments or {})


def _rows_of_process(
    split: Literal["train", "eval"], environment: str, arguments: Mapping[str, Any]
) -> list[dict[str, str]]:
    """Read the rows in another process, which runs ``main``.

    An ``Environment`` replaces the handlers of SIGINT and SIGTERM of its process, and can be made in a main thread
    only. The caller is a server with handlers of its own, or a thread of the trainer.
    """
    command = [sys.executable, "-m", "staleflow.examples.environments.verifiers_env"]
    request = json.dumps([split, environment, dict(arguments)])
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, input=request, stdout=subprocess.PIPE, text=True, env=variables, check=False)
    if done.returncode:
        raise ValueError(f"environment={environment!r}: its process ended with exit code {done.returncode}")
    reply: dict[str, Any] = json.loads(done.stdout)
    if "error" in reply:
        raise ValueError(reply["error"])
    rows: list[dict[str, str]] = reply["rows"]
    return rows


def main() -> None:
    """Read one request from the standard input and write the rows, or why there are none, to the standard output."""
    split, environment, arguments = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):  # an environment may print
        try:
            reply: dict[str, Any] = {"rows": _rows(split, environment, arguments)}
        except ValueError as error:
            reply = {"error": str(error)}
    sys.stdout.write(json.dumps(reply))
    sys.stdout.flush()


def _rows(split: Literal["train", "eval"], environment: str, arguments: Mapping[str, Any]) -> list[dict[str, str]]:
    loaded = _load(environment, arguments)
    source = loaded.build_dataset() if split == "train" else loaded.build_eval_dataset()
    if source is None:
        key = "prompts.source" if split == "train" else "prompts.eval_source"
        raise ValueError(f"environment={environment!r} has no {split} dataset; {key} must be something else, or unset")
    try:
        return [{"prompt": _question(row["prompt"]), INPUT: json.dumps(row)} for row in source]
    except TypeError as error:  # an image, a date
        raise ValueError(f"environment={environment!r}: {error}; rows must be text and numbers") from error


def _load(environment: str, arguments: Mapping[str, Any]) -> Environment:
    """Make an environment. ``ValueError`` names it and the cause."""
    try:
        make = load_object(environment, "environment") if ":" in environment else None
        loaded = make(**arguments) if make else load_environment(environment, **arguments)
    except Exception as error:  # user code may raise anything; only text is sure to reach another process
        cause = f" ({error.__cause__})" if error.__cause__ else ""
        raise ValueError(f"environment={environment!r}: {type(error).__name__}: {error}{cause}") from error
    if not isinstance(loaded, Environment):
        raise ValueError(
            f"environment={environment!r} is a {type(loaded).__name__}; it must be a verifiers.Environment"
        )
    return loaded


def _check(error: BaseException | None) -> None:
    """Raise ``RuntimeError`` for an error that ended the rollout, unless the policy or a limit of the run caused it."""
    chain: list[BaseException] = []
    while error is not None:
        chain.append(error)
        error = error.__cause__
    if not chain or isinstance(chain[0], InvalidModelResponseError):
        return
    if isinstance(chain[-1], APIStatusError) and chain[-1].code in LIMITS:
        return
    raise RuntimeError(f"the environment's rollout ended with {' from '.join(map(repr, chain))}")


def _question(messages: str | list[dict[str, Any]]) -> str:
    """Return the text of the last user message, which identifies a row for people."""
    if isinstance(messages, str):
        return messages
    content = next((each["content"] for each in reversed(messages) if each["role"] == "user"), "")
    return content if isinstance(content, str) else json.dumps(content)


def _column(name: str) -> str:
    """Return a function's name as the name of a column."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:64]


if __name__ == "__main__":
    main()
