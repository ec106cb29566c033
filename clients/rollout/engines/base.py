"""The contract between a rollout worker and its engine.

The contract has two forms. An ``Engine`` is stepped by its owner: nothing happens between two calls, and weights are
loaded there. An ``AsyncEngine`` runs its own loop. ``EngineThread`` turns an ``Engine`` into an ``AsyncEngine``.

Log-probabilities come from the engine and refer to the distribution that it sampled from, at the drawn token:
``log_softmax(logits / temperature)``, after the penalty and the truncation of ``Sampling``, which every engine applies
in the same order. (Greedy decoding, temperature 0, reports temperature 1.)
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from staleflow.configs.schema import Rollout
from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.trajectory import Finish


class EngineError(Exception):
    """Base class of the errors that an engine raises."""


class RequestError(EngineError):
    """The request cannot be served (prompt too long, token outside the vocabulary); the engine keeps running."""


class ColumnError(EngineError):
    """A trajectory does not have the typed columns of the run. The text names sample and column."""


class LoadError(EngineError):
    """The tensors do not match the model's weights. The model is unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Parameters of token sampling; ``dataclasses.replace`` gives those of one request.

    Scores pass, in this order: ``repetition_penalty``, ``frequency_penalty`` and ``presence_penalty``, ``temperature``,
    ``min_p``, ``top_k``, ``top_p``.
    """

    max_new_tokens: int
    temperature: float = 1.0
    """0 selects the most likely token."""
    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens whose probabilities add up to at least this; 1: from all."""
    top_k: int = 0
    """Sample from this number of most likely tokens, and from tokens as likely as the last of them; 0: from all."""
    min_p: float = 0.0
    """Sample from tokens that are at least this share as likely as the most likely one; 0: from all."""
    repetition_penalty: float = 1.0
    """Divide positive scores, and multiply negative ones, of tokens that prompt or completion contain; 1: none."""
    frequency_penalty: float = 0.0
    """Subtract this from the score of a token as often as the completion contains it; 0: none."""
    presence_penalty: float = 0.0
    """Subtract this once from the score of each token that the completion contains; 0: none."""
    stop: tuple[str, ...] = ()
    """The first token after which the text of the completion contains one of these strings is the last token."""

    @classmethod
    def of(cls, rollout: Rollout) -> "Sampling":
        """Return the parameters of a run."""
        return cls(
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            repetition_penalty=rollout.repetition_penalty,
            frequency_penalty=rollout.frequency_penalty,
            presence_penalty=rollout.presence_penalty,
            stop=tuple(rollout.stop),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSegment:
    """Consecutive tokens that one version generated."""

    lineage: Lineage
    version: Version
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])
    """Typed columns (``[[column]]``) of these tokens, one value a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A trajectory to generate. The caller chooses ``id``, which is unique among the requests in progress."""

    id: int
    prompt_ids: NDArray[np.int32]
    sampling: Sampling
    seed: int = 0
    """Determines every draw: equal seeds and logits give equal tokens, regardless of the rest of the batch."""
    prefix: tuple[TokenSegment, ...] = ()
    """Tokens generated earlier (partial rollout). They count against ``max_new_tokens`` and are part of the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """A finished request. A sampled stop token, or the token that completed a stop string, is the last token."""

    id: int
    segments: tuple[TokenSegment, ...]
    """In order of generation; versions never decrease."""
    finish: Finish
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Typed columns (``[[column]]``) with one value a sample: an array, a number or bytes."""

    @property
    def token_ids(self) -> NDArray[np.int32]:
        return prefix_tokens(self.segments)[0]

    @property
    def logprobs(self) -> NDArray[np.float32]:
        return prefix_tokens(self.segments)[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Current counts, except ``generated_tokens``, ``steps``, ``preemptions`` and ``paused_s``, which are totals since
    the engine was created."""

    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    """Fraction of the KV cache in use, 0 to 1."""
    kv_tokens: int = 0
    """Number of tokens in the KV cache."""
    kv_capacity: int = 0
    """Capacity of the KV cache in tokens."""
    slots: int = 0
    """Maximum number of requests decoded concurrently."""
    generated_tokens: int = 0
    """Total since the engine was created."""
    steps: int = 0
    """Total number of decode steps since the engine was created."""
    preemptions: int = 0
    """Total number of times that a running request lost its KV cache to others and had to be read again."""
    paused_s: float = 0.0
    """Total seconds in which decoding stood still to load weights."""


class Engine(Protocol):
    """Continuous batching, one decode step at a time. Not thread-safe: an engine has one owner."""

    joining: bool
    """While False, no queued request starts; running requests continue."""

    def submit(self, request: Request) -> None:
        """Queue a request, which joins the batch at a later step. Raise ``RequestError`` if it can never be served."""
        ...

    def step(self) -> list[Trajectory]:
        """Admit queued requests, generate one token for each running request, and return the finished trajectories."""
        ...

    def interrupt(self, request: int) -> None:
        """Finish a request with its tokens so far, at least one. A later step returns it, marked INTERRUPTED."""
        ...

    def withdraw(self, request: int) -> Request | None:
        """Remove a queued request and return it with its tokens as prefix; return None if it runs or has finished."""
        ...

    def abort(self, request: int) -> None:
        """Discard a request and its tokens. Unknown ids are ignored, since the request may have just finished."""
        ...

    def load(self, tensors: Mapping[str, NDArray[np.generic]], lineage: Lineage, version: Version) -> None:
        """Load these weights. Running requests continue in a new segment over their existing KV cache.

        An engine that can recompute may be configured to rebuild the cache with the new weights instead.

        bfloat16 and float16 arrive as their bits in uint16. After a ``LoadError`` the old weights are unchanged.
        """
        ...

    def stats(self) -> EngineStats: ...


class AsyncEngine(Protocol):
    """The same contract for an engine that runs its own loop."""

    failure: "asyncio.Future[None]"
    """Set to the exception that ended the engine, if it fails."""

    async def generate(self, request: Request) -> Trajectory:
        """Return the finished trajectory. Raise ``asyncio.CancelledError`` if it was aborted."""
        ...

    def interrupt(self, request: int, least: int = 1) -> None:
        """Finish a request with its tokens so far. With ``least`` 0, a queued request ends at once."""
        ...

    def abort(self, request: int) -> None: ...

    async def load(self, tensors: Mapping[str, NDArray[np.generic]], lineage: Lineage, version: Version) -> None: ...

    def stats(self) -> EngineStats: ...

    def busy_s(self) -> float:
        """Return the seconds with at least one running request, since the engine was created."""
        ...

    def tokens_per_s(self) -> float:
        """Return the generation rate over the last few seconds."""
        ...

    def stuck_s(self) -> float:
        """Return the duration of the current step in seconds, 0 between steps. It exposes an engine that hangs."""
        ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class VersionMarks:
    """Start positions of the versions that generated a growing trajectory."""

    marks: list[tuple[Lineage, Version, int]] = field(default_factory=list[tuple[Lineage, Version, int]])

    def turn(self, lineage: Lineage, version: Version, written: int) -> None:
        """Attribute the tokens from number ``written`` on to this version."""
        if self.marks and self.marks[-1][2] == written:
            self.marks.pop()
        if not self.marks or self.marks[-1][:2] != (lineage, version):
            self.marks.append((lineage, version, written))

    def cut(
        self,
        token_ids: NDArray[np.int32],
        logprobs: NDArray[np.float32],
        columns: Mapping[str, NDArray[Any]] | None = None,
    ) -> tuple[TokenSegment, ...]:
        """Return the segments of a trajectory as copies. Tokens before the first mark belong to no segment.

        The trajectory may have been cut: marks behind its end are ignored. ``columns``: its typed columns, with one
        value a token.
        """
        ends = [start for _, _, start in self.marks[1:]] + [len(token_ids)] * bool(self.marks)
        return tuple(
            TokenSegment(
                lineage=lineage,
                version=version,
                token_ids=token_ids[start:end].copy(),
                logprobs=logprobs[start:end].copy(),
                columns={name: column[start:end].copy() for name, column in (columns or {}).items()},
            )
            for (lineage, version, start), end in zip(self.marks, ends, strict=True)
            if min(end, len(token_ids)) > start
        )


def prefix_tokens(prefix: Sequence[TokenSegment]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Concatenate the tokens and log-probabilities of the segments."""
    if not prefix:
        return np.empty(0, np.int32), np.empty(0, np.float32)
    return np.concatenate([s.token_ids for s in prefix]), np.concatenate([s.logprobs for s in prefix])


def check_request(request: Request, context: int, vocabulary: int) -> None:
    """Raise ``RequestError`` if a model of ``context`` tokens and ``vocabulary`` ids can never serve the request."""
    prompt = request.prompt_ids
    written = sum(len(segment.token_ids) for segment in request.prefix)
    check_sampling(request.sampling)
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


def check_sampling(sampling: Sampling) -> None:
    """Raise ``RequestError`` for the first parameter out of its range."""
    for name, value, valid, allowed in (
        ("max_new_tokens", sampling.max_new_tokens, sampling.max_new_tokens >= 1, "at least 1"),
        ("temperature", sampling.temperature, 0 <= sampling.temperature < math.inf, "at least 0"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "above 0 and at most 1"),
        ("top_k", sampling.top_k, sampling.top_k >= 0, "at least 0"),
        ("min_p", sampling.min_p, 0 <= sampling.min_p <= 1, "from 0 to 1"),
        ("repetition_penalty", sampling.repetition_penalty, 0 < sampling.repetition_penalty < math.inf, "above 0"),
        ("frequency_penalty", sampling.frequency_penalty, -2 <= sampling.frequency_penalty <= 2, "from -2 to 2"),
        ("presence_penalty", sampling.presence_penalty, -2 <= sampling.presence_penalty <= 2, "from -2 to 2"),
        ("stop", list(sampling.stop), all(sampling.stop), "without empty strings"),
    ):
        if not valid:
            raise RequestError(f"{name} is {value}; it must be {allowed}")
