"""Checkpoints are complete or absent, verified, and few."""

from pathlib import Path

import pytest

from staleflow.clients.trainer.checkpoint import Checkpoints, DamagedCheckpoint, Overtaken, TrainerState
from staleflow.protocols.consistency.ids import BatchId, Lineage, TrainerTerm, Version
from staleflow.store.sealed_json import seal, unseal
from staleflow.trace.run_history import of_checkpoints


def checkpoints(folder: Path, *, run: str = "r1", keep: int = 2) -> Checkpoints:
    return Checkpoints(folder / "checkpoints", run=run, keep=keep)


def state(version: int, *, lineage: int = 0) -> TrainerState:
    return TrainerState(lineage=Lineage(lineage), version=Version(version), last_batch=BatchId(version))


def write(path: Path) -> None:
    (path / "weights").write_bytes(b"w" * 1000)
    (path / "sub").mkdir()
    (path / "sub" / "more").write_bytes(b"m")


def versions(kept: Checkpoints) -> list[int]:
    return [found.version for _, found in kept.newest()]


def test_what_was_saved_is_read_back(tmp_path: Path) -> None:
    kept = checkpoints(tmp_path)
    path = kept.save(state(20), write)
    assert path == tmp_path / "checkpoints" / "20"
    assert list(kept.newest()) == [(path, state(20))]
    assert (path / "sub" / "more").read_bytes() == b"m"


def test_only_the_newest_are_kept_once_the_run_has_taken_a_newer_one(tmp_path: Path) -> None:
    kept = checkpoints(tmp_path, keep=2)
    for version in (5, 20, 100):
        kept.save(state(version), write)
    assert versions(kept) == [100, 20, 5]
    kept.tidy(state(100), Version(20))
    assert versions(kept) == [100, 20]


def test_the_oldest_that_the_run_can_go_back_to_stays_however_many_lie_after_it(tmp_path: Path) -> None:
    kept = checkpoints(tmp_path, keep=2)
    for version in (5, 10, 15, 20):
        kept.save(state(version), write)
    kept.tidy(state(20), Version(10))
    assert versions(kept) == [20, 15, 10]


def test_the_same_version_again_replaces_the_older_one(tmp_path: Path) -> None:
    kept = checkpoints(tmp_path)
    kept.save(state(5), write)
    kept.save(state(5, lineage=1), write)
    assert [found for _, found in kept.newest()] == [state(5, lineage=1)]
    assert [path.name for path in kept.folder.iterdir()] == ["5"]


def test_a_write_that_fails_leaves_the_older_ones_as_they_were(tmp_path: Path) -> None:
    kept = checkpoints(tmp_path)
    kept.save(state(5), write)

    def killed(path: Path) -> None:
        write(path)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kept.save(state(10), killed)
    assert versions(kept) == [5]
    kept.save(state(10), write)
    assert versions(kept) == [10, 5]


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("weights", b"w" * 999 + b"x", "weights does not match its checksum"),
        ("weights", b"w" * 10, "weights does not match its checksum"),
        ("weights", None, "weights is missing"),
        ("checkpoint.json", b"{", "checkpoint.json"),
        ("checkpoint.json", b'{"run": "\xff"}', "checkpoint.json"),
        ("checkpoint.json", b"[" * 100_000, "checkpoint.json"),
        ("checkpoint.json", None, "checkpoint.json"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path, name: str, data: bytes | None, why: str
) -> None:
    kept = checkpoints(tmp_path)
    kept.save(state(5), write)
    path = kept.save(state(10), write)
    if data is None:
        (path / name).unlink()
    else:
        (path / name).write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match=why):
        kept.read(path)
    assert versions(kept) == [5]
    (damage,) = kept.damaged
    assert damage.path == path
    assert why in damage.why
    (aside,) = kept.set_aside(state(5))
    assert aside.why == damage.why
    assert {*kept.folder.iterdir()} == {kept.folder / "5", aside.path}
    kept.tidy(state(5, lineage=9), Version(5))
    assert aside.path.is_dir(), "it is left to a person"


def test_a_checkpoint_that_a_successor_replaced_meanwhile_is_not_set_aside(tmp_path: Path) -> None:
    kept = checkpoints(tmp_path)
    path = kept.save(state(10), write)
    (path / "weights").unlink()
    assert versions(kept) == []
    checkpoints(tmp_path).save(state(10, lineage=2), write)
    assert kept.set_aside(state(5, lineage=1)) == []
    assert [found for _, found in kept.newest()] == [state(10, lineage=2)]


def test_a_checkpoint_of_another_run_is_not_used(tmp_path: Path) -> None:
    checkpoints(tmp_path, run="r1").save(state(5), write)
    assert versions(checkpoints(tmp_path, run="r2")) == []


def test_a_checkpoint_of_another_schema_is_not_used(tmp_path: Path) -> None:
    kept = checkpoints(tmp_path)
    head = kept.save(state(5), write) / "checkpoint.json"
    head.write_bytes(seal(unseal(head.read_bytes()) | {"schema": 9}))
    assert versions(kept) == []


def test_a_changed_bit_of_the_head_is_damage_and_never_another_run_or_version(tmp_path: Path) -> None:
    kept = checkpoints(tmp_path)
    head = kept.save(state(5), write) / "checkpoint.json"
    good = head.read_bytes()
    known = list(of_checkpoints(kept.folder.parent))
    assert [(found.run, found.version) for _, found in known] == [("r1", 5)]
    for place in range(len(good)):
        damaged = bytearray(good)
        damaged[place] ^= 1 << place % 7
        head.write_bytes(damaged)
        assert list(of_checkpoints(kept.folder.parent)) in ([], known), good[place : place + 20]


def test_a_checkpoint_is_part_of_the_run_only_once_its_version_is_published(tmp_path: Path) -> None:
    kept, before = checkpoints(tmp_path), list[object]()

    def published() -> None:
        (part,) = kept.folder.glob("*.part")
        assert (part / "checkpoint.json").is_file()
        before.extend([*of_checkpoints(tmp_path), *kept.newest()])

    path = kept.save(state(5), write, published)
    assert before == []
    assert [found for found, _ in of_checkpoints(tmp_path)] == [path]


def test_versions_of_a_lost_history_are_removed(tmp_path: Path) -> None:
    kept = checkpoints(tmp_path, keep=5)
    for version in (5, 10, 15):
        kept.save(state(version), write)
    kept.drop_after(state(10, lineage=1))
    assert versions(kept) == [10, 5]


def test_a_later_version_of_the_same_history_goes_only_if_the_run_refused_it(tmp_path: Path) -> None:
    kept = checkpoints(tmp_path, keep=5)
    for version in (5, 10, 15):
        kept.save(state(version, lineage=1), write)
    kept.drop_after(state(5, lineage=1), refused=[state(15, lineage=1)])
    assert versions(kept) == [10, 5]


def test_a_fenced_trainer_neither_replaces_nor_removes_what_its_successor_saved(tmp_path: Path) -> None:
    fenced, successor = checkpoints(tmp_path, keep=1), checkpoints(tmp_path, keep=1)
    fenced.save(state(5), write)
    successor.save(state(7, lineage=1), write)
    with pytest.raises(Overtaken, match="version 7 of lineage 1 lies at"):
        fenced.save(state(7), write)
    fenced.save(state(9), write)
    fenced.tidy(state(5), Version(5))  # the run chose that checkpoint, after a delay
    fenced.drop_after(state(5))
    assert [found for _, found in successor.newest()] == [state(9), state(7, lineage=1), state(5)]
    successor.tidy(state(7, lineage=1), Version(7))
    assert [found for _, found in successor.newest()] == [state(7, lineage=1)]
    assert [path.name for path in successor.folder.iterdir()] == ["7"]


def test_what_a_fenced_trainer_left_at_a_version_gives_way(tmp_path: Path) -> None:
    fenced, successor = checkpoints(tmp_path, keep=1), checkpoints(tmp_path, keep=1)
    for version in (6, 7):
        fenced.save(state(version), write)
    successor.save(state(6, lineage=1), write)
    successor.tidy(state(6, lineage=1), Version(6))
    assert [found for _, found in successor.newest()] == [state(6, lineage=1)]


def test_two_that_save_the_same_version_at_once_do_not_write_into_each_others_files(tmp_path: Path) -> None:
    fenced, successor = checkpoints(tmp_path), checkpoints(tmp_path)

    def overtaken(path: Path) -> None:
        (path / "weights").write_bytes(b"old")
        successor.save(state(7, lineage=1), write)
        (path / "more").write_bytes(b"old")

    with pytest.raises(Overtaken):
        fenced.save(state(7), overtaken)
    assert [found for _, found in successor.newest()] == [state(7, lineage=1)]
    assert sorted(path.name for path in (successor.folder / "7").iterdir()) == ["checkpoint.json", "sub", "weights"]


def test_a_replacement_that_comes_while_one_looks_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fenced, successor = checkpoints(tmp_path), checkpoints(tmp_path)
    fenced.save(state(7), write)
    rename = Path.rename

    def late(path: Path, target: Path) -> Path:
        monkeypatch.undo()
        successor.save(state(7, lineage=2), write)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", late)
    with pytest.raises(Overtaken):
        fenced.save(state(7, lineage=1), write)
    assert [found for _, found in successor.newest()] == [state(7, lineage=2)]


def test_what_a_killed_trainer_had_half_written_goes_when_the_next_one_has_joined(tmp_path: Path) -> None:
    kept = checkpoints(tmp_path)
    kept.save(state(5), write)

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kept.save(state(10), killed)
    kept.drop_after(state(5))
    assert len([*kept.folder.iterdir()]) == 2, "it may still be written"
    kept.term = TrainerTerm(1)
    kept.drop_after(state(5))
    assert [path.name for path in kept.folder.iterdir()] == ["5"]


def test_a_trainer_whose_half_written_checkpoint_its_successor_removes_is_overtaken(tmp_path: Path) -> None:
    fenced, successor = checkpoints(tmp_path), checkpoints(tmp_path)

    def overtaken(path: Path) -> None:
        (path / "weights").write_bytes(b"old")
        successor.term = TrainerTerm(1)
        successor.drop_after(state(3))
        (path / "more").write_bytes(b"old")

    with pytest.raises(Overtaken, match="a later trainer has removed"):
        fenced.save(state(7), overtaken)
    assert not list(fenced.newest())


def test_no_folder_means_no_checkpoints(tmp_path: Path) -> None:
    assert versions(checkpoints(tmp_path)) == []
