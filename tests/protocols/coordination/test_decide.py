"""One cycle: loads first, and nobody starts on weights that are about to change."""

import time

import msgspec

from staleflow.protocols.consistency.ids import Lineage, Version, WorkerId
from staleflow.protocols.coordination.decide import decide
from staleflow.protocols.coordination.sync import MOST_AT_ONCE
from staleflow.protocols.coordination.view import Instance, Load, Snapshot, Start

FRESH = Instance(
    worker=WorkerId("a"),
    lineage=Lineage(0),
    version=Version(3),
    usable=True,
    behind=False,
    pulling=False,
    held=0,
    capacity=2,
)
BEHIND = msgspec.structs.replace(FRESH, worker=WorkerId("b"), version=Version(2), behind=True)


def snapshot(*instances: Instance, version: int = 3) -> Snapshot:
    room = {Version(2): 10, Version(3): 10}
    return Snapshot(lineage=Lineage(0), version=Version(version), instances=instances, room=room, prompts=1000)


def test_who_is_behind_loads_and_starts_nothing_in_that_cycle() -> None:
    assert decide(snapshot(FRESH, BEHIND), "least_loaded") == [
        Load(worker=WorkerId("b"), lineage=Lineage(0), version=Version(3)),
        Start(worker=WorkerId("a"), version=Version(3), num_groups=2),
    ]


def test_an_order_is_not_given_twice() -> None:
    pulling = msgspec.structs.replace(BEHIND, pulling=True)
    assert decide(snapshot(pulling), "least_loaded") == []


def test_before_version_0_nothing_is_loaded() -> None:
    empty = msgspec.structs.replace(BEHIND, version=Version(-1), usable=False)
    assert decide(snapshot(empty, version=-1), "round_robin") == []


def test_a_decision_over_1024_instances_is_the_same_each_time_and_fits_a_cycle() -> None:
    many = [msgspec.structs.replace(FRESH, worker=WorkerId(f"w{n}"), held=n % 2) for n in range(1024)]
    view = msgspec.structs.replace(snapshot(*many), room={Version(3): 512})
    started = time.perf_counter()
    orders = decide(view, "least_loaded")
    elapsed_s = time.perf_counter() - started
    assert orders == decide(view, "least_loaded")
    assert sum(order.num_groups for order in orders if isinstance(order, Start)) == 512
    assert elapsed_s < 1.0  # a test deadline; bench/control_plane.py measures


def test_who_cannot_load_goes_on_with_what_it_has() -> None:
    stuck = msgspec.structs.replace(BEHIND, pulling=True, stuck=True)
    assert decide(snapshot(stuck), "round_robin") == [Start(worker=WorkerId("b"), version=Version(2), num_groups=2)]


def test_a_crowd_is_told_to_load_in_parts() -> None:
    crowd = [msgspec.structs.replace(BEHIND, worker=WorkerId(f"w{n}")) for n in range(MOST_AT_ONCE + 5)]
    assert len(decide(snapshot(*crowd), "least_loaded")) == MOST_AT_ONCE
    told = [msgspec.structs.replace(i, pulling=n < MOST_AT_ONCE) for n, i in enumerate(crowd)]
    assert [order.worker for order in decide(snapshot(*told), "least_loaded")] == [i.worker for i in crowd[-5:]]
