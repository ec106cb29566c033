"""The judge works against a real endpoint on loopback: the chat format, retries, time limit, and parsing of replies."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from staleflow.clients.stage.user_stage import user_stage
from staleflow.clients.stage.worker import Failed, StageOutcome
from staleflow.clients.texts import ids_as_text
from staleflow.configs.schema import Stage
from staleflow.configs.stages import Node
from staleflow.examples.stages.judge import score_of
from tests.clients.stage.judged import group

KEY_VARIABLE = "STALEFLOW_TEST_JUDGE_KEY"
Reply = tuple[int, str]
"""Status and the assistant's text."""


class Endpoint:
    """An endpoint for HTTP/1.1 and the chat format, one request per connection; ``answer`` gets each request's body."""

    def __init__(self, answer: Callable[[dict[str, Any]], Reply | None]) -> None:
        self._answer = answer
        self.finish = "stop"
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.under_way = self.most = 0
        self.together = asyncio.Event()
        """Set once two requests are under way."""
        self.waits = False
        """Whether replies wait for it."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head.split("\r\n"))
        }
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        assert head.startswith("POST /v1/chat/completions ")
        self.asked.append(body)
        self.keys.add(headers["authorization"])
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        if self.under_way > 1:
            self.together.set()
        try:
            reply = self._answer(body)
            if self.waits:
                await self.together.wait()
            if reply is None:
                await asyncio.sleep(3600)
            assert reply is not None
            await self._say(writer, body, reply)
        finally:
            self.under_way -= 1
            writer.close()

    async def _say(self, writer: asyncio.StreamWriter, body: dict[str, Any], reply: Reply) -> None:
        message = {"index": 0, "finish_reason": self.finish, "message": {"role": "assistant", "content": reply[1]}}
        made = {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [message]}
        data = json.dumps(made if reply[0] == 200 else {"error": {"message": "no"}}).encode()
        writer.write(b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\n" % reply[0])
        writer.write(b"retry-after-ms: 10\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(data), data))
        await writer.drain()


@asynccontextmanager
async def serving(answer: Callable[[dict[str, Any]], Reply | None]) -> AsyncGenerator[tuple[Endpoint, str]]:
    endpoint, tasks = Endpoint(answer), set[asyncio.Task[None]]()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.get_running_loop().create_task(endpoint.serve(reader, writer)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield endpoint, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def judged(url: str, *numbers: int, **options: Any) -> list[StageOutcome]:
    """Return the outcomes of the shipped judge for these groups, in the process of a stage."""
    given = Stage(
        name="judge",
        run="staleflow.examples.stages.judge:judge",
        makes=["score"],
        retries=0,
        timeout_s=120.0,
        options={"base_url": url, "model": "m", "key_variable": KEY_VARIABLE, **options},
    )
    node = Node(name="judge", key="", needs=(), makes=("stage/judge/score",))
    async with user_stage(given, node, ids_as_text) as stage:
        return list(await stage.make([group(number) for number in numbers]))


def scores(made: StageOutcome) -> list[float]:
    assert not isinstance(made, Failed), made.why
    return [round(value, 4) for value in made["stage/judge/score"].tolist()]


async def test_every_completion_is_asked_for_once_side_by_side_in_the_chat_format(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "a-secret")

    def answer(body: dict[str, Any]) -> Reply:
        return 200, f"Score: {len(body['messages'][0]['content'].rpartition('Answer:')[2].split())}"

    async with serving(answer) as (endpoint, url):
        endpoint.waits = True
        made = await judged(url, 1, 2, 3, best=20.0)
    assert [scores(one) for one in made] == [[0.2, 0.3]] * 3  # 4 and 6 tokens, divided by 20
    assert (len(endpoint.asked), endpoint.keys) == (6, {"Bearer a-secret"})
    assert endpoint.most > 1
    first = endpoint.asked[0]
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("m", 0.0, 16)
    assert [message["role"] for message in first["messages"]] == ["user"]
    assert "from 0 (useless) to 20" in first["messages"][0]["content"]


async def test_an_overloaded_endpoint_is_asked_again() -> None:
    seen: dict[str, int] = {}

    def answer(body: dict[str, Any]) -> Reply:
        question = body["messages"][0]["content"]
        seen[question] = seen.get(question, 0) + 1
        return (200, "7") if seen[question] > 2 else (429 if seen[question] == 1 else 503, "")

    async with serving(answer) as (endpoint, url):
        (made,) = await judged(url, 1)
    assert scores(made) == [0.7, 0.7]
    assert len(endpoint.asked) == 6


async def test_a_reply_that_was_cut_off_is_no_score() -> None:
    async with serving(lambda body: (200, "The answer needs 12 steps and has\n2")) as (endpoint, url):
        assert scores((await judged(url, 1))[0]) == [0.2, 0.2]
        endpoint.finish = "length"
        (made,) = await judged(url, 1, max_tokens=7)
    assert isinstance(made, Failed)
    assert (
        "the judge was cut off at 'The answer needs 12 steps and has\\n2'; it needs more than max_tokens 7" in made.why
    )


@pytest.mark.slow
async def test_an_endpoint_that_hangs_or_says_no_score_fails_the_group_with_the_reason() -> None:
    async with serving(lambda body: None) as (endpoint, url):
        (made,) = await judged(url, 1, timeout_s=10.0, retries=1, question="{prompt}")
    assert isinstance(made, Failed)
    assert "the stage judge raised" in made.why
    assert len(endpoint.asked) == 4  # the time limit applies per call, and calls are retried
    async with serving(lambda body: (200, "I would rather not say.")) as (_, url):
        (made,) = await judged(url, 1)
    assert isinstance(made, Failed)
    assert "the judge said 'I would rather not say.', which is not one score from 0 to 10" in made.why


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("7", 0.7),
        ("Rating: 8.5", 0.85),
        ("**Score:** 8", 0.8),
        ("**8**/**10**", 0.8),
        ("Score: 9 of 10", 0.9),
        ("8\nThe answer has 2 mistakes.", 0.8),
        ("5\nOn second thought:\n**7**\nStep 3 is right.", 0.7),
        (".5", 0.05),
        ("0", 0.0),
        ("8/10", 0.8),
        ("**8** / 10.", 0.8),
        ("7 out of 10", 0.7),
        ("7 (Out of 10)", 0.7),
        ("3 out of 4", 0.75),
        ("85/100", 0.85),
        ("Step 2 forgets 3 cases.\n\nScore: 4/10\n", 0.4),
    ],
)
def test_a_score_is_the_number_of_its_line_over_the_scale_or_the_fraction_that_it_says(
    reply: str, score: float
) -> None:
    assert score_of(reply, 10.0) == score


@pytest.mark.parametrize(
    "reply",
    [
        *("good", "", "It has 2 mistakes.", "1. A title", "2*3", "8\n12", "8 on a scale from 0 to 10", "8/10 or 9/10"),
        *("4,5", "12", "85%", "-2", "12/10", "8/0", "0/0"),
    ],
)
def test_a_reply_that_is_not_one_score_is_refused(reply: str) -> None:
    with pytest.raises(ValueError, match=r"which is not one score from 0 to 10 on a line of its own$"):
        score_of(reply, 10.0)
