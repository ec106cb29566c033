"""Bytes in a slab that a record refers to are never overwritten, and only one worker can use a slab."""

import errno
import mmap
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from staleflow.clients.rollout.pushes import MAX_BYTES, MAX_GROUPS
from staleflow.clients.rollout.slab_writer import SlabWriter
from staleflow.net.errors import Refused
from staleflow.process.host import boot_id
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId, LeaseId, WorkerId
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import GetSlab, Place, Slab
from staleflow.servers.trajectories.records import Key
from staleflow.servers.trajectories.slabs import MAX_UNPUSHED_BYTES, Slabs
from tests.servers.trajectories.scarce import no_descriptor, no_room

MB = 1 << 20
ME, OTHER = WorkerId("rollout-0.1"), WorkerId("rollout-1.1")
ROOM = 64 * MB


def slabs(folder: Path) -> Slabs:
    return Slabs(folder / "slabs", map_bytes=64 * MB)


def ask(number: int, *held: str, worker: WorkerId = ME, host: str | None = None) -> GetSlab:
    return GetSlab(worker=worker, host=boot_id() if host is None else host, number=number, held=list(held))


class Shard:
    """Hand out slabs; with ``elsewhere``, report that folder to the worker."""

    def __init__(self, of: Slabs, *, elsewhere: Path | None = None) -> None:
        self._of, self._elsewhere = of, elsewhere
        self.asked = 0

    async def ask(self, asked: GetSlab, *_: object, **__: object) -> Slab:
        self.asked += 1
        slab = self._of.give(asked, 4096 * MB)
        return msgspec.structs.replace(slab, folder=str(self._elsewhere)) if slab.name and self._elsewhere else slab


def key(number: int) -> Key:
    return Key(GroupId(number), LeaseId(number))


def write(folder: Path, name: str, offset: int, data: bytes) -> Place:
    """Write as a worker does, through a separate map."""
    with (folder / "slabs" / name).open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[offset : offset + len(data)] = data
    return Place(slab=name, offset=offset, nbytes=len(data))


def test_a_slab_with_a_record_in_it_is_not_given_anew_until_the_record_is_gone(tmp_path: Path) -> None:
    of = slabs(tmp_path)
    first = of.give(ask(1), ROOM)
    of.hold(key(1), first.name)
    second = of.give(ask(2), ROOM)
    assert (first.nbytes, second.known) == (MB, [first.name, second.name])
    of.free([key(1)])
    assert of.give(ask(3, second.name), ROOM).name == first.name


def test_a_slab_that_its_worker_still_uses_is_not_given_anew(tmp_path: Path) -> None:
    of = slabs(tmp_path)
    first = of.give(ask(1), ROOM)
    assert of.give(ask(2, first.name), ROOM).name != first.name


def test_no_slab_is_given_to_two_workers(tmp_path: Path) -> None:
    of = slabs(tmp_path)
    first = of.give(ask(1), ROOM)
    other = of.give(ask(1, first.name, worker=OTHER), ROOM)
    assert other.known == [other.name] != [first.name]
    of.lose(ME)
    assert of.give(ask(2, other.name, worker=OTHER), ROOM).name not in (first.name, other.name)


def test_an_echo_has_the_same_answer_and_an_older_question_none(tmp_path: Path) -> None:
    of = slabs(tmp_path)
    first = of.give(ask(1), ROOM)
    assert of.give(ask(1), ROOM) == first
    second = of.give(ask(2, first.name), ROOM)
    with pytest.raises(Refused) as no:
        of.give(ask(1), ROOM)
    assert no.value.code is Code.STALE
    assert of.give(ask(3, first.name, second.name), ROOM).name not in (first.name, second.name)


def test_the_slabs_of_a_lost_worker_go_with_their_last_record(tmp_path: Path) -> None:
    of = slabs(tmp_path)
    kept, empty = of.give(ask(1), ROOM), of.give(ask(2, of.give(ask(1), ROOM).name), ROOM)
    of.hold(key(1), kept.name)
    of.lose(ME)
    assert os.listdir(tmp_path / "slabs") == [kept.name]
    assert empty.name != kept.name
    of.free([key(1)])
    assert (os.listdir(tmp_path / "slabs"), of.nbytes) == ([], 0)


def test_what_a_worker_wrote_is_read_and_nothing_beyond_its_own_slabs(tmp_path: Path) -> None:
    of = slabs(tmp_path)
    name = of.give(ask(1), ROOM).name
    place = write(tmp_path, name, MB - 3, b"abc")
    assert bytes(of.written_bytes(ME, place)) == b"abc"
    with pytest.raises(ProtocolError, match=r"does not belong to rollout-1\.1"):
        of.written_bytes(OTHER, place)
    with pytest.raises(ProtocolError, match="are outside slab"):
        of.written_bytes(ME, Place(slab=name, offset=MB - 3, nbytes=4))
    with pytest.raises(Refused, match="is gone"):
        of.written_bytes(ME, Place(slab="../records", offset=0, nbytes=1))


def test_without_room_there_is_no_slab_and_idle_ones_make_room_first(tmp_path: Path) -> None:
    of = slabs(tmp_path)
    first = of.give(ask(1), MB)
    assert of.give(ask(2, first.name), MB - 1).name == ""
    of.give(ask(3), ROOM)  # ``first`` is handed out again, because it is free
    of.lose(ME)
    other = of.give(ask(1, worker=OTHER), MB)
    assert os.listdir(tmp_path / "slabs") == [other.name]


@pytest.mark.parametrize("host", ["another", ""])
def test_who_is_on_another_host_gets_no_slab_and_keeps_none(tmp_path: Path, host: str) -> None:
    of = slabs(tmp_path)
    far = Slab(folder="", name="", nbytes=0, known=[])
    assert of.give(ask(1, worker=OTHER, host=host), ROOM) == far
    assert not (tmp_path / "slabs").exists()
    kept = of.give(ask(1), ROOM).name
    of.hold(key(1), kept)
    empty = of.give(ask(2, kept), ROOM).name
    assert [of.give(ask(3, kept, empty, host=host), ROOM) for _ in range(2)] == [far] * 2
    assert (os.listdir(tmp_path / "slabs"), of.nbytes) == ([kept], MB)
    of.free([key(1)])
    assert (os.listdir(tmp_path / "slabs"), of.nbytes) == ([], 0)


def test_a_worker_that_pushes_nothing_of_what_it_has_gets_no_more(tmp_path: Path) -> None:
    of = slabs(tmp_path)
    names: list[str] = []

    def get(number: int) -> bool:
        if name := of.give(ask(number, *names), ROOM).name:
            names.append(name)
        return bool(name)

    most = 64 // 4 + 2
    assert [get(number) for number in range(1, 40)] == [True] * most + [False] * (39 - most)
    assert of.give(ask(1, worker=OTHER), ROOM).name
    of.expect(names[0])
    of.hold(key(1), names[1])
    assert [get(number) for number in range(40, 44)] == [True, True, False, False]
    assert of.give(ask(44), ROOM).name in names  # slabs that the worker has finished with no longer count


@pytest.mark.parametrize(("map_mb", "group_mb"), [(256, 0.501), (4096, 8.01)])
async def test_the_groups_of_one_push_find_slabs_however_they_fill_them(
    tmp_path: Path, map_mb: int, group_mb: float
) -> None:
    """Groups fill one byte more than half of each slab."""
    of = Slabs(tmp_path / "slabs", map_bytes=map_mb * MB)
    shard: Any = Shard(of)
    writer, data = SlabWriter(shard, ME), bytes(int(group_mb * MB))
    num_groups = min(MAX_BYTES // len(data), MAX_GROUPS)
    places = [await writer.write([data]) for _ in range(num_groups)]
    assert len({place.slab for place in places if place is not None}) == num_groups
    assert of.nbytes < MAX_UNPUSHED_BYTES


async def test_a_worker_that_cannot_open_its_slab_gives_it_back_and_asks_no_more(tmp_path: Path) -> None:
    of = slabs(tmp_path)
    shard: Any = Shard(of, elsewhere=tmp_path / "of a container")
    writer = SlabWriter(shard, ME)
    assert [await writer.write([b"payload"]) for _ in range(100)] == [None] * 100
    assert (shard.asked, os.listdir(tmp_path / "slabs"), of.nbytes) == (2, [], 0)


def test_a_full_disk_is_no_slab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    assert slabs(tmp_path).give(ask(1), ROOM).name == ""
    assert os.listdir(tmp_path / "slabs") == []


@pytest.mark.parametrize("call", ["mkdir", "statvfs"])
def test_a_disk_that_takes_no_folder_and_tells_nothing_of_itself_is_no_slab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    of = slabs(tmp_path)
    with monkeypatch.context() as at_present:
        at_present.setattr(os, call, no_room)
        assert of.give(ask(1), ROOM).name == ""
        assert of.store(key(1), b"payload", lambda: ROOM) is None
    assert of.give(ask(2), ROOM).name
    assert of.store(key(1), b"payload", lambda: ROOM)


def test_without_a_descriptor_there_is_no_slab_and_with_one_again_there_is(tmp_path: Path) -> None:
    of, first = slabs(tmp_path), ask(1)
    with no_descriptor():
        assert of.give(first, ROOM).name == ""
        assert of.store(key(1), b"payload", lambda: ROOM) is None
    assert of.give(ask(2), ROOM).name
    assert of.store(key(1), b"payload", lambda: ROOM)


def test_a_slab_of_the_shards_own_that_cannot_be_opened_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open

    def scarce(path: Path, mode: str = "r") -> Any:
        if mode == "r+b":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(path, mode)

    of = slabs(tmp_path)
    with monkeypatch.context() as at_present:
        at_present.setattr(Path, "open", scarce)
        for _ in range(3):
            assert of.store(key(1), b"payload", lambda: ROOM) is None
            assert of.nbytes == 0
    assert of.store(key(1), b"payload", lambda: ROOM)
    assert of.counts() == {"files": 1, "holding": 1, "bytes": MB}


def test_a_slab_that_cannot_be_deleted_goes_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = slabs(tmp_path)
    name = of.give(ask(1), ROOM).name
    of.hold(key(1), name)
    of.lose(ME)
    with monkeypatch.context() as at_present:
        at_present.setattr(os, "unlink", no_room)
        of.free([key(1)])
        assert (os.listdir(tmp_path / "slabs"), of.nbytes) == ([name], 0)
        slabs(tmp_path).clear()
    slabs(tmp_path).clear()
    assert os.listdir(tmp_path / "slabs") == []


def test_no_record_is_lost_because_there_is_no_descriptor(tmp_path: Path) -> None:
    name = slabs(tmp_path).give(ask(1), ROOM).name
    after = slabs(tmp_path)
    with no_descriptor(), pytest.raises(OSError, match="Too many open files"):
        after.find(key(1), name, 64, 7)
    assert slabs(tmp_path).find(key(1), name, 64, 7)


def test_after_a_restart_slabs_with_records_are_kept_and_given_to_nobody(tmp_path: Path) -> None:
    before = slabs(tmp_path)
    kept = before.give(ask(1), ROOM).name
    gone = before.give(ask(2, kept), ROOM).name
    place = write(tmp_path, kept, 64, b"payload")
    after = slabs(tmp_path)
    assert after.find(key(1), kept, place.offset, place.nbytes)
    after.clear()
    assert os.listdir(tmp_path / "slabs") == [kept]
    assert gone != kept
    assert bytes(after.read(kept, 64, 7) or b"") == b"payload"
    assert after.give(ask(3), ROOM).name != kept
    after.free([key(1)])
    assert kept not in os.listdir(tmp_path / "slabs")


def test_after_a_restart_no_push_is_read_from_a_slab_that_its_worker_may_not_have_mapped(tmp_path: Path) -> None:
    name = slabs(tmp_path).give(ask(1), ROOM).name
    stored = write(tmp_path, name, 0, b"stored")
    path = tmp_path / "slabs" / name
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        saved = path.read_bytes()
        path.unlink()
        path.write_bytes(saved)  # like a restored backup
        after = slabs(tmp_path)
        assert after.find(key(1), name, stored.offset, stored.nbytes)
        mapped[64:71] = b"payload"
        with pytest.raises(Refused, match="is gone") as no:
            after.written_bytes(ME, Place(slab=name, offset=64, nbytes=7))
    assert no.value.code is Code.STALE


@pytest.mark.parametrize("nbytes", [0, 70])
def test_a_record_whose_slab_has_been_cut_is_damaged(tmp_path: Path, nbytes: int) -> None:
    name = slabs(tmp_path).give(ask(1), ROOM).name
    os.truncate(tmp_path / "slabs" / name, nbytes)
    after = slabs(tmp_path)
    assert not after.find(key(1), name, 64, 7)
    assert not after.find(key(2), "never-there", 0, 1)
