"""The next run copies a model that an example built; a different model is built."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from staleflow.examples import built_models
from staleflow.examples.built_models import MAX_MODELS, folder, kept

BUILT: list[int] = []


@kept
def build(directory: Path, seed: int, *, size: int = 1) -> None:
    BUILT.append(seed)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"seed": seed, "size": size, "number": len(BUILT)}))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    BUILT.clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_an_equal_model_is_built_once_and_a_different_one_again(tmp_path: Path) -> None:
    build(tmp_path / "a", 0, size=2)
    build(tmp_path / "b", 0, size=2)
    assert BUILT == [0]
    assert (tmp_path / "b" / "config.json").read_bytes() == (tmp_path / "a" / "config.json").read_bytes()
    build(tmp_path / "c", 1, size=2)
    build(tmp_path / "d", 0, size=3)
    assert BUILT == [0, 1, 0]


def test_changed_source_is_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path / "a", 0)
    other = tmp_path / "examples"
    other.mkdir()
    (other / "model.py").write_text("# changed")
    monkeypatch.setattr(built_models, "__file__", str(other / "built_models.py"))
    build(tmp_path / "b", 0)
    assert BUILT == [0, 0]


def test_the_oldest_models_are_deleted(tmp_path: Path) -> None:
    for seed in range(MAX_MODELS + 2):
        build(tmp_path / f"m{seed}", seed)
        for number, path in enumerate(sorted(folder().iterdir(), key=lambda path: path.stat().st_mtime)):
            os.utime(path, (number, number))
    assert len(list(folder().iterdir())) == MAX_MODELS
    build(tmp_path / "first", 0)
    assert BUILT[-1] == 0
    build(tmp_path / "last", MAX_MODELS + 1)
    assert len(BUILT) == MAX_MODELS + 3


def test_no_reader_sees_a_model_that_is_half_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink, seen = os.unlink, list[int]()

    def unlinks(*words: Any, **more: Any) -> None:
        seen.append(len([path for path in folder().iterdir() if path.name[0] != "."]))
        unlink(*words, **more)

    build(tmp_path / "a", 0)
    monkeypatch.setattr(built_models, "MAX_MODELS", 1)
    monkeypatch.setattr(os, "unlink", unlinks)
    build(tmp_path / "b", 1)
    assert seen == [1], "the only file of the older model goes once the model has no name"


def test_large_models_are_deleted_before_there_are_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path / "a", 0)
    size = sum(path.stat().st_size for path in folder().rglob("config.json"))
    monkeypatch.setattr(built_models, "MAX_BYTES", 2 * size + 1)
    for seed in range(1, 4):
        build(tmp_path / f"m{seed}", seed)
        for number, path in enumerate(sorted(folder().iterdir(), key=lambda path: path.stat().st_mtime)):
            os.utime(path, (number, number))
    assert len(list(folder().iterdir())) == 2
    monkeypatch.setattr(built_models, "MAX_BYTES", 1)
    build(tmp_path / "last", 4)
    assert len(list(folder().iterdir())) == 1
    build(tmp_path / "again", 4)
    assert BUILT == [0, 1, 2, 3, 4]


def test_a_cache_that_cannot_be_written_costs_no_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        build(tmp_path / "a", 0)
    assert (tmp_path / "a" / "config.json").is_file()
    assert "the built model is not kept" in caplog.text
