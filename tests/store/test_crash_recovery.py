"""Damage that kills its reader is detected in a separate process, and the store is rejected by name."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from staleflow.store.base import StoreCorrupt, StoreInUse, number_key
from staleflow.store.crash_recovery import CRASH, KEPT_NOTE, open_store
from staleflow.store.lmdb import Store
from tests.store.pages import harm_branches

TABLES = ("a", "b")
MAP_BYTES = 16 << 20


def opened(path: Path) -> Store:
    return open_store(path, tables=TABLES, map_bytes=MAP_BYTES, durability="process")


READER = """
import sys
from pathlib import Path
from staleflow.store.crash_recovery import note_crashes
from tests.store.test_crash_recovery import opened
folder = Path(sys.argv[1])
note_crashes(folder)
store = opened(folder)
with store.read() as txn:
    print(sum(len(value) for _, value in txn.items("a")))
store.close()
"""


def reader(path: Path) -> subprocess.CompletedProcess[str]:
    """Run a process that records its crashes, and reads."""
    return subprocess.run([sys.executable, "-c", READER, str(path)], capture_output=True, text=True, check=False)


def filled(path: Path) -> Path:
    store = opened(path)
    with store.write() as txn:
        for number in range(20):
            txn.put("a", number_key(number), bytes([number]) * 300)
            txn.put("b", number_key(number), b"b")
    store.close()
    return path / "data.mdb"


def test_who_is_ended_by_damage_leaves_word_and_the_next_one_names_the_file(tmp_path: Path) -> None:
    whole, file = "6000\n", filled(tmp_path)
    assert reader(tmp_path).stdout == whole
    before = file.read_bytes()
    assert harm_branches(file) == 1
    assert reader(tmp_path).returncode == -signal.SIGABRT
    for _ in range(2):
        with pytest.raises(StoreCorrupt, match=rf"^{file} is damaged: reading all of it raises SIGABRT$"):
            opened(tmp_path)
    file.write_bytes(before)
    assert reader(tmp_path).stdout == whole
    assert (tmp_path / CRASH).read_bytes() == b""
    assert b"Fatal Python error" in (tmp_path / KEPT_NOTE).read_bytes()


def test_damage_that_a_look_finds_alive_is_named_as_it_says(tmp_path: Path) -> None:
    file = filled(tmp_path)
    (tmp_path / CRASH).write_text("Fatal Python error\n")
    assert harm_branches(file, bit=7) == 1
    with pytest.raises(StoreCorrupt, match=rf"^{file} is damaged: (?!who reads)"):
        opened(tmp_path)


def test_who_is_killed_leaves_no_word_and_nothing_is_looked_at(tmp_path: Path) -> None:
    filled(tmp_path)
    killed = f"{READER}\nimport os\nos.kill(os.getpid(), 9)"
    ended = subprocess.run([sys.executable, "-c", killed, str(tmp_path)], capture_output=True, check=False)
    assert (ended.returncode, (tmp_path / CRASH).read_bytes()) == (-signal.SIGKILL, b"")


def test_a_store_in_use_is_told_as_ever(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / CRASH).write_text("Fatal Python error\n")
    owner = Store(tmp_path, tables=TABLES, map_bytes=MAP_BYTES, durability="process")
    with pytest.raises(StoreInUse, match=str(os.getpid())):
        opened(tmp_path)
    owner.close()
