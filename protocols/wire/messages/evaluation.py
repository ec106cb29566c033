"""Messages of evaluations: the command that starts one, and its results."""

import msgspec

from staleflow.protocols.wire.messages.base import Count, Part


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
