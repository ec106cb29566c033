"""One group is checked against the limits of a run: token ids of the model, lengths, and allowed columns."""

import re

import numpy as np
import pytest

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import ModelLimits
from staleflow.protocols.wire.payload_limits import PayloadLimits
from staleflow.protocols.wire.trajectory import GroupPayload


def group(*, prompt: int = 3, tokens: int = 4, highest: int = 9, read: int = 0, column: str = "") -> GroupPayload:
    """Two samples of ``tokens`` tokens, the first ``read`` of each written by the environment."""
    written = np.tile(np.arange(tokens) >= read, 2).astype(np.uint8)
    return GroupPayload(
        prompt_ids=np.zeros(prompt, np.int32),
        lengths=np.full(2, tokens, np.int32),
        token_ids=np.full(2 * tokens, highest, np.int32),
        logprobs=np.zeros(2 * tokens, np.float32),
        loss_mask=written,
        segments=np.array([[0, 0, 0, tokens], [1, 0, 0, tokens]], np.int64),
        finish=np.zeros(2, np.uint8),
        stages={column: np.zeros(2, np.float32)} if column else {},
    )


RUN = PayloadLimits(model=ModelLimits(vocabulary=10, context=7), sampled_tokens=4)
EPISODES = PayloadLimits(model=ModelLimits(vocabulary=10, context=9), sampled_tokens=4, environment=True)


@pytest.mark.parametrize(
    ("limits", "payload"),
    [
        (RUN, group()),
        (EPISODES, group(tokens=6, read=2, column="stage/environment/reward")),
        (PayloadLimits(), group(prompt=500, tokens=500, highest=2**31 - 1)),
    ],
)
def test_what_reaches_every_limit_exactly_is_taken(limits: PayloadLimits, payload: GroupPayload) -> None:
    payload.check()
    limits.check(payload)


@pytest.mark.parametrize(
    ("limits", "payload", "code", "says"),
    [
        (RUN, group(highest=10), Code.MALFORMED, "token_ids holds 10; the model's vocabulary has 10 tokens"),
        (RUN, group(prompt=0), Code.MALFORMED, "the prompt is empty"),
        (RUN, group(prompt=4), Code.OVERSIZE, "a sample has 8 tokens; the model's context is 7"),
        (RUN, group(tokens=5, prompt=1), Code.OVERSIZE, "a sample has 5 sampled tokens; the run allows 4"),
        (RUN, group(read=1), Code.MALFORMED, "loss_mask holds a 0"),
        (RUN, group(column="stage/environment/reward"), Code.MALFORMED, "it may have none without environment.run"),
        (EPISODES, group(column="stage/reward/reward"), Code.MALFORMED, "it may have only stage/environment/*"),
        (EPISODES, group(tokens=6, read=1), Code.OVERSIZE, "a sample has 5 sampled tokens; the run allows 4"),
    ],
)
def test_what_exceeds_a_limit_is_refused_by_name(
    limits: PayloadLimits, payload: GroupPayload, code: Code, says: str
) -> None:
    payload.check()
    with pytest.raises(ProtocolError, match=re.escape(says)) as no:
        limits.check(payload)
    assert no.value.code is code


def test_a_prompt_token_beyond_the_vocabulary_is_refused_too() -> None:
    payload = group()
    payload.prompt_ids[1] = 10
    with pytest.raises(ProtocolError, match="prompt_ids holds 10"):
        RUN.check(payload)
