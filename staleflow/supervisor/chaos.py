"""Faults for a run on this machine, on purpose, so that anyone can watch it survive them.

- Processes are found by their command lines: those of ``staleflow run`` as well as those that a person started.
- Which fault comes when follows from a seed: a shuffled deck of every (process, kind), of which the rarest kind so far
  that can be caused comes next, and waits drawn at random.
- What was stopped goes on in the end, whatever ends this process but ``kill -9``.
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

YOUNG_S = 6.0
"""A process that just started is spared: the supervisor gives up one that dies five times at once."""
GONE_S = 10.0
"""Nothing to harm for so long: the run is over."""
STUCK_S = 15.0
"""No fault could be caused for so long: what is left of the deck may never be (its process has left for good, its shard
stores nothing), so a new one is shuffled. Longer than a process that died takes to be there again and not young."""
POLL_INTERVAL_S = 0.1
SERVER_STOP_S = 5.0
"""A server that is stopped is gone to its peers after three heartbeats, and then back."""
NEWEST = 16
"""Records of a shard that a bit is turned in one of: they are still to be trained."""
DIGEST_BYTES = 32
"""Before the bytes of a record."""
_SERVERS = ("scheduler", "trajectories", "parameters")


class Kind(StrEnum):
    """What is done to a process."""

    KILL = "kill"
    """SIGKILL: it ends where it stands."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT after a while: a worker comes back as a zombie whose leases are over."""
    TERM = "term"
    """SIGTERM: it drains and leaves."""
    FLIP = "flip"
    """One bit of a stored payload, in the file of a trajectory server that runs."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A process of the run."""

    name: str
    process: psutil.Process

    @property
    def pid(self) -> int:
        return int(self.process.pid)


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """One fault, as it is told."""

    at_s: float
    """Seconds since the first look."""
    kind: str
    name: str
    pid: int
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.at_s:7.1f} s  {self.kind:4}  {self.name} ({self.pid}) {self.detail}".rstrip()


def victims(run_dir: Path) -> list[Victim]:
    """Every process of this run that works, by name."""
    found: list[Victim] = []
    for process in psutil.process_iter():
        try:
            name = name_of(process.cmdline(), run_dir, Path(process.cwd()))
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        if name:
            found.append(Victim(name, process))
    return sorted(found, key=lambda victim: (victim.name, victim.pid))


def name_of(words: Sequence[str], run_dir: Path, folder: Path) -> str:
    """What the process with this command line and working folder is called; empty if it is none of this run."""
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
    """Causes faults until ``run`` has done as many as asked, or there is nobody left."""

    def __init__(
        self,
        run_dir: Path,
        *,
        kinds: Sequence[Kind],
        only: Sequence[str],
        every_s: float,
        stop_s: float,
        seed: int,
        tell: Callable[[Done], None],
    ) -> None:
        self._run_dir = run_dir
        self._kinds = tuple(kinds)
        self._only = tuple(only)
        self._every_s = every_s
        self._stop_s = stop_s
        self._random = random.Random(seed)
        self._tell = tell
        self._deck: list[tuple[str, Kind]] = []
        self._done = Counter[Kind]()
        self._stopped: dict[int, tuple[psutil.Process, float]] = {}
        self._began = time.monotonic()

    def run(self, faults: int) -> int:
        """How many faults there were."""
        done = 0
        try:
            for done, fault in enumerate(self._faults(faults), start=1):
                self._tell(fault)
                if done < faults:
                    self._rest(self._every_s * self._random.uniform(0.5, 1.5))
            while self._stopped:
                self._rest(POLL_INTERVAL_S)
        finally:
            self._wake(float("inf"))
        return done

    def _faults(self, most: int) -> Iterator[Done]:
        count, seen = 0, time.monotonic()
        caused = seen
        while count < most and time.monotonic() - seen < GONE_S:
            there = [v for v in victims(self._run_dir) if v.name.startswith(self._only or "")]
            if there:
                seen = time.monotonic()
            if (fault := self._next(there)) is not None:
                count += 1
                yield fault
                seen = caused = time.monotonic()
            else:
                if time.monotonic() - caused > STUCK_S:
                    self._deck.clear()
                self._rest(POLL_INTERVAL_S)

    def _next(self, there: Sequence[Victim]) -> Done | None:
        """The first fault of the deck that can be caused now, of the kind that there were least of."""
        if not self._deck:
            names = dict.fromkeys(victim.name for victim in there)
            self._deck = [(name, kind) for name in names for kind in self._kinds if _fits(name, kind)]
            self._random.shuffle(self._deck)
        by_name = {victim.name: victim for victim in there if self._ready(victim)}
        for name, kind in sorted(self._deck, key=lambda card: self._done[card[1]]):
            victim = by_name.get(name)
            if victim is not None and (detail := self._cause(victim, kind)) is not None:
                self._deck.remove((name, kind))
                self._done[kind] += 1
                at_s = round(time.monotonic() - self._began, 3)
                return Done(at_s=at_s, kind=kind.value, name=name, pid=victim.pid, detail=detail)
        return None

    def _ready(self, victim: Victim) -> bool:
        return victim.pid not in self._stopped and time.time() - victim.process.create_time() > YOUNG_S

    def _cause(self, victim: Victim, kind: Kind) -> str | None:
        """What is to be said of it; None when it could not be done."""
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
        seconds = min(self._stop_s, SERVER_STOP_S) if victim.name.startswith(_SERVERS) else self._stop_s
        victim.process.send_signal(signal.SIGSTOP)
        self._stopped[victim.pid] = victim.process, time.monotonic() + seconds
        return f"for {seconds:g} s"

    def _rest(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._wake(time.monotonic())
            time.sleep(min(left, POLL_INTERVAL_S))
        self._wake(time.monotonic())

    def _wake(self, now: float) -> None:
        """Let those go on whose time is over."""
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
    """Turn one bit of one of the newest payloads in a shard's files; which one, or None when there is none to be found.

    The server reads through maps of these very files, so it sees the damage at once.
    """
    found = sorted(_payloads(store), key=lambda one: one.key[8:])
    for one in draw.sample(found[-NEWEST:], k=min(len(found), NEWEST)):
        try:
            file = os.open(one.path, os.O_RDWR)
        except FileNotFoundError:  # a slab that nobody needs any more
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
    """One that a shard has stored."""

    key: bytes
    path: Path
    offset: int
    """In that file; -1: wherever ``blob`` is."""
    nbytes: int
    blob: bytes = b""


def _payloads(store: Path) -> list[_Payload]:
    import lmdb

    found: list[_Payload] = []
    try:
        environment = lmdb.Environment(str(store), readonly=True, lock=False, max_dbs=8)
    except lmdb.Error:  # its server has not made it yet
        return found
    try:
        with environment.begin(db=environment.open_db(b"payloads", create=False)) as view:
            blobs = [(bytes(key), bytes(value)) for key, value in view.cursor()]
        found += [_Payload(key, store / "data.mdb", -1, len(blob), blob) for key, blob in blobs]
        with environment.begin(db=environment.open_db(b"records", create=False)) as view:
            for key, value in view.cursor():
                record = msgspec.msgpack.decode(value[DIGEST_BYTES:], type=_Record)
                if record.slab:
                    found.append(_Payload(bytes(key), store / "slabs" / record.slab, record.offset, record.nbytes))
    except (lmdb.Error, msgspec.MsgspecError):
        pass
    finally:
        environment.close()
    return found


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of a shard's record."""

    nbytes: int
    slab: str = ""
    offset: int = 0


def _find(file: int, blob: bytes) -> int:
    """Where a record lies in the file; -1 when it does not any more."""
    size, step, start = os.fstat(file).st_size, 16 << 20, 0
    while start < size:
        place = os.pread(file, step + len(blob), start).find(blob)
        if place >= 0:
            return start + place
        start += step
    return -1
