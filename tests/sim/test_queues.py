"""Work waits for the work before it, on the scheduler's core and on each connection."""

import pytest

from staleflow.configs.costs import SchedulerCosts, WireCosts
from staleflow.net.endpoint import Call
from staleflow.protocols.consistency.ids import GroupId, LeaseId, WorkerId
from staleflow.protocols.wire.messages import (
    Done,
    GetStatus,
    InstanceStats,
    Operations,
    Ping,
    RegisterOccupy,
    Reply,
    Report,
)
from staleflow.sim.queues import Drains, Queue, WiredEndpoint
from staleflow.sim.timeline import Timeline


class Server:
    """A scheduler that replies to every call once its drain is over; ``replied`` has (name, second)."""

    def __init__(self, costs: SchedulerCosts | None, wire: WireCosts | None = None) -> None:
        self.timeline = Timeline()
        self.replied: list[tuple[str, float]] = []
        self.drains = Drains(self.timeline, costs, lambda call: call.reply(Done()))
        self.endpoint = WiredEndpoint(self.drains.receive, self.timeline, wire)

    def send(self, name: str, at_s: float = 0.0, *, nbytes: int = 0, operations: int = 0) -> None:
        body = (
            Operations(ops=[RegisterOccupy(group=GroupId(1), lease=LeaseId(1))] * operations) if operations else Ping()
        )
        frames = [memoryview(bytes(nbytes))] if nbytes else []

        def replied(_: Reply) -> None:
            self.replied.append((name, self.timeline.now_s))

        self.timeline.at(at_s, self.endpoint.call, name, body, replied, frames)

    def run(self) -> list[tuple[str, float]]:
        """Return (name, second) of each reply; seconds are rounded to a nanosecond."""
        self.timeline.run(lambda: False, self.drains.start)
        return [(name, round(second, 9)) for name, second in self.replied]


def test_calls_of_one_instant_are_one_drain() -> None:
    server = Server(SchedulerCosts(drain_s=0.5, message_s=0.1))
    server.send("a")
    server.send("b")
    assert server.run() == [("a", 0.7), ("b", 0.7)]


def test_reports_alone_commit_nothing() -> None:
    timeline, replied = Timeline(), list[float]()
    drains = Drains(timeline, SchedulerCosts(drain_s=0.5, message_s=0.1), lambda call: call.reply(Done()))
    endpoint = WiredEndpoint(drains.receive, timeline, None)
    report = Report(worker=WorkerId("rollout-0"), ack=0, held=[], stats=InstanceStats())
    endpoint.call("a", report, lambda _: replied.append(timeline.now_s))
    timeline.run(lambda: False, drains.start)
    assert replied == [pytest.approx(0.1)]


def test_a_call_waits_for_the_drain_before_it() -> None:
    server = Server(SchedulerCosts(drain_s=0.5, message_s=0.1))
    server.send("first")  # until 0.6
    server.send("second", 0.2)  # from 0.6 to 1.2
    server.send("late", 3.0)
    assert server.run() == [("first", 0.6), ("second", 1.2), ("late", 3.6)]
    assert server.drains.busy_s == pytest.approx(1.8)


def test_operations_cost_by_their_number_and_kinds_have_their_own_cost() -> None:
    server = Server(SchedulerCosts(message_s=0.1, messages={"Operations": 1.0}, operation_s=0.25))
    server.send("shard", operations=3)
    assert server.run() == [("shard", 1.75)]


def test_heartbeats_and_decisions_delay_calls_that_come_during_them() -> None:
    server = Server(SchedulerCosts(message_s=0.1, heartbeat_s=0.01, engine_s=0.02))
    server.timeline.at(1.0, server.drains.charge_second, 20, 10)  # 20 heartbeats, 10 engines: until 1.4
    server.send("during", 1.1)
    server.send("after", 2.0)
    assert server.run() == [("during", 1.5), ("after", 2.1)]


def test_without_costs_nothing_takes_time() -> None:
    for costs in (None, SchedulerCosts()):
        server = Server(costs, WireCosts())
        server.send("a", operations=3)
        server.send("b", 1.0, nbytes=1000)
        assert server.run() == [("a", 0.0), ("b", 1.0)]


def test_messages_of_one_connection_follow_each_other() -> None:
    mib_s = 0.25
    server = Server(None, WireCosts(latency_s=0.1, gib_s=1024 * mib_s))
    server.send("a", nbytes=4 << 20)  # leaves the sender at 1.0, arrives at 1.1; the reply takes 0.1
    server.send("a", 0.5)  # has no frames, but is behind the first
    server.send("b", 0.5)  # on a connection of its own
    assert server.run() == [("b", 0.7), ("a", 1.2), ("a", 1.2)]


def test_a_call_of_a_peer_that_left_is_not_handled() -> None:
    handled: list[Call] = []
    timeline = Timeline()
    drains = Drains(timeline, SchedulerCosts(message_s=1.0), handled.append)
    endpoint = WiredEndpoint(drains.receive, timeline, None)
    endpoint.call("gone", GetStatus(), lambda _: None)
    endpoint.call("here", GetStatus(), lambda _: None)
    timeline.at(0.5, endpoint.leave, "gone")
    timeline.run(lambda: False, drains.start)
    assert [call.peer for call in handled] == ["here"]


def test_a_queue_works_in_order() -> None:
    timeline, done = Timeline(), list[tuple[str, float]]()
    queue = Queue(timeline)

    def add(name: str, work_s: float, more_s: float = 0.0) -> None:
        queue.add(work_s, lambda: done.append((name, timeline.now_s)), more_s=more_s)

    add("free", 0.0)
    add("first", 2.0)
    add("second", 1.0, 10.0)
    timeline.at(4.0, add, "third", 1.0)
    timeline.run(lambda: False)
    assert done == [("free", 0.0), ("first", 2.0), ("third", 5.0), ("second", 13.0)]
