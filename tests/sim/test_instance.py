"""The shipped worker, in a simulated run, ends in the ways that its trace reports."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from staleflow.clients.rollout.session import STUCK_TIMEOUT_S, LeaseSession
from staleflow.configs.simulation import Occurrence
from staleflow.net.endpoint import Call
from staleflow.net.errors import Refused
from staleflow.net.memory_transport import MemoryEndpoint
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import Attach, Report
from staleflow.sim.book import Book, SimRecipe
from staleflow.sim.cost import StepCost
from staleflow.sim.engine import SimEngine
from staleflow.sim.instance import Peers, SimInstance
from staleflow.sim.simulate import simulate
from staleflow.sim.virtual import Conductor
from staleflow.sim.workload import Workload
from staleflow.sim.world import TICK_INTERVAL_S
from staleflow.trace.reader import read_events
from tests.sim.configs import config


def events(*happen: tuple[float, int, str]) -> list[Occurrence]:
    return [Occurrence(at_s=at_s, engine=engine, what=what) for at_s, engine, what in happen]  # type: ignore[arg-type]


def left(run_dir: Path) -> list[tuple[str, str]]:
    """(worker, reason) of each rollout worker that detached."""
    found = [event for event in read_events(run_dir / "trace.jsonl") if event["ev"] == "detach"]
    return [(event["worker"], event["why"]) for event in found if event["role"] == "rollout"]


class Alone:
    """One instance; the test takes the place of its scheduler."""

    def __init__(self, on_call: Callable[[Call], None]) -> None:
        self.conductor = Conductor(0.0)
        self.errors: list[BaseException] = []
        workload = Workload(config())
        peers = Peers(
            scheduler=MemoryEndpoint(on_call, self.conductor.soon),
            shards=[],
            recipe=SimRecipe.with_book(config(), Book(workload)),
            load_s=0.0,
            report_s=1.0,
            failed=self.errors.append,
        )
        engine = SimEngine(self.conductor, StepCost(k1=0.0, k2=1.0, k3=0.0, k4=0.0), slots=8)
        self.instance = SimInstance(WorkerId("rollout-0.0"), "rollout-0", engine, self.conductor, peers, pull_s=0.0)

    def until(self, time_s: float) -> None:
        self.conductor.at(time_s, lambda: None)
        self.conductor.run(lambda: self.conductor.now_s >= time_s)


def test_a_worker_leaves_crashes_or_drains_and_the_trace_tells_which(tmp_path: Path) -> None:
    given = config(steps=20, train_s=0.1, engines=3, events=events((3.0, 0, "leave"), (4.0, 1, "crash")))
    simulate(given, run_dir=tmp_path)
    assert left(tmp_path) == [("rollout-0.0", "leaves"), ("rollout-1.1", "silent"), ("rollout-2.2", "drained")]


def test_a_worker_whose_engine_hangs_falls_silent_by_itself_and_loses_its_leases(tmp_path: Path) -> None:
    given = config(steps=30, train_s=0.1, lease_s=5.0, events=events((5.0, 0, "hang"), (20.0, 0, "return")))
    simulate(given, run_dir=tmp_path)
    found = list(read_events(tmp_path / "trace.jsonl"))
    holder = {one["lease"]: one["worker"] for one in found if one["ev"] == "reserve"}
    ends = [one for one in found if one["ev"] == "release" and one["why"] == "expired"]
    assert {holder[one["lease"]] for one in ends} == {"rollout-0.0"}
    first_s = (ends[0]["t"] - found[0]["t"]) / 1e9
    # for leases that are renewed at the moment when the engine starts to hang
    expires_s = 5.0 + given.scheduler.lease_s
    assert expires_s <= first_s <= expires_s + STUCK_TIMEOUT_S + 2 * TICK_INTERVAL_S


def test_the_error_of_a_worker_ends_the_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: LeaseSession, *given: Any) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(LeaseSession, "_command", broken)
    with pytest.raises(ZeroDivisionError, match="planted"):
        simulate(config(), run_dir=tmp_path)


def test_a_scheduler_that_refuses_a_worker_ends_it() -> None:
    alone = Alone(lambda call: call.refuse(Code.DENIED, "not here"))
    alone.until(1.0)
    assert [type(error) for error in alone.errors] == [Refused]
    alone.conductor.close()


def test_a_crash_before_the_answer_to_the_first_request_leaves_nothing_to_do() -> None:
    calls: list[Call] = []
    alone = Alone(calls.append)
    alone.until(1.0)
    alone.instance.crash()
    alone.until(20.0)
    assert [type(call.body) for call in calls] == [Attach]
    assert (alone.errors, alone.instance.ended_s) == ([], 1.0)
    alone.conductor.close()


@pytest.mark.parametrize("report_s", [0.5, 4.0])
def test_reports_wait_as_long_as_the_configuration_says(
    report_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: set[int] = set()
    request = MemoryEndpoint.request

    def noted(self: MemoryEndpoint, name: str, body: Any, *given: Any) -> None:
        if isinstance(body, Report):
            waits.add(body.wait_ms)
        request(self, name, body, *given)

    monkeypatch.setattr(MemoryEndpoint, "request", noted)
    simulate(config(report_s=report_s), run_dir=tmp_path)
    assert waits == {round(report_s * 1000)}
