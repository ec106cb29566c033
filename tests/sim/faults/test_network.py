"""Calls of the shipped endpoint and client survive every fault that the simulated network applies to messages."""

import asyncio
import random
from collections.abc import Callable

from staleflow.net.client import Client
from staleflow.net.endpoint import Call, Endpoint
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import Done, GetStatus
from staleflow.sim.faults.network import Network, Weather
from staleflow.sim.virtual import BEGIN_S, Conductor, Process

ADDRESS = "tcp://127.0.0.1:7000"
CALLS = 40


class Place:
    """A server that replies to every call, and a client that makes ``CALLS`` of them, a tenth of a second apart."""

    def __init__(self) -> None:
        self.conductor = Conductor()
        self.network = Network(self.conductor, random.Random(1))
        self.calls = 0
        self.answered: list[float] = []
        self.server = self._spawn("server", self._serve)
        self.client = self._spawn("client", self._ask)

    def _spawn(self, name: str, main: "Callable[[Process], asyncio.Future[None] | object]") -> Process:
        async def run() -> None:
            await main(process)  # type: ignore[misc]

        process = self.conductor.spawn(name, run)
        return process

    async def _serve(self, process: Process) -> None:
        await Endpoint(ADDRESS, on_call=self._on_call, transport=self.network.transport(process)).serve()

    def _on_call(self, call: Call) -> None:
        self.calls += 1
        call.reply(Done())

    async def _ask(self, process: Process) -> None:
        client = Client(ADDRESS, worker=WorkerId("c.1"), transport=self.network.transport(process))
        for _ in range(CALLS):
            await client.ask(GetStatus(), Done, timeout_s=None)
            self.answered.append(self.conductor.now_s - BEGIN_S)
            await asyncio.sleep(0.1)
        client.close()

    def restart_server(self) -> None:
        self.conductor.kill(self.server)
        self.server = self._spawn("server", self._serve)

    def run(self) -> int:
        """Run until every call has its reply, for two minutes at most; return the number of replies."""
        self.conductor.run(lambda: not self.client.alive or self.conductor.now_s > BEGIN_S + 120)
        self.conductor.close()
        return len(self.answered)


def test_a_calm_network_brings_every_call_once() -> None:
    place = Place()
    assert (place.run(), place.calls) == (CALLS, CALLS)
    assert place.answered[-1] < 6


def test_calls_survive_loss_doubles_and_overtaking() -> None:
    place = Place()
    place.network.weather = Weather(loss=0.3, double=0.3, reorder=0.3, delay_s=0.05)
    assert place.run() == CALLS
    counts = place.network.counts
    assert place.calls > CALLS  # duplicated and repeated requests: an endpoint replies to each
    assert [name for name in ("lost", "doubled", "reordered") if counts[name] < 5] == []


def test_a_partition_holds_calls_up_and_its_end_lets_them_go() -> None:
    place = Place()
    place.conductor.after(1.0, place.network.weather.cut.add, ("server", "client"))
    place.conductor.after(21.0, place.network.weather.cut.clear)
    assert place.run() == CALLS
    assert [at_s for at_s in place.answered if 1.1 < at_s < 21.0] == []
    assert place.network.counts["cut"] > 0


def test_a_client_finds_its_server_again_after_a_restart_and_a_lost_connection() -> None:
    place = Place()
    place.conductor.after(1.0, place.restart_server)
    place.conductor.after(2.0, place.network.disconnect, "client")
    assert place.run() == CALLS
    assert place.network.counts["disconnected"] == 1
