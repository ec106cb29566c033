"""A version that several ranks wrote is verified span by span and reads like any other."""

from itertools import pairwise

import numpy as np
import pytest

from staleflow.clients.weights import Puller
from staleflow.net.client import Client
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import Lineage, TrainerTerm, Version, WorkerId
from staleflow.protocols.wire.manifest import digest, lay_out
from staleflow.protocols.wire.messages import (
    BeginPublish,
    BeginPublishReply,
    CommitPublish,
    Done,
    GetManifest,
    Manifest,
    ManifestReply,
    PublishChunk,
    RegisterVersionReply,
    WrittenSpan,
)
from staleflow.protocols.wire.tensors import Array
from tests.servers.parameters.test_service import files, versions
from tests.servers.running import Run, Trainer

WEIGHTS: dict[str, Array] = {
    "a": np.arange(100, dtype=np.float32),
    "none": np.zeros((0, 4), np.float32),
    "b": np.arange(700_000, dtype=np.uint16).reshape(7, -1),
}


def laid_out(*, digests: bool) -> Manifest:
    return lay_out(
        (name, "bfloat16" if name == "b" else "float32", array.shape, digest(array.tobytes()) if digests else "")
        for name, array in WEIGHTS.items()
    )


PLACES, WHOLE = laid_out(digests=False), laid_out(digests=True)
CUTS = {"a": (0, 132, 400), "none": (0,), "b": (0, 600_000, 600_002, 1_400_000)}
"""Borders of the spans within each tensor."""


def parts() -> list[tuple[int, bytes]]:
    """Offset and bytes of each span, the last ones first."""
    every: list[tuple[int, bytes]] = []
    for entry in PLACES.tensors:
        data, cuts = WEIGHTS[entry.name].tobytes(), CUTS[entry.name]
        every += [(entry.offset + start, data[start:end]) for start, end in pairwise(cuts)]
    return every[::-1]


def spans() -> list[WrittenSpan]:
    return [WrittenSpan(offset=offset, nbytes=len(data), digest=digest(data)) for offset, data in parts()]


async def sent(run: Run, trainer: Trainer) -> tuple[Client, int]:
    """Send every byte of version 0, each span by a connection of its own; return rank 0's and the upload's number."""
    client = run.client(run.where.parameters, trainer.worker)
    begin = BeginPublish(
        trainer_term=TrainerTerm(trainer.joined.trainer_term),
        lineage=Lineage(0),
        version=Version(0),
        batch=None,
        nbytes=PLACES.nbytes,
    )
    to = await client.ask(begin, BeginPublishReply)
    for number, (offset, data) in enumerate(parts()):
        rank = run.client(run.where.parameters, WorkerId(f"trainer-rank-{number}.1"))
        await rank.ask(PublishChunk(upload=to.upload, offset=offset), Done, [data])
    return client, to.upload


async def test_a_version_of_spans_has_the_manifest_and_the_bytes_of_any_other(run: Run) -> None:
    client, upload = await sent(run, await run.trainer())
    commit = CommitPublish(upload=upload, manifest=PLACES, spans=spans())
    published = RegisterVersionReply(lineage=Lineage(0), version=Version(0))
    assert await client.ask(commit, RegisterVersionReply) == published
    assert await client.ask(commit, RegisterVersionReply) == published, "a repeated commit has the same outcome"
    reader = WorkerId("reader.1")
    ask = GetManifest(worker=reader, lineage=Lineage(0), version=Version(0))
    assert (await run.client(run.where.parameters, reader).ask(ask, ManifestReply)).manifest == WHOLE
    puller = Puller(run.where.parameters, worker=reader)
    async with await puller.pull(Lineage(0), Version(0)) as pulled:
        assert {name: array.tobytes() for name, array in pulled.arrays().items()} == {
            name: array.tobytes() for name, array in WEIGHTS.items()
        }
    puller.close()


async def test_a_version_of_spans_that_the_run_has_already_is_answered_the_same(run: Run) -> None:
    trainer = await run.trainer()
    first = await trainer.publish(0, WEIGHTS)
    client, upload = await sent(run, trainer)
    commit = CommitPublish(upload=upload, manifest=PLACES, spans=spans())
    assert await client.ask(commit, RegisterVersionReply) == first
    assert files(run) == {"0-0.bin", "0-0.json"}


async def test_another_commit_of_the_same_upload_is_a_conflict(run: Run) -> None:
    client, upload = await sent(run, await run.trainer())
    await client.ask(CommitPublish(upload=upload, manifest=PLACES, spans=spans()), RegisterVersionReply)
    with pytest.raises(Refused, match="already committed with another manifest") as no:
        await client.call(CommitPublish(upload=upload, manifest=PLACES, spans=spans()[::-1]))
    assert no.value.code is Code.CONFLICT


async def test_a_missing_or_doubled_span_is_refused_and_the_upload_can_be_committed_with_all(run: Run) -> None:
    client, upload = await sent(run, await run.trainer())
    for wrong, reason in (
        (spans()[:-1], "tensor 'a': bytes 0 to 132 of 400 are in no span"),
        ([*spans(), spans()[1]], "tensor 'b': bytes 600000 to 600002 of 1400000 are in two spans"),
        ([], "tensor 'a': bytes 0 to 400 of 400 are in no span"),
    ):
        with pytest.raises(Refused, match=reason) as no:
            await client.call(CommitPublish(upload=upload, manifest=PLACES, spans=wrong))
        assert no.value.code is Code.MALFORMED
        assert await versions(run) == {}
    await client.ask(CommitPublish(upload=upload, manifest=PLACES, spans=spans()), RegisterVersionReply)
    assert (await versions(run))[0]["sha"] == WHOLE.sha


@pytest.mark.parametrize("number", range(5))
async def test_a_span_of_other_bytes_is_never_visible(run: Run, number: int) -> None:
    client, upload = await sent(run, await run.trainer())
    offset, data = parts()[number]
    await client.ask(PublishChunk(upload=upload, offset=offset + len(data) - 1), Done, [bytes([data[-1] ^ 1])])
    (entry,) = (entry for entry in PLACES.tensors if 0 <= offset - entry.offset < entry.nbytes)
    start = offset - entry.offset
    reason = f"bytes {start} to {start + len(data)} of tensor {entry.name} in .* do not match their digest; begin again"
    with pytest.raises(Refused, match=reason) as no:
        await client.call(CommitPublish(upload=upload, manifest=PLACES, spans=spans()))
    assert no.value.code is Code.STALE
    assert (await versions(run), files(run)) == ({}, set())
