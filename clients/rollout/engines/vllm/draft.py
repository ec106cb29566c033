# pyright: basic, reportMissingImports=false
"""One trajectory while vLLM generates it, in one or more attempts; an attempt is one request to vLLM.

A later attempt reads the prompt and the tokens so far. It uses another seed than the earlier attempt: reusing the seed
from its start would make the next tokens depend on the existing ones. With a frequency or presence penalty it starts
over, as vLLM counts only the tokens of its own output.
"""

import asyncio
from typing import Any

import numpy as np

from staleflow.clients.rollout.engines.base import EngineError, Request, Trajectory, VersionMarks, prefix_tokens
from staleflow.clients.rollout.engines.stop_strings import StopStrings
from staleflow.clients.texts import Decode
from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.trajectory import Finish

FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.INTERRUPTED}
GOLDEN = 0x9E3779B97F4A7C15


class Draft:
    """Tokens, log-probabilities and versions of a request so far."""

    def __init__(self, request: Request, context: int, decode: Decode) -> None:
        token_ids, logprobs = prefix_tokens(request.prefix)
        self._stop_strings = StopStrings(request.sampling.stop, decode)
        self.request = request
        self.limit = min(request.sampling.max_new_tokens, context - len(request.prompt_ids))
        self.token_ids: list[int] = token_ids.tolist()
        self.logprobs: list[float] = logprobs.tolist()
        self.attempt_id = ""
        """vLLM's request id for the current attempt; empty before the first attempt."""
        self.cut = False
        """The draft must end with its tokens so far."""
        self.least = 1
        """Minimum number of tokens that the attempt must generate before a cut."""
        self.retry = False
        """The current attempt was aborted and another follows."""
        self.stopped_at = 0
        """Number of tokens up to the one that completed a stop string; 0 if none did. Later tokens are discarded."""
        self.task: asyncio.Task[Trajectory] | None = None
        self._attempt_start = len(self.token_ids)
        self._finish = Finish.INTERRUPTED
        self._marks = VersionMarks()
        start = 0
        for segment in request.prefix:
            self._marks.turn(segment.lineage, segment.version, start)
            start += len(segment.token_ids)

    @property
    def written_here(self) -> int:
        """Return the number of tokens received from the current attempt."""
        return len(self.token_ids) - self._attempt_start

    @property
    def enough(self) -> bool:
        """Return whether the draft may end now."""
        return self.written_here >= self.least

    def begin(self, attempt_id: str) -> None:
        """Start another attempt."""
        self.attempt_id = attempt_id
        if self.request.sampling.frequency_penalty or self.request.sampling.presence_penalty:
            self.token_ids.clear()
            self.logprobs.clear()
            self.stopped_at = 0
            self._marks = VersionMarks()
        self.retry = False
        self._attempt_start = len(self.token_ids)

    def token_ids_so_far(self) -> list[int]:
        """Return the token ids of prompt and completion."""
        return [*self.request.prompt_ids.tolist(), *self.token_ids]

    def room(self) -> int:
        """Return the maximum number of tokens still to generate; 1 if the draft must be cut as soon as allowed."""
        return 1 if self.cut else self.limit - len(self.token_ids)

    def seed(self) -> int:
        """Derive 63 bits from the request's seed and the current number of tokens, by splitmix64."""
        bits = (self.request.seed + (len(self.token_ids) + 1) * GOLDEN) & 0xFFFFFFFFFFFFFFFF
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        return (bits ^ (bits >> 31)) >> 1

    def take(self, completion: Any) -> None:
        """Append the attempt's next tokens; the last output also carries the version of each token."""
        checked, new = len(self.token_ids), list(completion.token_ids)
        logprobs = list(completion.logprobs.logprobs) if new else []
        if len(logprobs) != len(new):
            raise EngineError(f"vLLM gave {len(logprobs)} log-probabilities for {len(new)} tokens")
        self.token_ids += new
        self.logprobs += logprobs
        if new and not self.stopped_at:
            self.stopped_at = self._stop_strings.end(np.array(self.token_ids, np.int32), checked)
        if completion.finish_reason is not None:
            self._end(completion)

    def _end(self, completion: Any) -> None:
        if completion.finish_reason not in FINISHES:
            raise EngineError(f"vLLM ended a request with {completion.finish_reason!r}")
        self._finish = FINISHES[completion.finish_reason]
        if self._finish is Finish.LENGTH and len(self.token_ids) < self.limit:
            self._finish = Finish.INTERRUPTED
        if self.stopped_at:
            self._finish = Finish.STOP
        if self._finish is not Finish.INTERRUPTED or (self.cut and self.enough):
            self.retry = False  # the attempt finished before the abort took effect
        if self.written_here and completion.weight_versions is None:
            raise EngineError("vLLM did not report which weights generated a token")
        for span in completion.weight_versions or ():
            lineage, version = map(int, span.version.split("."))
            self._marks.turn(Lineage(lineage), Version(version), self._attempt_start + span.start)

    def trajectory(self) -> Trajectory:
        """Return the trajectory. Raise ``EngineError`` if a log-probability is not finite."""
        end = self.stopped_at or len(self.token_ids)
        logprobs = np.array(self.logprobs[:end], np.float32)
        if not np.isfinite(logprobs).all():
            raise EngineError("the model's scores are not finite; its weights are corrupt")
        segments = self._marks.cut(np.array(self.token_ids[:end], np.int32), logprobs)
        return Trajectory(id=self.request.id, segments=segments, finish=self._finish)
