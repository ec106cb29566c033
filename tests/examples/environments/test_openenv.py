# pyright: basic, reportMissingImports=false
# mypy: disable-error-code="no-untyped-call"
"""Environments of the real package ``openenv`` are played on their own servers, which may be full, hang or die."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("websockets")
pytest.importorskip("openenv")

from staleflow.clients.rollout.episodes.env_client import Client, EpisodeOver
from staleflow.examples.environments import openenv_env
from staleflow.examples.environments.openenv_env import OpenEnv
from staleflow.examples.environments.openenv_session import ServerError, Unavailable
from tests.examples.environments.guessing import Serving, serving

HERE = Path(__file__)
NUMBER = 40


class Policy(Client):
    """A policy of the test: ``answer`` gets the messages so far and returns the next one."""

    def __init__(self, answer: Callable[[list[dict[str, Any]]], Awaitable[str]]) -> None:
        super().__init__("http://nowhere", "")
        self.answer = answer
        self.messages: list[dict[str, Any]] = []

    async def post(self, route: str, arguments: dict[str, Any]) -> Any:
        self.messages = [m if isinstance(m, dict) else vars(m) for m in arguments["messages"]]
        content = await self.answer(self.messages)
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(role="assistant", content=content))])


def scripted(*answers: str) -> Policy:
    left = iter(answers)

    async def answer(messages: list[dict[str, Any]]) -> str:
        try:
            return next(left)
        except StopIteration:
            raise EpisodeOver(400, "episode_over", "interrupted") from None

    return Policy(answer)


def guesser() -> Policy:
    """A policy that halves the numbers below 2 ** 4 that the hints leave."""
    bounds = [0, 16]

    async def answer(messages: list[dict[str, Any]]) -> str:
        if messages[-1]["content"] in "+-":
            guessed = int(messages[-2]["content"])
            bounds["-+".index(messages[-1]["content"]) - 1] = guessed
        return str(sum(bounds) // 2)

    return Policy(answer)


def row(seed: int) -> dict[str, Any]:
    return {"prompt": f"guess {seed}", "reset": json.dumps({"seed": seed})}


def twice(text: str) -> dict[str, int]:
    return {"number": 2 * int(text)}


def shown(observation: dict[str, Any]) -> str:
    return f"{observation['guesses']}{observation['text']}"


@pytest.fixture(scope="module")
def few() -> Iterator[Serving]:
    """A server that plays two episodes at a time."""
    with serving(sessions=2) as started:
        yield started


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving() as started:
        yield started


async def test_an_episode_has_the_environments_observations_and_the_sum_of_its_rewards(server: Serving) -> None:
    policy = scripted("50", "30", "40")
    numbers = await OpenEnv(server.url, system="Guess.", role="tool").rollout(policy, row(NUMBER))
    assert numbers == {"reward": 0.5, "turns": 3.0, "done": 1.0, "invalid": 0.0}
    assert [(message["role"], message["content"]) for message in policy.messages] == [
        ("system", "Guess."),
        ("user", "4?"),
        ("assistant", "50"),
        ("tool", "-"),
        ("assistant", "30"),
        ("tool", "+"),
    ]


async def test_functions_make_the_action_and_the_message(server: Serving) -> None:
    environment = OpenEnv(server.url, action=f"{HERE}:twice", observation=f"{HERE}:shown", first_message="prompt")
    policy = scripted("15", "20")
    assert (await environment.rollout(policy, {"prompt": "?", "reset": {"seed": NUMBER}}))["reward"] == 0.75
    assert [message["content"] for message in policy.messages] == ["?", "15", "1+"]


@pytest.mark.parametrize(
    ("options", "answers", "expected"),
    [
        ({"max_turns": 2}, ("1", "2", "3"), (-0.5, 2, 0, 0)),
        ({}, ("1", "2", "3", "4", "40"), (-1.0, 4, 1, 0)),
        ({}, ("1",), (-0.25, 1, 0, 0)),
        ({"invalid_reward": -1.0}, ("1", "forty", "40"), (-1.25, 2, 0, 1)),
        ({"action": f"{HERE}:twice"}, ("forty", "20"), (0.0, 1, 0, 1)),
    ],
    ids=[
        "its limit",
        "the environment's limit",
        "an interrupt",
        "an action that is refused",
        "a text that is no action",
    ],
)
async def test_an_episode_ends_with_the_rewards_so_far(
    server: Serving, options: dict[str, Any], answers: tuple[str, ...], expected: tuple[float, ...]
) -> None:
    numbers = await OpenEnv(server.url, **options).rollout(scripted(*answers), row(NUMBER))
    assert tuple(numbers.values()) == expected


async def test_each_of_many_episodes_at_once_has_a_session_of_its_own_and_waits_for_it(few: Serving) -> None:
    environment = OpenEnv(few.url, session_timeout_s=90.0)
    played = await asyncio.gather(*(environment.rollout(guesser(), row(seed)) for seed in range(16)))
    assert [numbers["done"] for numbers in played] == [1.0] * 16
    assert [numbers["reward"] for numbers in played[1:]] == [1.25 - 0.25 * numbers["turns"] for numbers in played[1:]]


@contextlib.asynccontextmanager
async def all_sessions_busy(environment: OpenEnv) -> AsyncIterator[None]:
    """Play two episodes whose policy never answers, and cancel them at the end."""
    asked = asyncio.Semaphore(0)

    async def never(messages: list[dict[str, Any]]) -> str:
        asked.release()
        return await asyncio.Future()

    episodes = [asyncio.ensure_future(environment.rollout(Policy(never), row(NUMBER))) for _ in range(2)]
    for _ in episodes:
        await asked.acquire()
    yield
    for episode in episodes:
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode


async def test_a_cancelled_episode_gives_its_session_back(few: Serving) -> None:
    environment = OpenEnv(few.url, session_timeout_s=10.0)
    async with all_sessions_busy(environment):
        assert environment.playing == {few.url: 2}
    assert environment.playing == {few.url: 0}
    played = await asyncio.gather(*(environment.rollout(scripted("40"), row(NUMBER)) for _ in range(2)))
    assert [numbers["reward"] for numbers in played] == [1.0] * 2


async def test_without_a_free_session_an_episode_fails_after_a_while(few: Serving) -> None:
    async with all_sessions_busy(OpenEnv(few.url)):
        with pytest.raises(Unavailable, match=rf"{few.url}: it answered reset with CAPACITY_REACHED: .*2/2"):
            await OpenEnv(few.url, session_timeout_s=0.2).rollout(scripted("40"), row(NUMBER))


async def test_a_server_that_dies_costs_its_episodes_and_the_next_one_waits_for_its_return() -> None:
    with serving() as mortal:
        environment = OpenEnv(mortal.url, session_timeout_s=90.0)

        async def answer(messages: list[dict[str, Any]]) -> str:
            mortal.kill()
            mortal.launch()
            return "40"

        with pytest.raises(Unavailable, match=rf"{mortal.url}: it ended the session instead of a reply to step"):
            await environment.rollout(Policy(answer), row(NUMBER))
        assert (await environment.rollout(scripted("40"), row(NUMBER)))["reward"] == 1.0


async def test_episodes_are_spread_over_servers(server: Serving, few: Serving) -> None:
    environment = OpenEnv([server.url, few.url])
    all_play = asyncio.Barrier(4)
    playing: list[dict[str, int]] = []

    async def answer(messages: list[dict[str, Any]]) -> str:
        await all_play.wait()
        playing.append(dict(environment.playing))
        return "40"

    played = await asyncio.gather(*(environment.rollout(Policy(answer), row(NUMBER)) for _ in range(4)))
    assert playing[0] == {server.url: 2, few.url: 2}
    assert [numbers["reward"] for numbers in played] == [1.0] * 4


async def test_a_server_that_is_away_is_left_out(server: Serving) -> None:
    environment = OpenEnv(["http://127.0.0.1:1", server.url])
    played = await asyncio.gather(*(environment.rollout(scripted("40"), row(NUMBER)) for _ in range(4)))
    assert [numbers["reward"] for numbers in played] == [1.0] * 4
    assert environment.playing == {"http://127.0.0.1:1": 0, server.url: 0}


async def test_a_step_that_hangs_fails_its_episode(server: Serving) -> None:
    environment = OpenEnv(server.url, step_timeout_s=5.0)
    with pytest.raises(ServerError, match=rf"{server.url}: no reply to step within 5 s"):
        await environment.rollout(scripted("-1"), row(NUMBER))


async def test_an_error_of_the_environment_fails_its_episode(server: Serving) -> None:
    with pytest.raises(ServerError, match=r"it answered reset with EXECUTION_ERROR: seed is missing"):
        await OpenEnv(server.url).rollout(scripted("40"), {"prompt": "?", "reset": {}})


@pytest.mark.parametrize(
    ("entry", "refusal"),
    [
        ({}, r'the row has no column "reset"; set prompts\.source to staleflow\.examples\.'),
        ({"reset": "[1]"}, r"column \"reset\" is '\[1\]'; it must be a table of arguments"),
    ],
)
async def test_a_row_of_another_source_is_refused(server: Serving, entry: dict[str, Any], refusal: str) -> None:
    with pytest.raises(ValueError, match=refusal):
        await OpenEnv(server.url).rollout(scripted("40"), {"prompt": "?", **entry})


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (
            {"base_url": "http://127.0.0.1:1"},
            r"options\.base_url: http://127\.0\.0\.1:1: /schema: .*refused; start the",
        ),
        ({"base_url": "127.0.0.1:8200"}, r"options\.base_url='127\.0\.0\.1:8200'; it must be http://HOST:PORT or"),
        ({"base_url": []}, r"options\.base_url=\[\]; it must have at least one URL"),
        (
            {"action": "digits"},
            r"options\.action='digits' is no field of the environment's action; .* one of number, or",
        ),
        ({"observation": "hint"}, r"options\.observation='hint' is no field .*; it must be one of text, guesses, or"),
        ({"action": f"{HERE}:absent"}, r"environment\.options\.action is .* has no absent"),
        ({"max_turns": -1}, r"options\.max_turns=-1; it must be at least 0"),
        ({"step_timeout_s": 0.0}, r"options\.step_timeout_s=0\.0; it must be above 0"),
        ({"first_message": "row"}, r"options\.first_message='row'; it must be \"observation\" or \"prompt\""),
    ],
)
def test_a_wrong_option_is_named_in_one_line(server: Serving, options: dict[str, Any], refusal: str) -> None:
    with pytest.raises(Exception, match=refusal) as raised:
        OpenEnv(**{"base_url": server.url, **options})
    assert "\n" not in str(raised.value)


def test_another_server_is_refused() -> None:
    class Hello(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"hello")

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Hello) as other:
        Thread(target=other.handle_request).start()
        with pytest.raises(ValueError, match=r"it is no OpenEnv server; /schema is no JSON"):
            OpenEnv(f"http://127.0.0.1:{other.server_port}")


def test_rows_are_seeds_or_the_tasks_of_a_split(server: Serving) -> None:
    options: dict[str, Any] = {"base_url": server.url, "tasks": 2, "eval_tasks": 1}
    assert openenv_env.prompts(0, **options) == [{"prompt": f"seed {n}", "reset": f'{{"seed": {n}}}'} for n in (0, 1)]
    assert openenv_env.held_out(0, **options) == [{"prompt": "seed 2", "reset": '{"seed": 2}'}]
    with pytest.raises(ValueError, match=r"prompts\.options\.split='train' has no tasks: .*/guessing/num_tasks: HTTP"):
        openenv_env.prompts(0, base_url=server.url, split="train")
