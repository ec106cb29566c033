"""Score samples with the reward functions of a run, each in a child process of its own."""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from staleflow.clients.user_code import pipe
from staleflow.clients.user_code.child import noun_of
from staleflow.clients.user_code.process import Program
from staleflow.clients.user_code.runner import CallFailed, CallRunner
from staleflow.configs.rewards import Component, components
from staleflow.configs.schema import Reward

T = TypeVar("T")

TOTAL = "reward"
"""Name of the weighted sum among the scores."""


class RewardFailed(CallFailed):
    """A sample has no reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Arguments of a reward function for one sample."""

    prompt: str
    completion: str
    columns: dict[str, Any] = field(default_factory=dict[str, Any])
    messages: list[dict[str, Any]] | None = None
    """The prompt as messages, if the row has them: functions that take lists get these."""
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    """Values of ``configs.rewards.FACTS``."""

    def call(self, number: int) -> pipe.Call:
        """Return the message to the child."""
        return pipe.Call(
            id=number, prompt=self.prompt, completion=self.completion, columns=self.columns, facts=self.facts
        )


class RewardRunner:
    """Runner of the functions of a reward. Owned by one event loop."""

    def __init__(
        self, functions: str | Sequence[Component], *, timeout_s: float, retries: int, concurrency: int
    ) -> None:
        """``functions``: the components of the reward, or the import path of the only one."""
        if isinstance(functions, str):
            functions = [Component(key="reward.run", name=TOTAL, run=functions, weight=1.0)]
        self._functions = list(functions)
        self._runners = list[CallRunner]()
        for one in self._functions:
            load = pipe.Load(run=one.run, timeout_s=timeout_s, stage="" if one.name == TOTAL else one.name)
            module = "staleflow.clients.user_code.child"
            program = Program(module=module, key=one.key, noun=noun_of(load), load=load)
            self._runners.append(CallRunner(program, retries=retries, concurrency=concurrency))

    @classmethod
    def of(cls, settings: Reward) -> "RewardRunner":
        """Create the runner of a run's reward."""
        return cls(
            components(settings),
            timeout_s=settings.timeout_s,
            retries=settings.retries,
            concurrency=settings.concurrency,
        )

    @property
    def calls(self) -> int:
        """Most calls of one function under way at once; known once it has started."""
        return max(runner.calls for runner in self._runners)

    @property
    def failed_calls(self) -> int:
        """Number of failed tries."""
        return sum(runner.failed_calls for runner in self._runners)

    @property
    def names(self) -> list[str]:
        """Names of the components, if the reward has several."""
        return [one.name for one in self._functions if one.name != TOTAL]

    async def start(self) -> None:
        """Start the children. ``ConfigError`` when a function cannot be imported."""
        await asyncio.gather(*(runner.start() for runner in self._runners))

    async def close(self) -> None:
        """Kill the children; calls under way fail."""
        await asyncio.gather(*(runner.close() for runner in self._runners))

    async def score(self, samples: Sequence[Sample]) -> list[float]:
        """Return the reward of each sample of a prompt, in order. Raise ``RewardFailed`` once one has failed for
        good."""
        return (await self.scores(samples))[TOTAL]

    async def score_one(self, sample: Sample) -> float:
        """Return the reward of one sample. Raise ``RewardFailed`` after the last try."""
        return (await self.score([sample]))[0]

    async def scores(self, samples: Sequence[Sample]) -> dict[str, list[float]]:
        """Return the reward of each sample, and each component before its weight, by name. Raises as ``score``."""
        by_function = await _all(self._component(runner, samples) for runner in self._runners)
        named = {one.name: values for one, values in zip(self._functions, by_function, strict=True)}
        weights = [one.weight for one in self._functions]
        totals = [sum(map(float.__mul__, weights, values)) for values in zip(*by_function, strict=True)]
        return named | {TOTAL: totals}

    async def _component(self, runner: CallRunner, samples: Sequence[Sample]) -> list[float]:
        try:
            if await runner.takes_lists():
                return await self._list(runner, samples)
            return [answer.value for answer in await _all(runner.answer(sample.call) for sample in samples)]
        except CallFailed as failed:
            raise RewardFailed(str(failed)) from failed

    async def _list(self, runner: CallRunner, samples: Sequence[Sample]) -> list[float]:
        def call(number: int) -> pipe.ListCall:
            return pipe.ListCall(
                id=number,
                prompt=samples[0].messages or samples[0].prompt,
                completions=[sample.completion for sample in samples],
                columns=[sample.columns for sample in samples],
                facts=[sample.facts for sample in samples],
            )

        return (await runner.answer(call)).values


async def _all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results in order. The first failure cancels the other calls."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
