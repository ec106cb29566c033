"""Relays form a flat tree without loops, readers use the nearest source, and no source changes without need."""

from hypothesis import given
from hypothesis import strategies as st

from staleflow.servers.parameters.tree import FANOUT, ROOT, ROOT_READERS, Tree


def tree(*relays: tuple[str, str]) -> Tree:
    """Return a tree of these relays, given as (name, host) in order, each reachable from everywhere."""
    grown = Tree()
    for name, host in relays:
        grown.join(name, f"tcp://10.0.0.1:{len(grown.relays) + 1}", host)
    return grown


def depth(grown: Tree, name: str) -> int:
    """Depth of a relay; raises ``RecursionError`` for a loop."""
    return 0 if name == ROOT else 1 + depth(grown, grown.relays[name].parent)


def test_the_first_relays_are_below_the_root_and_the_next_below_them() -> None:
    grown = tree(*((f"r{n}", f"h{n}") for n in range(FANOUT + FANOUT * FANOUT + 1)))
    depths = [depth(grown, f"r{n}") for n in range(len(grown.relays))]
    assert depths == [1] * FANOUT + [2] * FANOUT * FANOUT + [3]
    assert grown.join("r5", "tcp://10.0.0.1:6", "h5") == ["tcp://10.0.0.1:1"]


def test_a_relay_whose_source_left_gets_another_that_is_not_below_itself() -> None:
    grown = tree(*((f"r{n}", f"h{n}") for n in range(FANOUT + 2)))
    assert [grown.relays[name].parent for name in ("r0", f"r{FANOUT}")] == [ROOT, "r0"]
    grown.leave("r0")
    assert grown.join(f"r{FANOUT}", "tcp://10.0.0.1:5", "h") == []  # the root has room again
    assert grown.relays[f"r{FANOUT}"].parent == ROOT


def test_a_reader_gets_the_relay_of_its_host_else_the_root_else_who_has_the_fewest_readers() -> None:
    grown = tree(*((f"r{n}", f"h{n}") for n in range(FANOUT)))
    for n in range(ROOT_READERS + 1):
        assert grown.sources(f"near-{n}", "h1") == ["tcp://10.0.0.1:2"]
    for n in range(ROOT_READERS):  # although the root has its relays, and r0 has no reader
        assert grown.sources(f"far-{n}", "elsewhere") == []
    grown.leave("r2")
    grown.leave("r3")
    for n in range(ROOT_READERS + 2):  # as many as the root has readers and relays
        assert grown.sources(f"late-{n}", "elsewhere") == ["tcp://10.0.0.1:1"]
    assert grown.sources("later", "elsewhere") == ["tcp://10.0.0.1:2"]
    grown.leave("far-0")
    assert grown.sources("later", "elsewhere") == ["tcp://10.0.0.1:2"]  # keeps its source
    assert grown.sources("last", "elsewhere") == []


def test_a_reader_without_its_relay_gets_another() -> None:
    grown = tree(("r0", "h0"))
    assert grown.sources("reader", "h0") == ["tcp://10.0.0.1:1"]
    grown.leave("r0")
    assert grown.sources("reader", "h0") == []
    grown.join("r1", "tcp://10.0.0.1:9", "h0")
    assert grown.sources("reader", "h0") == ["tcp://10.0.0.1:9"]


def test_a_relay_that_is_started_again_never_hangs_below_what_it_was() -> None:
    grown = tree(*((f"r{n}", f"h{n}") for n in range(FANOUT)))
    assert grown.join("r0-again", "tcp://10.0.0.1:1", "h0") == []
    assert [grown.relays[name].parent for name in grown.relays] == [ROOT] * FANOUT
    assert "r0" not in grown.relays
    grown.join("elsewhere", "tcp://10.0.0.1:1", "a host with loopback of its own")
    assert "r0-again" in grown.relays


def test_a_relay_on_loopback_serves_its_own_host_only() -> None:
    grown = Tree()
    grown.join("r0", "tcp://127.0.0.1:1", "h0")
    assert grown.sources("near", "h0") == ["tcp://127.0.0.1:1"]
    assert grown.sources("far", "h1") == []
    for n in range(1, FANOUT + 1):
        grown.join(f"r{n}", f"tcp://10.0.0.1:{n}", f"h{n}")
    assert grown.relays[f"r{FANOUT}"].parent == "r1"  # r0 has room, but is unreachable


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.integers(0, 2)), max_size=60))
def test_whoever_joins_and_leaves_every_relay_reaches_the_root(moves: list[tuple[bool, int, int]]) -> None:
    grown = Tree()
    for joins, number, host in moves:
        if joins:
            grown.join(f"r{number}", f"tcp://10.0.0.1:{number + 1}", f"h{host}")
        else:
            grown.leave(f"r{number}")
        for name in list(grown.relays):  # each relay renews its membership
            relay = grown.relays[name]
            grown.join(name, relay.endpoint, relay.host)
        assert all(depth(grown, name) <= len(grown.relays) for name in grown.relays)
        assert all(grown.num_below(name) <= FANOUT for name in grown.relays)
