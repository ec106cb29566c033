"""To the scheduler: what trajectory servers tell of the prompts that come next."""

from staleflow.protocols.wire.messages.base import Message, TensorSpec

FEATURES = 32
"""Numbers that describe one prompt."""


class PromptFeatures(Message, frozen=True, kw_only=True):
    """A shard brings what it was asked for, and waits to be asked again. -> PromptFeaturesReply, within ``wait_ms``

    ``frames`` names one frame, float16 [len(rows), FEATURES] called ``features``; no frame when there are no rows.
    """

    shard: int
    rows: list[int]
    frames: list[TensorSpec]
    wait_ms: int = 10_000


class PromptFeaturesReply(Message, frozen=True, kw_only=True):
    """Describe these prompt rows next; perhaps none."""

    rows: list[int]
