"""Fault injection into the processes of a run on this machine.

- Processes are identified by their command lines, whether ``staleflow run`` or a person started them.
- The order of faults follows from a seed: all (process, kind) pairs are shuffled, and the next fault is the first
  possible one of the kind that was injected least. The waits between faults are random.
- Stopped processes are continued before this process ends, except after ``kill -9``.
"""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec
import psutil

MIN_AGE_S = 6.0
"""Minimum age of a target, because the supervisor gives up on a process that dies repeatedly right after its start."""
NO_VICTIM_TIMEOUT_S = 10.0
"""The run counts as ended after this many seconds without a target."""
NO_FAULT_TIMEOUT_S = 15.0
"""Seconds without a possible fault after which the remaining pairs are discarded and all pairs are shuffled again.

The remaining faults may be impossible for ever: the process has left for good, or its shard stores nothing. The time
exceeds a restart plus ``MIN_AGE_S``.
"""
POLL_INTERVAL_S = 0.1
MAX_SERVER_STOP_S = 5.0
"""Maximum stop of a server: long enough for its peers to miss three heartbeats and see it return."""
NUM_NEWEST = 16
"""Number of newest records among which a bit is flipped; these are not trained yet."""
DIGEST_BYTES = 32
"""Size of the digest that precedes the bytes of a record."""
_SERVERS = ("scheduler", "trajectories", "parameters")


class Kind(StrEnum):
    """Kind of fault."""

    KILL = "kill"
    """SIGKILL: immediate death."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT after a while: a worker returns as a zombie whose leases have expired."""
    TERM = "term"
    """SIGTERM: the process drains and exits."""
    FLIP = "flip"
    """Flip one bit of a stored payload, in the file of a running trajectory server."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A process of the run that may be a target."""

    name: str
    process: psutil.Process

    @property
    def pid(self) -> int:
        return int(self.process.pid)


class Injected(msgspec.Struct, frozen=True, kw_only=True):
    """One injected fault, as it is reported."""

    at_s: float
    """Seconds since the start of the fault injection."""
    kind: str
    name: str
    pid: int
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.at_s:7.1f} s  {self.kind:4}  {self.name} ({self.pid}) {self.detail}".rstrip()


def victims(run_dir: Path) -> list[Victim]:
    """Return the live processes of this run, sorted by name."""
    members: list[Victim] = []
    for process in psutil.process_iter():
        try:
            name = name_of(process.cmdline(), run_dir, Path(process.cwd()))
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        if name:
            members.append(Victim(name, process))
    return sorted(members, key=lambda victim: (victim.name, victim.pid))


def name_of(words: Sequence[str], run_dir: Path, folder: Path) -> str:
    """Return the name of the process with this command line and working directory; empty if it is not of this run."""
    verb = next((place for place, word in enumerate(words) if word in ("serve", "attach")), 0)
    if not verb or not any("staleflow" in word for word in words[:verb]):
        return ""
    where = _option(words, "--run-dir")
    if not where or (folder / where).resolve() != run_dir.resolve():
        return ""
    role = words[verb + 1]
    if role == "trajectories":
        return f"{role}-{_option(words, '--shard') or 0}"
    return role if words[verb] == "serve" else _option(words, "--name") or role


def _option(words: Sequence[str], name: str) -> str:
    for place, word in enumerate(words):
        if word == name and place + 1 < len(words):
            return words[place + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return ""


class Chaos:
    """Fault injector for one run; ``run`` injects the given number of faults or stops when no target is left."""

    def __init__(
        self,
        run_dir: Path,
        *,
        kinds: Sequence[Kind],
        only: Sequence[str],
        every_s: float,
        stop_s: float,
        seed: int,
        report: Callable[[Injected], None],
    ) -> None:
        self._run_dir = run_dir
        self._kinds = tuple(kinds)
        self._only = tuple(only)
        self._every_s = every_s
        self._stop_s = stop_s
        self._random = random.Random(seed)
        self._report = report
        self._remaining: list[tuple[str, Kind]] = []
        self._num_injected = Counter[Kind]()
        self._stopped: dict[int, tuple[psutil.Process, float]] = {}
        self._began = time.monotonic()

    def run(self, faults: int) -> int:
        """Inject ``faults`` faults and return how many were injected."""
        injected = 0
        try:
            for injected, fault in enumerate(self._faults(faults), start=1):
                self._report(fault)
                if injected < faults:
                    self._sleep(self._every_s * self._random.uniform(0.5, 1.5))
            while self._stopped:
                self._sleep(POLL_INTERVAL_S)
        finally:
            self._continue_stopped(float("inf"))
        return injected

    def _faults(self, max_faults: int) -> Iterator[Injected]:
        count, victims_seen_s = 0, time.monotonic()
        injected_s = victims_seen_s
        while count < max_faults and time.monotonic() - victims_seen_s < NO_VICTIM_TIMEOUT_S:
            alive = [v for v in victims(self._run_dir) if v.name.startswith(self._only or "")]
            if alive:
                victims_seen_s = time.monotonic()
            if (fault := self._inject_next(alive)) is not None:
                count += 1
                yield fault
                victims_seen_s = injected_s = time.monotonic()
            else:
                if time.monotonic() - injected_s > NO_FAULT_TIMEOUT_S:
                    self._remaining.clear()
                self._sleep(POLL_INTERVAL_S)

    def _inject_next(self, alive: Sequence[Victim]) -> Injected | None:
        """Inject the first possible fault of the kind that was injected least; None if none is possible now."""
        if not self._remaining:
            names = dict.fromkeys(victim.name for victim in alive)
            self._remaining = [(name, kind) for name in names for kind in self._kinds if _fits(name, kind)]
            self._random.shuffle(self._remaining)
        by_name = {victim.name: victim for victim in alive if self._ready(victim)}
        for name, kind in sorted(self._remaining, key=lambda fault: self._num_injected[fault[1]]):
            victim = by_name.get(name)
            if victim is not None and (detail := self._inject(victim, kind)) is not None:
                self._remaining.remove((name, kind))
                self._num_injected[kind] += 1
                at_s = round(time.monotonic() - self._began, 3)
                return Injected(at_s=at_s, kind=kind.value, name=name, pid=victim.pid, detail=detail)
        return None

    def _ready(self, victim: Victim) -> bool:
        return victim.pid not in self._stopped and time.time() - victim.process.create_time() > MIN_AGE_S

    def _inject(self, victim: Victim, kind: Kind) -> str | None:
        """Inject a fault and return its details; None if it was not possible."""
        try:
            match kind:
                case Kind.KILL:
                    victim.process.send_signal(signal.SIGKILL)
                case Kind.TERM:
                    victim.process.send_signal(signal.SIGTERM)
                case Kind.STOP:
                    return self._stop(victim)
                case Kind.FLIP:
                    return flip(self._run_dir / victim.name, self._random)
        except psutil.NoSuchProcess:
            return None
        return ""

    def _stop(self, victim: Victim) -> str:
        seconds = min(self._stop_s, MAX_SERVER_STOP_S) if victim.name.startswith(_SERVERS) else self._stop_s
        victim.process.send_signal(signal.SIGSTOP)
        self._stopped[victim.pid] = victim.process, time.monotonic() + seconds
        return f"for {seconds:g} s"

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._continue_stopped(time.monotonic())
            time.sleep(min(left, POLL_INTERVAL_S))
        self._continue_stopped(time.monotonic())

    def _continue_stopped(self, now: float) -> None:
        """Continue the stopped processes whose time is up."""
        for pid, (process, until) in list(self._stopped.items()):
            if until <= now:
                del self._stopped[pid]
                try:
                    process.send_signal(signal.SIGCONT)
                except psutil.NoSuchProcess:
                    continue


def _fits(name: str, kind: Kind) -> bool:
    return kind is not Kind.FLIP or name.startswith("trajectories")


def flip(store: Path, draw: random.Random) -> str | None:
    """Flip one bit of one of the newest payloads of a shard. Return which one, or None if there is no payload.

    The server reads these files through memory maps, so it sees the damage at once.
    """
    payloads = sorted(_payloads(store), key=lambda one: one.key[8:])
    for one in draw.sample(payloads[-NUM_NEWEST:], k=min(len(payloads), NUM_NEWEST)):
        try:
            file = os.open(one.path, os.O_RDWR)
        except FileNotFoundError:  # the slab has been deleted
            continue
        try:
            place = one.offset if one.offset >= 0 else _find(file, one.blob)
            if place >= 0:
                byte = place + draw.randrange(one.nbytes)
                os.pwrite(file, bytes([os.pread(file, 1, byte)[0] ^ 1 << draw.randrange(8)]), byte)
                group, lease = int.from_bytes(one.key[:8], "big"), int.from_bytes(one.key[8:16], "big")
                return f"one bit of group {group}, lease {lease}"
        finally:
            os.close(file)
    return None


@dataclass(frozen=True, slots=True)
class _Payload:
    """Location of a payload that a shard has stored."""

    key: bytes
    path: Path
    offset: int
    """Byte offset in ``path``; -1 if unknown, then the place is found by searching for ``blob``."""
    nbytes: int
    blob: bytes = b""


def _payloads(store: Path) -> list[_Payload]:
    import lmdb

    payloads: list[_Payload] = []
    try:
        environment = lmdb.Environment(str(store), readonly=True, lock=False, max_dbs=8)
    except lmdb.Error:  # its server has not created it yet
        return payloads
    try:
        with environment.begin(db=environment.open_db(b"payloads", create=False)) as view:
            blobs = [(bytes(key), bytes(value)) for key, value in view.cursor()]
        payloads += [_Payload(key, store / "data.mdb", -1, len(blob), blob) for key, blob in blobs]
        with environment.begin(db=environment.open_db(b"records", create=False)) as view:
            for key, value in view.cursor():
                record = msgspec.msgpack.decode(value[DIGEST_BYTES:], type=_Record)
                if record.slab:
                    payloads.append(_Payload(bytes(key), store / "slabs" / record.slab, record.offset, record.nbytes))
    except (lmdb.Error, msgspec.MsgspecError):
        pass
    finally:
        environment.close()
    return payloads


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a shard's record that are needed here."""

    nbytes: int
    slab: str = ""
    offset: int = 0


def _find(file: int, blob: bytes) -> int:
    """Return the offset of ``blob`` in the file; -1 if it is not stored any more."""
    size, step, start = os.fstat(file).st_size, 16 << 20, 0
    while start < size:
        place = os.pread(file, step + len(blob), start).find(blob)
        if place >= 0:
            return start + place
        start += step
    return -1
