"""Checkpoints are complete or absent, checked, and few."""

import logging
from pathlib import Path

import msgspec
import pytest

from staleflow.clients.trainer.checkpoint import Checkpoints, DamagedCheckpoint, TrainerState
from staleflow.protocols.consistency.ids import BatchId, Lineage, Version


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


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    kept = checkpoints(tmp_path, keep=2)
    for version in (5, 100, 20):
        kept.save(state(version), write)
    assert versions(kept) == [100, 20]


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
        ("weights", b"w" * 999 + b"x", "weights is not what was written"),
        ("weights", b"w" * 10, "weights is not what was written"),
        ("weights", None, "weights is missing"),
        ("checkpoint.json", b"{", "checkpoint.json"),
        ("checkpoint.json", None, "checkpoint.json"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, data: bytes | None, why: str
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
    with caplog.at_level(logging.ERROR):
        assert versions(kept) == [5]
    assert why in caplog.text


def test_a_checkpoint_of_another_run_is_not_used(tmp_path: Path) -> None:
    checkpoints(tmp_path, run="r1").save(state(5), write)
    assert versions(checkpoints(tmp_path, run="r2")) == []


def test_a_checkpoint_of_another_schema_is_not_used(tmp_path: Path) -> None:
    kept = checkpoints(tmp_path)
    head = kept.save(state(5), write) / "checkpoint.json"
    head.write_bytes(msgspec.json.encode(msgspec.json.decode(head.read_bytes()) | {"schema": 9}))
    assert versions(kept) == []


def test_versions_of_a_lost_history_are_removed(tmp_path: Path) -> None:
    kept = checkpoints(tmp_path, keep=5)
    for version in (5, 10, 15):
        kept.save(state(version), write)
    kept.drop_after(Version(10))
    assert versions(kept) == [10, 5]


def test_no_folder_means_no_checkpoints(tmp_path: Path) -> None:
    assert versions(checkpoints(tmp_path)) == []
