# pyright: basic, reportMissingImports=false
# mypy: disable-error-code="misc"
"""An environment as authors of OpenEnv write it, and its server. It knows nothing of a run.

``python -m staleflow.examples.environments.openenv_calculator --port 8200``. A task is a sum. An action that is an
expression, such as ``47+38``, is calculated; any other action is the answer, which ends the episode.
"""

import argparse
from functools import cache, partial
from typing import Any

import uvicorn
from fastapi import FastAPI
from openenv.core import Action, Environment, Observation, State, create_app

from staleflow.examples.environments.calculator import EXPRESSION, calculate
from staleflow.examples.quickstart import task


class Say(Action):
    message: str


class Shown(Observation):
    text: str = ""


@cache
def tasks(limit: int) -> dict[str, list[dict[str, str]]]:
    """Return the splits, which all sessions share."""
    return {"train": task.prompts(0, limit=limit), "test": task.held_out(0, limit=limit)}


class Calculator(Environment[Say, Shown, State]):
    """Sums of numbers below ``limit``, with ``calculations`` before the answer."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, limit: int = 50, calculations: int = 2) -> None:
        super().__init__()
        self._rows = tasks(limit)
        self._calculations = calculations
        self._row = self._rows["train"][0]
        self._state = State()

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, split: str = "train", index: int = 0, **_: Any
    ) -> Shown:
        self._row = self._rows[split][index]
        self._state = State(episode_id=episode_id)
        return Shown(text=self._row["prompt"])

    def step(self, action: Say, timeout_s: float | None = None, **_: Any) -> Shown:
        self._state.step_count += 1
        if EXPRESSION.fullmatch(action.message) and self._state.step_count <= self._calculations:
            return Shown(text=calculate(action.message), reward=0.0)
        return Shown(reward=float(action.message.strip() == self._row["answer"]), done=True)

    @property
    def state(self) -> State:
        return self._state

    def list_splits(self) -> list[str]:
        return list(self._rows)

    def num_tasks(self, split: str) -> int:
        return len(self._rows[split])


def app(limit: int = 50, sessions: int = 128) -> FastAPI:
    """Return the application, as an OpenEnv image serves it."""
    make = partial(Calculator, limit)
    return create_app(make, Say, Shown, env_name="calculator", max_concurrent_envs=sessions)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8200)
    parser.add_argument("--limit", type=int, default=50, help="the numbers are below this")
    parser.add_argument("--sessions", type=int, default=128, help="episodes at once")
    arguments = parser.parse_args()
    uvicorn.run(
        app(arguments.limit, arguments.sessions),
        host="127.0.0.1",
        port=arguments.port,
        log_level="warning",
        ws_ping_timeout=60,
    )


if __name__ == "__main__":
    main()
