# pyright: basic, reportMissingImports=false
"""One trajectory while vLLM writes it, in one attempt or in several: an attempt is one request to vLLM.

A later attempt reads prompt and tokens so far, and its draws differ from those of the earlier one: with the same seed
from the start again, the tokens to come would depend on those that there are.
"""

import asyncio
from typing import Any

import numpy as np

from staleflow.clients.rollout.engines.base import EngineError, Marks, Request, Trajectory, prefix_tokens
from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.trajectory import Finish

FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.INTERRUPTED}
GOLDEN = 0x9E3779B97F4A7C15


class Draft:
    """Tokens, log-probabilities and versions of a request so far."""

    def __init__(self, request: Request, context: int) -> None:
        token_ids, logprobs = prefix_tokens(request.prefix)
        self.request = request
        self.limit = min(request.sampling.max_new_tokens, context - len(request.prompt_ids))
        self.token_ids: list[int] = token_ids.tolist()
        self.logprobs: list[float] = logprobs.tolist()
        self.name = ""
        """Of the attempt, for vLLM; empty before the first."""
        self.cut = False
        """It is to end with the tokens so far."""
        self.least = 1
        """Tokens that the attempt must have written by then."""
        self.again = False
        """The attempt was taken back; another follows."""
        self.task: asyncio.Task[Trajectory] | None = None
        self._begun = len(self.token_ids)
        self._finish = Finish.INTERRUPTED
        self._marks = Marks()
        start = 0
        for segment in request.prefix:
            self._marks.turn(segment.lineage, segment.version, start)
            start += len(segment.token_ids)

    @property
    def written_here(self) -> int:
        """Tokens that the attempt is known to have written."""
        return len(self.token_ids) - self._begun

    @property
    def enough(self) -> bool:
        """Whether it may end now."""
        return self.written_here >= self.least

    def begin(self, name: str) -> None:
        """Another attempt."""
        self.name = name
        self.again = False
        self._begun = len(self.token_ids)

    def token_ids_so_far(self) -> list[int]:
        """Prompt and completion."""
        return [*self.request.prompt_ids.tolist(), *self.token_ids]

    def room(self) -> int:
        """Tokens still to be written, at most. One, when it is to be cut as soon as it may be."""
        return 1 if self.cut else self.limit - len(self.token_ids)

    def seed(self) -> int:
        """63 bits of the request's seed and the number of tokens that there are: splitmix64."""
        bits = (self.request.seed + (len(self.token_ids) + 1) * GOLDEN) & 0xFFFFFFFFFFFFFFFF
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        return (bits ^ (bits >> 31)) >> 1

    def take(self, completion: Any) -> None:
        """The attempt's next tokens; with the last of them, which version wrote which."""
        new = list(completion.token_ids)
        logprobs = list(completion.logprobs.logprobs) if new else []
        if len(logprobs) != len(new):
            raise EngineError(f"vLLM gave {len(logprobs)} log-probabilities for {len(new)} tokens")
        self.token_ids += new
        self.logprobs += logprobs
        if completion.finish_reason is not None:
            self._end(completion)

    def _end(self, completion: Any) -> None:
        if completion.finish_reason not in FINISHES:
            raise EngineError(f"vLLM ended a request with {completion.finish_reason!r}")
        self._finish = FINISHES[completion.finish_reason]
        if self._finish is Finish.LENGTH and len(self.token_ids) < self.limit:
            self._finish = Finish.INTERRUPTED
        if self._finish is not Finish.INTERRUPTED or (self.cut and self.enough):
            self.again = False  # it ended before it could be taken back
        if self.written_here and completion.weight_versions is None:
            raise EngineError("vLLM did not say which weights wrote a token")
        for span in completion.weight_versions or ():
            lineage, version = map(int, span.version.split("."))
            self._marks.turn(Lineage(lineage), Version(version), self._begun + span.start)

    def trajectory(self) -> Trajectory:
        """What was written. ``EngineError`` for log-probabilities that are no numbers."""
        logprobs = np.array(self.logprobs, np.float32)
        if not np.isfinite(logprobs).all():
            raise EngineError("the model's scores are not finite: its weights are broken")
        segments = self._marks.cut(np.array(self.token_ids, np.int32), logprobs)
        return Trajectory(id=self.request.id, segments=segments, finish=self._finish)
