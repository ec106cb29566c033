"""A push may carry an environment's columns, and no others."""

import numpy as np
import pytest

from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Segment, Version, WorkerId
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import PushItem
from staleflow.protocols.wire.payload_limits import PayloadLimits
from staleflow.protocols.wire.tensors import specs_and_frames
from staleflow.protocols.wire.trajectory import GroupPayload
from staleflow.servers.trajectories.records import Pushed, parse_push


def push(column: str) -> Pushed:
    """Two samples of two tokens; the first token of each comes from an environment."""
    payload = GroupPayload(
        prompt_ids=np.array([1], np.int32),
        lengths=np.array([2, 2], np.int32),
        token_ids=np.array([1, 2, 3, 4], np.int32),
        logprobs=np.array([0, -1, 0, -1], np.float32),
        loss_mask=np.array([0, 1, 0, 1], np.uint8),
        segments=np.array([[0, 0, 3, 2], [1, 0, 4, 2]], np.int64),
        finish=np.zeros(2, np.uint8),
        stages={column: np.array([0.5, 1.0], np.float32)},
    )
    specs, frames = specs_and_frames(payload.to_arrays())
    item = PushItem(group=GroupId(1), lease=LeaseId(1), worker=WorkerId("w.1"), truncated=False, frames=specs)
    return parse_push(item, frames, samples=2, limits=PayloadLimits(environment=True))


def test_what_an_environment_returned_is_stored_and_the_ledger_hears_of_sampled_tokens_only() -> None:
    record = push("stage/environment/reward").record
    assert record.segments == [Segment(Lineage(0), Version(3), 1), Segment(Lineage(0), Version(4), 1)]
    assert record.samples == [1, 1]
    assert record.tokens == 4


@pytest.mark.parametrize("column", ["stage/reward/reward", "stage/environments/reward"])
def test_a_push_does_not_bring_what_stages_make(column: str) -> None:
    with pytest.raises(
        ProtocolError, match=rf"a push has the stage columns {column}; it may have only stage/environment/\*"
    ):
        push(column)
