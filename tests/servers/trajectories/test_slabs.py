"""What a record refers to in a slab is never written again, and a slab is of use to one worker only."""

import mmap
import os
from pathlib import Path

import pytest

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId, LeaseId, WorkerId
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import GetSlab, Place
from staleflow.runtime.errors import Refused
from staleflow.servers.trajectories.records import Key
from staleflow.servers.trajectories.slabs import Slabs

MB = 1 << 20
ME, OTHER = WorkerId("rollout-0.1"), WorkerId("rollout-1.1")
ROOM = 64 * MB


def slabs(folder: Path) -> Slabs:
    return Slabs(folder / "slabs", map_bytes=64 * MB)


def ask(number: int, *held: str, worker: WorkerId = ME) -> GetSlab:
    return GetSlab(worker=worker, number=number, held=list(held))


def key(number: int) -> Key:
    return Key(GroupId(number), LeaseId(number))


def write(folder: Path, name: str, offset: int, data: bytes) -> Place:
    """As a worker does, through a map of its own."""
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
    assert bytes(of.written(ME, place)) == b"abc"
    with pytest.raises(ProtocolError, match=r"is not rollout-1\.1's"):
        of.written(OTHER, place)
    with pytest.raises(ProtocolError, match="are not in slab"):
        of.written(ME, Place(slab=name, offset=MB - 3, nbytes=4))
    with pytest.raises(Refused, match="is gone"):
        of.written(ME, Place(slab="../records", offset=0, nbytes=1))


def test_without_room_there_is_no_slab_and_idle_ones_make_room_first(tmp_path: Path) -> None:
    of = slabs(tmp_path)
    first = of.give(ask(1), MB)
    assert of.give(ask(2, first.name), MB - 1).name == ""
    of.give(ask(3), ROOM)  # ``first`` again: nobody holds it
    of.lose(ME)
    other = of.give(ask(1, worker=OTHER), MB)
    assert os.listdir(tmp_path / "slabs") == [other.name]


def test_a_full_disk_is_no_slab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert slabs(tmp_path).give(ask(1), ROOM).name == ""
    assert os.listdir(tmp_path / "slabs") == []


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
    assert bytes(after.written(ME, place)) == b"payload"  # a push that waited for its answer
    assert after.give(ask(3), ROOM).name != kept
    after.free([key(1)])
    assert kept not in os.listdir(tmp_path / "slabs")


@pytest.mark.parametrize("nbytes", [0, 70])
def test_a_record_whose_slab_has_been_cut_is_damaged(tmp_path: Path, nbytes: int) -> None:
    name = slabs(tmp_path).give(ask(1), ROOM).name
    os.truncate(tmp_path / "slabs" / name, nbytes)
    after = slabs(tmp_path)
    assert not after.find(key(1), name, 64, 7)
    assert not after.find(key(2), "never-there", 0, 1)
