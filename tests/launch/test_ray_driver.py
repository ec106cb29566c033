"""Ray's driver restarts machines, or gives up on them. A few lines of Python stand in for Ray here."""

import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from staleflow.launch import ray_machines
from staleflow.launch.placement import Place
from staleflow.launch.ray_machines import MOVING, NOT_STARTED, Driver, Fleet
from staleflow.supervisor.children import GAVE_UP, Restarts


class Actor:
    """An actor whose machine ends at once, with exit code ``ends``."""

    def __init__(self, ends: int | None) -> None:
        self._ends = ends
        self._code: int | None = NOT_STARTED
        self.starts = 0
        self.code = SimpleNamespace(remote=lambda: self._code)
        self.start = SimpleNamespace(remote=self._start)
        self.host = self.node = SimpleNamespace(remote=lambda: "here")

    def _start(self, _: list[str]) -> None:
        self.starts += 1
        self._code = self._ends


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A driver of one trainer machine and one rollout machine."""
    exceptions: Any = ModuleType("ray.exceptions")
    exceptions.RayActorError = ConnectionError
    monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)
    monkeypatch.setattr(ray_machines, "print_line", str)
    monkeypatch.setattr(Restarts, "FIRST_S", 1e-6)
    places = [Place(part=part, number=0, machines=1, gpus=0) for part in ("trainer", "rollout")]
    fleet = Fleet(name="run", address="", scheduler="tcp://10.0.0.1:1", port=1, bundles=[], places=places, key_files=[])
    ray = SimpleNamespace(get=same, util=SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1"))
    return Driver(fleet, ray)


def same(answer: Any) -> Any:
    return answer


def looks(driver: Driver, *actors: Actor) -> int | None:
    """Result of the driver with these machines."""
    driver._actors = list(actors)  # pyright: ignore[reportPrivateUsage]
    deadline = time.monotonic() + 60
    while (code := driver.poll()) is None and actors[0].starts < 20:
        assert time.monotonic() < deadline
    return code


@pytest.mark.parametrize("ends", [GAVE_UP, 137])
def test_a_machine_that_ends_again_and_again_ends_the_run(driver: Driver, ends: int) -> None:
    broken, good = Actor(ends), Actor(None)
    assert (looks(driver, broken, good), broken.starts, good.starts) == (2, 1 + Restarts.TRIES, 1)


@pytest.mark.parametrize(("ends", "code", "starts"), [(GAVE_UP, 2, 1 + Restarts.TRIES), (137, None, 20)])
def test_a_machine_that_ran_for_long_counts_anew_unless_it_gave_up(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, ends: int, code: int | None, starts: int
) -> None:
    monkeypatch.setattr(Restarts, "STABLE_S", 1e-9)
    machine = Actor(ends)
    assert (looks(driver, machine, Actor(None)), machine.starts) == (code, starts)


def test_a_machine_that_moves_is_started_at_once_as_often_as_it_must(driver: Driver) -> None:
    machine = Actor(MOVING)
    assert (looks(driver, machine, Actor(None)), machine.starts) == (None, 20)
