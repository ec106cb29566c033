"""Messages of evaluations: the commands that start and end one, and its results."""

import msgspec

from staleflow.protocols.consistency.ids import Lineage, Version, WorkerId
from staleflow.protocols.wire.messages.base import Count, Message, Part


class Evaluate(Message, frozen=True, kw_only=True):
    """Command: play these prompts of an evaluation set with exactly these weights, ordered by a ``Pull`` if needed.

    The worker loads no other weights until it has sent the scores of all prompts. The command replaces an evaluation in
    progress.
    """

    ticket: Count
    """Number of this command, never reused. Scores under an older one are refused."""
    set: str
    """Name of the set (``[[eval]]``)."""
    lineage: Lineage
    version: Version
    prompts: list[Count]
    """Numbers of the prompts in the set."""


class EndEvaluation(Message, frozen=True, kw_only=True):
    """Command: discard the evaluation with this ticket, which another worker plays, or none."""

    ticket: Count


class PromptScores(Part, frozen=True, kw_only=True):
    """Results of one prompt of an evaluation set."""

    prompt: Count
    """Number of the prompt in its set."""
    rewards: list[float]
    """Reward of each scored sample."""
    failed: Count = 0
    """Number of samples without a reward."""
    truncated: Count = 0
    """Number of scored samples that reached the maximum length."""
    lengths: list[Count] = msgspec.field(default_factory=list[int])
    """Number of sampled tokens of each scored sample."""
    numbers: dict[str, list[float]] = msgspec.field(default_factory=dict[str, list[float]])
    """Other numbers of each scored sample: ``reward/NAME``, ``environment/NAME``, ``stage/STAGE/COLUMN``."""


class PutScores(Message, frozen=True, kw_only=True):
    """Scores of prompts of an evaluation, as they finish. -> Done, or Refusal ``stale_lease`` if it is over

    Repeated scores of a prompt have no effect.
    """

    worker: WorkerId
    ticket: Count
    scores: list[PromptScores]
    """Prompts that have finished since the last message."""
    failure: str = ""
    """Reason why the worker cannot play the other prompts; empty if it can."""
