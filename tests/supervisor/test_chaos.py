"""``staleflow chaos`` harms only the processes that it may harm, and flips exactly one bit."""

import random
import signal
import struct
import sys
from pathlib import Path
from typing import Any, cast

import lmdb
import pytest

from staleflow.supervisor import chaos
from staleflow.supervisor.chaos import Chaos, Injected, Kind, Victim, flip, name_of

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


def test_a_store_that_is_not_there_yet_has_nothing_to_flip(tmp_path: Path) -> None:
    assert flip(tmp_path / "trajectories-0", random.Random(0)) is None


class Process:
    """A stand-in for a ``psutil.Process``. With ``lives`` it runs again after every signal."""

    def __init__(self, lives: bool = True) -> None:
        self.lives = lives
        self.ended = False

    @property
    def pid(self) -> int:
        return 1

    def create_time(self) -> float:
        return 0.0

    def send_signal(self, sig: int) -> None:
        self.ended = not self.lives and sig in (signal.SIGKILL, signal.SIGTERM)


LOOKS = 2000
"""Number of polls after which all processes are gone, so that a test of a hanging command fails."""


def caused(monkeypatch: pytest.MonkeyPatch, processes: dict[str, Process], kinds: tuple[Kind, ...]) -> list[Injected]:
    """Faults injected into a run of these processes; the command requests six."""
    looks, told = 0, list[Injected]()

    def there(_: Path) -> list[Victim]:
        nonlocal looks
        looks += 1
        return [Victim(name, cast("Any", one)) for name, one in processes.items() if not one.ended and looks <= LOOKS]

    monkeypatch.setattr(chaos, "victims", there)
    for name, seconds in (("NO_VICTIM_TIMEOUT_S", 120.0), ("NO_FAULT_TIMEOUT_S", 0.05), ("POLL_INTERVAL_S", 0.001)):
        monkeypatch.setattr(chaos, name, seconds)
    Chaos(RUN, kinds=kinds, only=(), every_s=0.001, stop_s=0.001, seed=0, report=told.append).run(6)
    return told


def test_who_has_left_for_good_keeps_no_fault_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    told = caused(monkeypatch, {"by-hand": Process(lives=False), "rollout-0": Process()}, (Kind.KILL, Kind.TERM))
    assert sorted({fault.name for fault in told}) == ["by-hand", "rollout-0"]
    assert [fault.name for fault in told].count("by-hand") == 1
    assert len(told) == 6


def test_a_shard_that_stores_nothing_keeps_no_fault_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def flips(store: Path, _: random.Random) -> str | None:
        return "one bit" if store.name == "trajectories-1" else None

    monkeypatch.setattr(chaos, "flip", flips)
    shards = {"trajectories-0": Process(), "trajectories-1": Process()}
    assert [fault.name for fault in caused(monkeypatch, shards, (Kind.FLIP,))] == ["trajectories-1"] * 6
