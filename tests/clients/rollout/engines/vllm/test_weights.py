"""The places of published tensors can be computed without vLLM."""

import gc
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.clients.rollout.engines.vllm import weights as vllm_weights
from staleflow.clients.rollout.engines.vllm.weights import Parcel, Place, parcels
from staleflow.clients.weights.remote import room
from tests.clients.weights.opened import open_files


def read(path: str, place: Place) -> Any:
    """Read a tensor as a worker would."""
    _, dtype, shape, offset = place
    count = int(np.prod(shape, dtype=np.int64))
    return np.fromfile(path, np.dtype(dtype), count, offset=offset).reshape(shape)


def ours(parcel: Parcel) -> bool:
    return os.path.realpath(parcel.path).startswith("/memfd:staleflow-weights")


def open_spools() -> int:
    """Count staleflow's spool files that this process has open, without the garbage of other tests."""
    gc.collect()
    return open_files("/memfd:staleflow-weights")


def mapped(path: Path, content: bytes, access: int = mmap.ACCESS_READ) -> memoryview:
    path.write_bytes(content)
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=access))


def test_tensors_in_one_map_of_a_file_are_named_by_their_offsets(tmp_path: Path) -> None:
    first, second = np.arange(12, dtype=np.float32), np.arange(5, dtype=np.uint16)
    data = mapped(tmp_path / "version", bytes(5000) + first.tobytes() + second.tobytes())
    tensors: dict[str, Any] = {
        "a": np.frombuffer(data[5000:5048], np.float32).reshape(3, 4),
        "b": np.frombuffer(data[5048:], np.uint16),
    }
    (parcel,) = parcels(tensors)
    assert parcel.path == str(tmp_path / "version")
    assert parcel.tensors == [("a", "<f4", [3, 4], 5000), ("b", "<u2", [5], 5048)]
    assert read(parcel.path, parcel.tensors[0]).tolist() == tensors["a"].tolist()


def test_a_map_is_named_in_parcels_that_are_read_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_weights, "MAX_MAPPED_BYTES", 80)
    data = mapped(tmp_path / "version", np.arange(100, dtype=np.float32).tobytes())
    ends = {"a": (0, 10), "b": (10, 20), "c": (20, 21), "large": (21, 60), "d": (60, 70)}
    tensors: dict[str, Any] = {name: np.frombuffer(data, np.float32)[slice(*end)] for name, end in ends.items()}
    found = list(parcels(tensors))
    assert [[name for name, *_ in parcel.tensors] for parcel in found] == [["a", "b"], ["c"], ["large"], ["d"]]
    assert {parcel.path for parcel in found} == {str(tmp_path / "version")}
    for parcel in found:
        for place in parcel.tensors:
            assert read(parcel.path, place).tolist() == tensors[place[0]].tolist()


def test_what_is_no_map_goes_through_short_lived_files_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_weights, "MAX_SPOOL_BYTES", 100)
    tensors: dict[str, Any] = {name: np.arange(10, dtype=np.float32) + index for index, name in enumerate("abcde")}
    tensors["t"] = np.arange(6, dtype=np.float32).reshape(2, 3).T  # not in C order
    names: list[list[str]] = []
    before = open_spools()
    for parcel in parcels(tensors):
        assert open_spools() == before + 1
        for place in parcel.tensors:
            assert read(parcel.path, place).tolist() == tensors[place[0]].tolist()
        assert ours(parcel)
        names.append([place[0] for place in parcel.tensors])
    assert names == [["a", "b"], ["c", "d"], ["e", "t"]]
    assert open_spools() == before


def test_other_processes_read_a_file_that_has_no_name_and_so_ends_with_this_process() -> None:
    before = open_spools()
    coming = parcels({"a": np.arange(10, dtype=np.float32)})
    path = next(coming).path
    assert os.stat(path).st_nlink == 0
    reading = "import sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read(40))"
    child = subprocess.run([sys.executable, "-c", reading, path], capture_output=True, check=True)
    assert np.frombuffer(child.stdout, np.float32).tolist() == list(range(10))
    coming.close()
    assert open_spools() == before


def test_a_file_that_was_replaced_or_deleted_is_named_by_its_descriptor_and_a_private_map_is_copied(
    tmp_path: Path,
) -> None:
    content = np.arange(4096, dtype=np.float32).tobytes()
    replaced, deleted = mapped(tmp_path / "replaced", content), mapped(tmp_path / "deleted", content)
    private = mapped(tmp_path / "private", content, mmap.ACCESS_COPY)
    (tmp_path / "other").write_bytes(bytes(len(content)))
    (tmp_path / "other").rename(tmp_path / "replaced")
    (tmp_path / "deleted").unlink()
    private[0:4] = np.float32(7).tobytes()
    tensors = {
        name: np.frombuffer(data, np.float32)
        for name, data in (("replaced", replaced), ("deleted", deleted), ("private", private))
    }
    seen = [(ours(parcel), read(parcel.path, place)[:2]) for parcel in parcels(tensors) for place in parcel.tensors]
    assert [(copied, values.tolist()) for copied, values in seen] == [(False, [0, 1]), (False, [0, 1]), (True, [7, 1])]


def test_downloaded_bytes_are_named_in_the_memory_that_they_arrived_in() -> None:
    before = open_spools()
    buffer = room(40)
    np.frombuffer(buffer, np.float32)[:] = range(10)
    (parcel,) = parcels({"a": np.frombuffer(buffer, np.float32)[2:]})
    assert [place[3] for place in parcel.tensors] == [8]
    assert read(parcel.path, parcel.tensors[0]).tolist() == list(range(2, 10))
    assert open_spools() == before + 1, "the one of the buffer: nothing was copied"


def test_an_empty_version_is_no_parcel_and_an_empty_tensor_comes_with_the_others() -> None:
    assert list(parcels({})) == []
    (parcel,) = parcels({"a": np.zeros((0, 4), np.float32), "b": np.ones(2, np.float32)})
    assert [(name, shape) for name, _, shape, _ in parcel.tensors] == [("a", [0, 4]), ("b", [2])]
