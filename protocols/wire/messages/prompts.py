"""Messages to the scheduler: features of the next prompts, from trajectory servers."""

from staleflow.protocols.wire.messages.base import Message, TensorSpec

FEATURES = 32
"""Number of features of one prompt."""


class PromptFeatures(Message, frozen=True, kw_only=True):
    """A shard sends the requested features and waits for the next request. -> PromptFeaturesReply, within ``wait_ms``

    ``frames`` names one frame, ``features``, float16 [len(rows), FEATURES]; no frame if ``rows`` is empty.
    """

    shard: int
    rows: list[int]
    frames: list[TensorSpec]
    wait_ms: int = 10_000


class PromptFeaturesReply(Message, frozen=True, kw_only=True):
    """Prompt rows whose features the shard must send next; may be empty."""

    rows: list[int]
