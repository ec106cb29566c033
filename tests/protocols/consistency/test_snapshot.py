"""A restart restores the whole ledger, and retired ids are recognized without being stored one by one."""

from collections.abc import Callable

import pytest

from staleflow.protocols.consistency.errors import RestoreError
from staleflow.protocols.consistency.ids import GroupId, Version
from staleflow.protocols.consistency.ledger import RetiredIds
from staleflow.protocols.consistency.limits import Limits
from staleflow.protocols.consistency.machine import Machine
from staleflow.protocols.consistency.snapshot import Row
from tests.protocols.consistency.scenes import Scene


def busy() -> Scene:
    """Return a ledger with a group in every state."""
    scene = Scene(max_staleness=3, batch_size=2, max_spares=1)
    scene.reserve(0, 1, 2, 3, 4, 5, 6, 7, 8)
    scene.finish(0, 1)
    scene.train(0)
    scene.join(0, trainer="again")
    scene.train(0)
    scene.finish(2, 3, 4)
    scene.deliver(scene.batch(1).batch)
    scene.push(5)
    scene.release(6)
    scene.claim(4, step=2)
    return scene


def test_a_restart_keeps_everything() -> None:
    scene = busy()
    restarted = scene.restart()
    restarted.check()
    assert restarted.snapshot() == scene.machine.snapshot()
    assert restarted.state_counts() == scene.machine.state_counts()
    assert restarted.totals() == scene.machine.totals()
    assert restarted.window() == scene.machine.window()


def test_a_restarted_ledger_goes_on_as_the_other_would() -> None:
    one, other = busy(), busy()
    other.machine = other.restart()
    for scene in (one, other):
        scene.train(1)
        scene.finish(5)
        scene.reserve(6, 9, version=1)
    assert one.machine.snapshot() == other.machine.snapshot()


def test_a_store_that_writes_the_dirty_rows_after_every_event_has_every_row() -> None:
    scene = Scene(max_staleness=1, batch_size=1)
    stored: dict[int, Row] = {}
    acts: list[Callable[[], object]] = [
        lambda: scene.reserve(0, 1),
        lambda: scene.finish(0),
        lambda: scene.train(0),
        lambda: scene.finish(1),
        lambda: scene.quarantine(1),
        lambda: scene.checkpointed(1, keep=2),
    ]
    for act in acts:
        act()
        for key in scene.machine.take_dirty():
            row = scene.machine.row(key)
            if row is None:
                stored.pop(key, None)
            else:
                stored[key] = row
        assert stored == scene.machine.rows()


def test_rows_survive_a_codec_that_turns_tuples_into_lists() -> None:
    scene = busy()
    machine = scene.machine
    rows = [(key, list(row)) for key, row in reversed(machine.rows().items())]
    assert Machine.restore(scene.limits, list(machine.globals_row()), rows, 0).snapshot() == machine.snapshot()


def test_a_ledger_of_other_limits_is_not_restored() -> None:
    scene = busy()
    other = Limits(max_staleness=1, batch_size=2)
    with pytest.raises(RestoreError, match="max_staleness"):
        Machine.restore(other, scene.machine.globals_row(), scene.machine.rows().items(), 0)


@pytest.mark.parametrize("cells", [(), ("x",), (0, "lease"), (9,) * 13])
def test_a_row_that_is_none_is_named(cells: Row) -> None:
    scene = busy()
    with pytest.raises(RestoreError):
        Machine.restore(scene.limits, scene.machine.globals_row(), [(5, cells)], 0)


def test_a_batch_whose_groups_changed_is_not_restored() -> None:
    scene = busy()
    rows = scene.machine.rows()
    rows[2] = tuple("other" if cell == scene.view(2).sha else cell for cell in rows[2])
    with pytest.raises(RestoreError, match="digest"):
        Machine.restore(scene.limits, scene.machine.globals_row(), rows.items(), 0)


def test_retired_ids_cost_a_bit_and_full_pages_nothing() -> None:
    retired = RetiredIds()
    for id in (*range(64, 200), *range(63), 5000):
        retired.add(id)
    assert (retired.floor, sorted(retired.pages)) == (0, [0, 1, 2, 3, 5000 // 64])
    assert 63 not in retired
    assert retired.add(63) == [0, 0, 1, 2]
    assert (retired.floor, sorted(retired.pages)) == (3, [3, 5000 // 64])
    assert 63 in retired
    assert 199 in retired
    assert 200 not in retired
    assert retired.add(0) == []


def test_a_long_run_keeps_no_row_of_what_it_forgot() -> None:
    scene = Scene(max_staleness=0, batch_size=4)
    for step in range(32):
        ids = range(4 * step, 4 * step + 4)
        scene.reserve(*ids, version=step)
        scene.finish(*ids)
        scene.train(step)
        scene.checkpointed(step + 1)
    assert scene.machine.rows() == {}
    assert all(scene.machine.retired(GroupId(group)) for group in range(128))
    assert scene.machine.room(Version(32)) == 4
