"""A manifest has exactly one valid layout, and every other one is rejected."""

import msgspec
import pytest

from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.manifest import ALIGNMENT, check, lay_out
from staleflow.protocols.wire.messages import Manifest

SHA = "ab" * 32
GOOD = lay_out([("w", "bfloat16", (3, 5), SHA), ("b", "float32", (), SHA), ("none", "int8", (0,), SHA)])


def test_tensors_follow_one_another_aligned() -> None:
    assert [(t.name, t.offset, t.nbytes) for t in GOOD.tensors] == [("w", 0, 30), ("b", 64, 4), ("none", 128, 0)]
    assert all(t.offset % ALIGNMENT == 0 for t in GOOD.tensors)
    assert GOOD.nbytes == 128
    check(GOOD)


def changed(**change: object) -> Manifest:
    return msgspec.structs.replace(GOOD, **change)


def with_first(**change: object) -> Manifest:
    return changed(tensors=[msgspec.structs.replace(GOOD.tensors[0], **change), *GOOD.tensors[1:]])


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (changed(tensors=[]), "at least one tensor"),
        (changed(tensors=[*GOOD.tensors, GOOD.tensors[0]]), "comes twice"),
        (with_first(dtype="float8"), "dtype 'float8' is not one of"),
        (with_first(shape=(-3, -5)), "negative extent"),
        (with_first(shape=(3, 6)), "offsets"),
        (with_first(offset=64), "offsets"),
        (with_first(nbytes=31), "offsets"),
        (changed(nbytes=1), "offsets"),
        (with_first(digest="cd" * 32), "sha256 of the manifest"),
        (changed(sha=SHA), "sha256 of the manifest"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(bad: Manifest, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        check(bad)
