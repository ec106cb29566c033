"""A run whose relays and readers appear to be on other hosts."""

from collections.abc import AsyncIterator, Callable

import pytest

from staleflow.clients.weights import mapped, relays
from staleflow.net import weights
from staleflow.servers.parameters import tree
from staleflow.servers.parameters.relay import service as relay
from tests.servers.parameters.relay.growing import FAR, LARGE, RELAY_HOST, Grown
from tests.servers.running import Run


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put the parameter server on this host, relays on a second and readers on a third, unless a test moves them."""
    monkeypatch.setattr(weights, "CHUNK_BYTES", 50_000)
    monkeypatch.setattr(weights, "SPAN_BYTES", 50_000)
    monkeypatch.setattr(relay, "JOIN_INTERVAL_S", 0.05)
    monkeypatch.setattr(relay, "MAPPED_TIMEOUT_S", 60.0)  # these tests send each request once; a client would retry
    monkeypatch.setattr(relay, "boot_id", lambda: RELAY_HOST)
    monkeypatch.setattr(tree, "is_loopback", str.isspace)  # always False: relays are reachable from everywhere
    monkeypatch.setattr(tree, "ROOT_READERS", 0)

    def readers_on(host: str) -> None:
        monkeypatch.setattr(mapped, "boot_id", lambda: host)
        monkeypatch.setattr(relays, "boot_id", lambda: host)

    readers_on(FAR)
    return readers_on


@pytest.fixture
async def grown(run: Run) -> AsyncIterator[Grown]:
    """A run with a published version 0."""
    trainer = await run.trainer()
    await trainer.publish(0, LARGE)
    grown = Grown(run)
    yield grown
    for name in list(grown.stops):
        await grown.end(name)
