"""After one byte of the ledger's store has changed, the scheduler stops and names file and record."""

import signal
from pathlib import Path
from random import Random

import lmdb

from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import Attach, AttachReply
from tests.servers.scheduler.world import Cast, World
from tests.store.pages import harm_branches

COPIES = 4
SEED = 5


def live_values(folder: Path) -> list[tuple[str, bytes, bytes]]:
    """Return (table, key, value) of every stored record."""
    found: list[tuple[str, bytes, bytes]] = []
    with lmdb.Environment(str(folder), max_dbs=16, readonly=True, lock=False) as environment:
        with environment.begin() as txn:
            tables = [bytes(name) for name, _ in txn.cursor()]
        for table in tables:
            opened = environment.open_db(table, create=False)
            with environment.begin() as txn:
                found += [(table.decode(), bytes(key), bytes(value)) for key, value in txn.cursor(opened)]
    return found


async def test_a_byte_inside_a_live_record_stops_the_scheduler_which_names_it(world: World) -> None:
    cast = await Cast(world).enter()
    await cast.finish(2)
    await cast.trainer.next_batch(0)
    assert world.stop() == 0
    file = world.run_dir / "scheduler" / "data.mdb"
    whole, random = file.read_bytes(), Random(SEED)
    tables = {"groups", "meta", "workers", "deck", "trace"}
    values = [one for one in live_values(file.parent) if one[0] in tables]
    assert {table for table, _, _ in values} == tables
    for table, key, value in random.sample(values, COPIES):
        data, start, place = bytearray(whole), 0, random.randrange(len(value))
        while (start := whole.find(value, start)) >= 0:  # older pages contain the value too
            data[start + place] ^= 1 << random.randrange(8)
            start += len(value)
        file.write_bytes(data)
        world.spawn()
        code, said = world.ended()
        assert code == 2, said
        assert f"data.mdb is damaged: record {key.hex()} of table {table}" in said
    file.write_bytes(whole)
    world.start()
    assert (await world.status())["ledger"]["sealed"] == 2


async def test_a_torn_file_stops_the_scheduler_which_names_it(world: World) -> None:
    cast = await Cast(world).enter()
    await cast.finish(2)
    assert world.stop() == 0
    file = world.run_dir / "scheduler" / "data.mdb"
    data = file.read_bytes().rstrip(b"\0")
    file.write_bytes(data[: len(data) // 3])
    world.spawn()
    code, said = world.ended()
    assert code == 2, said
    assert "data.mdb" in said


async def test_a_page_header_that_ends_the_scheduler_is_named_when_it_is_started_again(world: World) -> None:
    cast = await Cast(world).enter()
    await cast.finish(2)
    await cast.trainer.next_batch(0)
    for number in range(30):
        worker = WorkerId(f"reward-{number}.{'x' * 100}")
        await world.client(worker).ask(Attach(worker=worker, name=f"reward-{number}", role="stage"), AttachReply)
    assert world.stop() == 0
    file = world.run_dir / "scheduler" / "data.mdb"
    whole = file.read_bytes()
    assert harm_branches(file)
    world.spawn()
    assert world.ended()[0] == -signal.SIGABRT
    world.spawn()
    code, said = world.ended()
    assert code == 2, said
    assert f"{file} is damaged: reading all of it raises SIGABRT" in said
    file.write_bytes(whole)
    world.start()
    assert (await world.status())["ledger"]["sealed"] == 2
