"""What a rollout worker asks of an engine, and what it gets back.

Two shapes of one contract. ``Engine`` is stepped by whoever owns it: nothing happens between two calls, and that is
where weights are loaded. ``AsyncEngine`` runs by itself: ``EngineThread`` makes one of an ``Engine``, and an engine
that has a loop of its own is one already.

Log-probabilities are the engine's own, of the distribution that it sampled from: ``log_softmax(logits / temperature)``
at the drawn token. (Greedy decoding, temperature 0, reports those of temperature 1.)
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.trajectory import Finish


class EngineError(Exception):
    """Base of an engine's own errors."""


class RequestError(EngineError):
    """This request cannot be served (prompt too long, token outside the vocabulary); the engine goes on."""


class LoadError(EngineError):
    """These tensors are not this model's weights. Nothing was changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 takes the most likely token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSegment:
    """Consecutive tokens that one version wrote."""

    lineage: Lineage
    version: Version
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One trajectory to be written. ``id`` is the caller's and unique among those that live."""

    id: int
    prompt_ids: NDArray[np.int32]
    sampling: Sampling
    seed: int = 0
    """Decides every draw: the same seed over the same logits gives the same tokens, whoever else is in the batch."""
    prefix: tuple[TokenSegment, ...] = ()
    """Tokens written before (partial rollout); they count against ``max_new_tokens`` and come back in the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """A request that ended. A stop token, when there is one, is the last token written."""

    id: int
    segments: tuple[TokenSegment, ...]
    """In order of writing; versions never fall."""
    finish: Finish

    @property
    def token_ids(self) -> NDArray[np.int32]:
        return prefix_tokens(self.segments)[0]

    @property
    def logprobs(self) -> NDArray[np.float32]:
        return prefix_tokens(self.segments)[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counts right now, but for ``generated_tokens``, ``steps`` and ``preemptions``."""

    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    """Share of the KV cache in use, 0 to 1."""
    kv_tokens: int = 0
    """Tokens in the KV cache."""
    kv_capacity: int = 0
    """Tokens that the KV cache holds."""
    slots: int = 0
    """Requests that are decoded at once."""
    generated_tokens: int = 0
    """Since the engine was made."""
    steps: int = 0
    """Decode steps since the engine was made."""
    preemptions: int = 0
    """Since the engine was made: times that a running request gave its KV cache to others and was read in again."""


class Engine(Protocol):
    """Continuous batching, one decode step at a time. Not safe for threads: one owner."""

    joining: bool
    """While False no waiting request starts; those that run go on."""

    def submit(self, request: Request) -> None:
        """Queue a request; it joins the batch at a step to come. ``RequestError`` when it can never be served."""
        ...

    def step(self) -> list[Trajectory]:
        """Let waiting requests join, write one token of every running one, and return those that ended."""
        ...

    def interrupt(self, request: int) -> None:
        """End a request with the tokens so far, at least one: it comes out of a step soon, marked INTERRUPTED."""
        ...

    def withdraw(self, request: int) -> Request | None:
        """Take back a request that waits, with the tokens it had as its prefix; None when it runs or has ended."""
        ...

    def abort(self, request: int) -> None:
        """Forget a request and its tokens. Unknown ids are no error: it may just have ended."""
        ...

    def load(self, tensors: Mapping[str, NDArray[np.generic]], lineage: Lineage, version: Version) -> None:
        """Take these weights. Running requests go on with them in a new segment, over the KV cache that they have
        (an engine that can recompute may be made to read them in anew instead).

        bfloat16 and float16 come as their bits in uint16. ``LoadError`` leaves the old weights as they were.
        """
        ...

    def stats(self) -> EngineStats: ...


class AsyncEngine(Protocol):
    """The same contract for an engine with a loop of its own."""

    failure: "asyncio.Future[None]"
    """Gets the exception that ended the engine, should there be one."""

    async def generate(self, request: Request) -> Trajectory:
        """The finished trajectory. ``asyncio.CancelledError`` when it was aborted."""
        ...

    def interrupt(self, request: int, least: int = 1) -> None:
        """End a request with the tokens so far. ``least`` 0: one that waits ends at once, without another token."""
        ...

    def abort(self, request: int) -> None: ...

    async def load(self, tensors: Mapping[str, NDArray[np.generic]], lineage: Lineage, version: Version) -> None: ...

    def stats(self) -> EngineStats: ...

    def busy_s(self) -> float:
        """Seconds with something running, since the engine was made."""
        ...

    def tokens_per_s(self) -> float:
        """Over the last few seconds."""
        ...

    def stuck_s(self) -> float:
        """Seconds that the step under way has taken; 0 between steps. An engine that hangs shows here."""
        ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class Marks:
    """Which version wrote from which token on, while a trajectory grows."""

    marks: list[tuple[Lineage, Version, int]] = field(default_factory=list[tuple[Lineage, Version, int]])

    def turn(self, lineage: Lineage, version: Version, written: int) -> None:
        """From token number ``written`` on it is this version."""
        if self.marks and self.marks[-1][2] == written:
            self.marks.pop()
        if not self.marks or self.marks[-1][:2] != (lineage, version):
            self.marks.append((lineage, version, written))

    def cut(self, token_ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> tuple[TokenSegment, ...]:
        """The segments of a trajectory (copies); none before its first mark."""
        ends = [start for _, _, start in self.marks[1:]] + [len(token_ids)] * bool(self.marks)
        return tuple(
            TokenSegment(
                lineage=lineage,
                version=version,
                token_ids=token_ids[start:end].copy(),
                logprobs=logprobs[start:end].copy(),
            )
            for (lineage, version, start), end in zip(self.marks, ends, strict=True)
            if end > start
        )


def prefix_tokens(prefix: Sequence[TokenSegment]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """All tokens and log-probabilities of some segments, one after the other."""
    if not prefix:
        return np.empty(0, np.int32), np.empty(0, np.float32)
    return np.concatenate([s.token_ids for s in prefix]), np.concatenate([s.logprobs for s in prefix])


def check_request(request: Request, context: int, vocabulary: int) -> None:
    """``RequestError`` when a model of ``context`` tokens and ``vocabulary`` ids can never serve it."""
    prompt = request.prompt_ids
    written = sum(len(segment.token_ids) for segment in request.prefix)
    if len(prompt) == 0:
        raise RequestError("the prompt is empty")
    if len(prompt) + written >= context:
        raise RequestError(f"the prompt has {len(prompt) + written} tokens; the model's context is {context}")
    if written >= request.sampling.max_new_tokens:
        raise RequestError(f"{written} tokens are written; max_new_tokens is {request.sampling.max_new_tokens}")
    for what, ids in (("prompt", prompt), ("prefix", prefix_tokens(request.prefix)[0])):
        least, highest = int(ids.min(initial=0)), int(ids.max(initial=0))
        if least < 0 or highest >= vocabulary:
            raise RequestError(
                f"the {what} has token {least if least < 0 else highest}; the vocabulary has {vocabulary}"
            )
