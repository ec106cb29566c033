"""Whom ``staleflow chaos`` may harm, and what a flipped bit is."""

import random
import struct
import sys
from pathlib import Path
from typing import Any

import lmdb
import pytest

from staleflow.supervisor.chaos import flip, name_of

RUN = Path("/runs/mine")
START = (sys.executable, "-m", "staleflow.cli")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ((*START, "serve", "scheduler", "--run-dir", "/runs/mine"), "scheduler"),
        ((*START, "serve", "trajectories", "--run-dir=mine", "--shard", "1"), "trajectories-1"),
        ((*START, "serve", "trajectories", "--run-dir", "mine"), "trajectories-0"),
        (("/bin/python", "/bin/staleflow", "attach", "rollout", "--run-dir", "mine", "--name", "r-3"), "r-3"),
        ((*START, "attach", "train", "--run-dir", "./mine/"), "train"),
        ((*START, "serve", "scheduler", "--run-dir", "/runs/yours"), ""),
        ((*START, "run", "configs/quickstart.toml", "--run-dir", "/runs/mine"), ""),
        ((*START, "chaos", "/runs/mine"), ""),
        (("vim", "serve", "scheduler", "--run-dir", "/runs/mine"), ""),
        (("serve", "staleflow", "--run-dir", "/runs/mine"), ""),
        ((), ""),
    ],
)
def test_only_the_servers_and_workers_of_the_run_are_found(words: tuple[str, ...], name: str) -> None:
    assert name_of(words, RUN, Path("/runs")) == name


def test_a_flip_changes_one_bit_of_one_payload_and_says_which(tmp_path: Path) -> None:
    blobs = {lease: bytes(random.Random(lease).randbytes(3000)) for lease in range(1, 5)}
    environment: Any = lmdb.Environment(str(tmp_path), max_dbs=4)
    table = environment.open_db(b"payloads")
    with environment.begin(write=True, db=table) as txn:
        for lease, blob in blobs.items():
            txn.put(struct.pack(">QQ", 7, lease), blob)
    environment.close()
    said = flip(tmp_path, random.Random(0))
    assert said is not None
    lease = int(said.rpartition(" ")[2])
    assert said == f"one bit of group 7, lease {lease}"
    environment = lmdb.Environment(str(tmp_path), max_dbs=4)
    with environment.begin(db=environment.open_db(b"payloads")) as txn:
        found = {number: bytes(txn.get(struct.pack(">QQ", 7, number))) for number in blobs}
    environment.close()
    changed = int.from_bytes(found[lease], "big") ^ int.from_bytes(blobs[lease], "big")
    assert changed.bit_count() == 1
    assert {number: blob for number, blob in found.items() if number != lease} == {
        number: blob for number, blob in blobs.items() if number != lease
    }


def test_an_empty_store_has_nothing_to_flip(tmp_path: Path) -> None:
    environment: Any = lmdb.Environment(str(tmp_path), max_dbs=4)
    environment.open_db(b"payloads")
    environment.close()
    assert flip(tmp_path, random.Random(0)) is None
