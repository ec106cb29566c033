"""Typed columns of an engine stay aligned with its tokens, also when another instance continues the samples."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from staleflow.clients.rollout.engines.base import ColumnError, TokenSegment, Trajectory
from staleflow.clients.rollout.groups import payload, trajectories
from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.payload_limits import PayloadLimits
from staleflow.protocols.wire.tensors import pack, unpack
from staleflow.protocols.wire.trajectory import Finish, GroupPayload
from staleflow.protocols.wire.typed_columns import TypedColumn

PROMPT = np.array([5, 6, 7], np.int32)
DECLARED = (
    TypedColumn(name="experts", per="token", dtype="int32", shape=(2,)),
    TypedColumn(name="image", per="sample", dtype="bytes"),
)


def segment(version: int, *tokens: int) -> TokenSegment:
    """Tokens whose experts are [token, version]."""
    experts = np.array([[token, version] for token in tokens], np.int32)
    return TokenSegment(
        lineage=Lineage(0),
        version=Version(version),
        token_ids=np.array(tokens, np.int32),
        logprobs=np.full(len(tokens), -1.0, np.float32),
        columns={"experts": experts},
    )


def moved(samples: list[Trajectory]) -> list[Trajectory]:
    """Return the samples as the next instance receives them."""
    group = payload(PROMPT, samples, DECLARED, unfinished=True)
    received = GroupPayload.from_arrays(unpack(pack(group.to_arrays())))
    PayloadLimits(columns=DECLARED).check(received)
    return trajectories(received, DECLARED)


def test_columns_of_continued_samples_belong_to_their_tokens() -> None:
    done = Trajectory(id=0, segments=(segment(1, 10, 11),), finish=Finish.STOP, columns={"image": b"done"})
    begun = Trajectory(id=1, segments=(segment(1, 20), segment(2, 21, 22)), finish=Finish.INTERRUPTED)
    untouched = Trajectory(id=2, segments=(), finish=Finish.INTERRUPTED)
    first, second, third = moved([done, begun, untouched])
    assert first.columns == {"image": b"done"}
    continued = [
        first,
        replace(second, segments=(*second.segments, segment(3, 23)), finish=Finish.STOP, columns={"image": b"2"}),
        replace(third, segments=(segment(3, 30),), finish=Finish.LENGTH, columns={"image": b""}),
    ]
    group = payload(PROMPT, continued, DECLARED)
    PayloadLimits(columns=DECLARED).check(group)
    assert group.columns["token/experts"][:, 0].tolist() == group.token_ids.tolist()
    assert group.columns["token/experts"][:, 1].tolist() == group.token_versions().tolist()
    assert DECLARED[1].split(group.columns, ()) == [b"done", b"2", b""]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"columns": {}}, r"sample 0 lacks the column image \(bytes, one a sample\)"),
        ({"columns": {"image": "text"}}, "sample 0: column image: it must be bytes, got str"),
        ({"columns": {"image": b"", "other": 1}}, "the run has no column 'other'; it has experts, image"),
        ({"segments": (replace(segment(1, 1, 2), columns={}), segment(2, 3))}, r"int32\[3, 2\].*got int32\[1, 2\]"),
    ],
)
def test_a_group_with_wrong_columns_of_an_engine_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    good = Trajectory(id=0, segments=(segment(1, 10),), finish=Finish.STOP, columns={"image": b""})
    payload(PROMPT, [good], DECLARED)
    with pytest.raises(ColumnError, match=says):
        payload(PROMPT, [replace(good, **changes)], DECLARED)


def test_columns_can_be_left_out() -> None:
    """Evaluations have none, whatever the engine makes."""
    sample = Trajectory(id=0, segments=(segment(1, 10),), finish=Finish.STOP, columns={"image": b""})
    assert payload(PROMPT, [sample], None).columns == {}
