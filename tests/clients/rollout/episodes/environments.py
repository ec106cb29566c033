"""Valid and faulty environments for the tests of the rollout worker. Child processes load this file by path."""

import asyncio
import importlib
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from staleflow.clients.rollout.episodes.env_client import ChatError, Client, EpisodeOver


class Dialogue:
    """Ask two questions, the second about the first answer; record the answers if a file is configured."""

    def __init__(self, turns: int = 2) -> None:
        self.turns = turns

    async def rollout(self, client: Client, row: Mapping[str, Any]) -> float:
        messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
        for turn in range(self.turns):
            if turn:
                messages.append({"role": "tool", "content": f"turn {turn}"})
            reply = await client.chat.completions.create(messages=messages)
            messages.append(reply.choices[0].message)
        return float(len(messages[-1].content))


class Raw:
    """Plain completions, each of which extends the text so far; returns several numbers and no reward."""

    async def rollout(self, client: Client, row: Mapping[str, Any]) -> dict[str, float]:
        text, calls = str(row["prompt"]), 3
        for _ in range(calls):
            reply = await client.completions.create(prompt=text, max_tokens=5)
            text += reply.choices[0].text + "\nnext:"
        return {"calls": calls, "length": len(text)}


class Tokens:
    """Completions by token ids, so that the environment itself writes tokens."""

    async def rollout(self, client: Client, row: Mapping[str, Any]) -> None:
        prompt = [65, 66]
        for _ in range(2):
            reply = await client.completions.create(prompt=prompt, max_tokens=4)
            prompt = [*prompt, *reply.choices[0].token_ids, 35, 36, 37]


class Bad:
    """Fail after one good answer, in the way that the row's ``prompt`` names."""

    async def rollout(self, client: Client, row: Mapping[str, Any]) -> Any:
        messages: list[Any] = [{"role": "user", "content": "hello"}]
        kind, first = row["prompt"], 0
        if kind != "silent":
            reply = await client.chat.completions.create(messages=messages)
            messages += [reply.choices[0].message, {"role": "user", "content": "again"}]
            first = reply.choices[0].token_ids[0]
        match kind:
            case "raise":
                raise ValueError("no such planet")
            case "hang":
                await asyncio.sleep(3600)
            case "block":
                time.sleep(3600)  # noqa: ASYNC251 - the mistake that is tested
            case "exit":
                os._exit(7)
            case "subtask":
                await asyncio.gather(asyncio.sleep(0.05), asyncio.create_task(_exits()))
            case "thread":
                await asyncio.to_thread(_exits_later)
            case "killed":
                await asyncio.sleep(0.05)
                os.kill(os.getpid(), signal.SIGKILL)
            case "memory":
                return float(len(bytearray(1 << 33)))
            case "text":
                return "good"
            case "nan":
                return {"reward": float("nan")}
            case "name":
                return {"a/b": 1.0}
            case "mixed":
                return None if first % 2 else 1.0
            case "deaf":
                Path(row["pid"]).write_text(str(os.getpid()))  # noqa: ASYNC240 - a few bytes
                while True:
                    try:
                        await asyncio.sleep(3600)
                    except asyncio.CancelledError:
                        continue
            case "waits":
                if not (marker := Path(row["marker"])).exists():  # the first of its two plays
                    marker.touch()  # noqa: ASYNC240 - an empty file
                    await asyncio.sleep(3600)
                return 1.0
            case "silent":
                return 1.0
            case _:
                await asyncio.sleep(0.3)
                return 1.0


async def _exits() -> None:
    await asyncio.sleep(0.05)
    os._exit(7)


def _exits_later() -> None:
    time.sleep(0.05)
    os._exit(7)


class Counting:
    """The reward is the maximum number of concurrent episodes that this process has had; the first wait for a third."""

    def __init__(self) -> None:
        self.here = self.most = 0
        self.third = asyncio.Event()

    async def rollout(self, client: Client, row: Mapping[str, Any]) -> float:
        self.here += 1
        self.most = max(self.most, self.here)
        if self.here == 3:
            self.third.set()
        await self.third.wait()
        await client.chat.completions.create(messages=[{"role": "user", "content": "hello"}])
        await asyncio.sleep(0.05)
        self.here -= 1
        return float(self.most)


class Endless:
    """Continue until the server reports the end of the episode, then record the progress."""

    async def rollout(self, client: Client, row: Mapping[str, Any]) -> float | None:
        messages: list[Any] = [{"role": "user", "content": "go"}]
        while True:
            try:
                reply = await client.chat.completions.create(messages=messages)
            except EpisodeOver:
                return None if row["prompt"] == "speechless" else float(len(messages) // 2)
            messages += [reply.choices[0].message, {"role": "user", "content": "on"}]
            if row["prompt"] == "slow":
                await asyncio.sleep(3600)


class Refused:
    """Make calls that must be refused; the reward is the number of calls refused with the right name."""

    async def rollout(self, client: Client, row: Mapping[str, Any]) -> float:
        hello = [{"role": "user", "content": "hello"}]
        reply = await client.chat.completions.create(messages=hello, logprobs=True, temperature=1.0, n=1)
        said = [*hello, reply.choices[0].message]
        wrong: list[tuple[str, dict[str, Any]]] = [
            ("unsupported", {"messages": said, "tools": [{"type": "function", "function": {"name": "f"}}]}),
            ("unsupported", {"messages": said, "top_p": 0.9}),
            ("unsupported", {"messages": said, "echo": True}),
            ("unsupported", {"messages": said, "temperature": 0.5}),
            ("unsupported", {"messages": said, "n": 2}),
            ("malformed", {"messages": said, "max_tokens": 10**9}),
            ("malformed", {"messages": []}),
            ("other_history", {"messages": [{"role": "user", "content": "another"}]}),
            ("other_history", {"messages": hello}),
            ("no_turn", {"messages": said}),
        ]
        right = 0
        for code, arguments in wrong:
            try:
                await client.chat.completions.create(**arguments)
            except ChatError as error:
                right += error.code == code and error.status == 400
        return float(right + await asyncio.to_thread(self._unknown_key, client))

    def _unknown_key(self, client: Client) -> int:
        request = urllib.request.Request(f"{client.base_url}/chat/completions", b"{}", {"Authorization": "Bearer x"})
        try:
            urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            with error:
                return int(error.code == 401)
        return 0


class OpenAI:
    """The same calls through the ``openai`` package."""

    async def rollout(self, client: Client, row: Mapping[str, Any]) -> float:
        package: Any = importlib.import_module("openai")  # not a dependency
        speaker = package.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key)
        messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
        reply = await speaker.chat.completions.create(model="any", messages=messages, logprobs=True)
        messages += [reply.choices[0].message, {"role": "user", "content": "again"}]
        reply = await speaker.chat.completions.create(model="any", messages=messages, max_tokens=3)
        return float(reply.usage.completion_tokens)
