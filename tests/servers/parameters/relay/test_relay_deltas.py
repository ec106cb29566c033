"""Relays pass deltas on, and readers survive a relay that fails."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from staleflow.net import weights
from staleflow.net.errors import Refused, Unavailable
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.delta import apply
from staleflow.protocols.wire.messages import GetDelta, ManifestReply
from staleflow.servers.parameters.relay.arrivals import Arrivals
from staleflow.servers.parameters.service import ParameterService
from staleflow.servers.runner import Answer
from tests.servers.parameters.relay.growing import LARGE, RELAY_HOST, Grown, manifest_of, pulled, same
from tests.servers.running import GIVE_UP_S, eventually, produced

pytestmark = pytest.mark.usefixtures("hosts")


async def test_a_delta_of_a_tensor_is_given_before_the_whole_version_is_here(
    grown: Grown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "DELTA_MAX_BYTES_PER_S", float("inf"))
    held, serve = asyncio.Event(), ParameterService._make_delta  # pyright: ignore[reportPrivateUsage]
    nbytes = LARGE["first"].nbytes

    async def late(self: ParameterService, peer: str, ask: GetDelta, *stored: Any) -> Answer:
        if ask.offset >= nbytes:
            await held.wait()
        return await serve(self, peer, ask, *stored)

    monkeypatch.setattr(ParameterService, "_make_delta", late)
    await grown.grow("relay-0", mb_per_s=50.0)
    client = await grown.client("relay-0")
    await client.ask(manifest_of(0, host=RELAY_HOST), ManifestReply)  # the base is stored
    after = {name: array.copy() for name, array in LARGE.items()}
    after["first"][::10] += 1
    after["last"][::1000] ^= np.uint16(1)
    trainer = await grown.run.trainer()
    async with produced(grown.run):
        await trainer.publish(1, after, (await trainer.next_batch(0)).batch)
    await client.ask(manifest_of(1), ManifestReply)
    ask = GetDelta(
        lineage=Lineage(0),
        version=Version(1),
        base_lineage=Lineage(0),
        base_version=Version(0),
        offset=0,
        nbytes=nbytes,
        width=4,
    )
    _, frames = await client.call(ask, timeout_s=GIVE_UP_S)
    got = bytearray(LARGE["first"].tobytes())
    apply(frames[0], memoryview(got))
    assert got == after["first"].tobytes()
    assert not held.is_set()
    held.set()
    found = await client.ask(manifest_of(1, host=RELAY_HOST), ManifestReply)
    assert found.path, "the version is whole in the end"


async def test_a_relay_that_failed_keeps_no_pin(grown: Grown, monkeypatch: pytest.MonkeyPatch) -> None:
    await grown.grow("relay-0")
    asked = list[Any]()

    async def fails(*what: Any) -> bytes:
        asked.append(what)
        raise Refused(Code.BAD_VERSION, "not here")

    monkeypatch.setattr(Arrivals, "read", fails)
    same((await pulled(grown.reader()))[0])
    assert asked, "void: it was never asked"
    at = await grown.endpoint("relay-0")

    async def kept() -> bool:
        return bool((await grown.run.status(at))["versions"])

    await eventually(kept)
    (version,) = (await grown.run.status(at))["versions"]
    assert version["pinned_by"] == []


async def test_a_relay_that_was_not_there_is_not_asked_at_the_next_pull(
    grown: Grown, hosts: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    await grown.grow("relay-0")
    asked = list[str]()

    async def nowhere(relay: Any, *_: Any) -> None:
        asked.append(relay.address)
        raise Unavailable(relay.address, 5.0)

    monkeypatch.setattr("staleflow.clients.weights.pull.map_near", nowhere)
    reader = grown.reader()
    for _ in range(2):
        same((await pulled(reader))[0])
    assert asked == [await grown.endpoint("relay-0")]
