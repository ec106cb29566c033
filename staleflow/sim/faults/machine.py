"""The machine under the simulated processes: its randomness, its hosts and its files.

The product requests random names from the system, reads which host it runs on, and writes two kinds of plain files, the
trace and the weights. Inside ``Machine.installed`` those calls are redirected: names come from the seed, hosts from the
plan, the disk of the weights can be full, a process can be killed between two of its file operations, and the synced
part of each file is recorded.
"""

# pyright: reportPrivateUsage=false

import errno
import importlib
import logging
import mmap
import os
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

from staleflow.clients import slab_reader as slab_readers
from staleflow.clients.rollout import slab_writer as slab_writers
from staleflow.clients.stage import main as stage_main
from staleflow.clients.stage import worker as stage_worker
from staleflow.clients.trainer.data import fetch as fetching
from staleflow.clients.weights import chunks, local_upload, mapped, publish, relays
from staleflow.net import weights
from staleflow.process import readiness
from staleflow.protocols.coordination import migration
from staleflow.servers.parameters import service, tree
from staleflow.servers.parameters.relay import service as relay
from staleflow.servers.trajectories import service as trajectory_service
from staleflow.servers.trajectories import slabs, stage_calls
from staleflow.sim.faults.plan import NEAR
from staleflow.sim.virtual import Conductor, Killed, Process, current

PIECE_BYTES: Final = 64
"""Maximum size of one message of weights, so that a version takes several. Relays form a chain."""

SLAB_BYTES: Final = 32 << 10
"""Size of a slab: a worker fills many, and reuses those that hold no live payload."""
WITHOUT: Final = 8
"""Groups sent in frames before a worker asks a shard without room for a slab again."""
MAX_MAPPED: Final = 8
"""Slabs that a reader keeps mapped."""

POLL_INTERVAL_S: Final = 10.0
"""Interval of status polls, which cost more than anything else here."""

BEGIN_UNIX_NS = 1_800_000_000_000_000_000


class SimClock:
    """A ``Clock`` of virtual time; ``jump_ns`` is the error of its wall-clock time."""

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor
        self.jump_ns = 0

    def now_ns(self) -> int:
        return round(self._conductor.now_s * 1e9)

    def now_ms(self) -> int:
        return self.now_ns() // 1_000_000

    def unix_ns(self) -> int:
        return BEGIN_UNIX_NS + self.now_ns() + self.jump_ns


class Machine:
    """Files and randomness of one run."""

    def __init__(self, conductor: Conductor, rng: random.Random, host_of: Callable[[str], str]) -> None:
        """``host_of`` returns the host of a process, by its name. Processes of one host share files."""
        self._host_of = host_of
        self.full_folder: Path | None = None
        """Folder whose files cannot grow."""
        self.kill_at_rename: tuple[Path, Callable[[], Process | None]] | None = None
        """The next rename into this folder kills that process, right before or right after it."""
        self.unsupervised: set[Process] = set()
        """Processes that no supervisor started: they fill no slot and take no name from a live process."""
        self.boots = 0
        """Number of restarts of the servers' host."""
        self.num_renames = 0
        self.lent: dict[str, mmap.mmap] = {}
        """Slabs that live rollout workers write into, as they have mapped them, by name."""
        self.counts: Counter[str] = Counter()
        self._synced: dict[tuple[int, int], int] = {}
        self._conductor = conductor
        self._rng = rng
        self._names = random.Random(rng.getrandbits(64))

    @contextmanager
    def installed(self) -> Generator[None]:
        """Run the block on this machine."""
        # consumes randomness at its first import, which must not come from this seed
        importlib.import_module("numpy.random")
        state, level = random.getstate(), logging.root.manager.disable
        random.seed(self._rng.getrandbits(64))
        logging.disable(logging.CRITICAL)
        names = self._names
        try:
            with ExitStack() as changes:
                for where, name, what in (
                    (secrets, "token_hex", lambda size=32: names.randbytes(size).hex()),
                    (secrets, "randbits", names.getrandbits),
                    (time, "monotonic", lambda: self._conductor.now_s),
                    (os, "fdatasync", self._sync),
                    (os, "fsync", self._sync),
                    (os, "posix_fallocate", self._allocate(os.posix_fallocate)),
                    (os, "replace", self._rename(os.replace)),
                    (os, "rename", self._rename(os.rename)),
                    (readiness, "slot", self._slot),
                    (tree, "FANOUT", 1),
                    (migration, "MIN_AGE_MS", 200),  # groups of the simulation are written within a second
                    (migration, "MIN_LEFT_S", 0.05),
                    *((module, "POLL_INTERVAL_S", POLL_INTERVAL_S) for module in (relay, stage_main)),
                    *((module, "CHUNK_BYTES", PIECE_BYTES) for module in (weights, chunks, publish)),
                    (weights, "SPAN_BYTES", PIECE_BYTES),
                    *((module, "boot_id", self._host) for module in (mapped, local_upload, relays, relay, service)),
                    *((module, "boot_id", self._host) for module in (slab_writers, fetching, stage_worker)),
                    *((module, "boot_id", self._host) for module in (slabs, trajectory_service, stage_calls)),
                    (slabs, "MIN_SLAB_BYTES", SLAB_BYTES),
                    (slabs, "MAX_SLAB_BYTES", SLAB_BYTES),
                    (slab_writers, "GROUPS_BEFORE_RETRY", WITHOUT),
                    (slab_readers, "MAX_MAPPED", MAX_MAPPED),
                    (slabs, "_mapped", self._map_to_read("shard", slabs._mapped)),
                    (slab_readers, "_mapped", self._map_to_read("reader", slab_readers._mapped)),
                    (slab_writers, "_mapped", self._map_to_write(slab_writers._mapped)),
                ):
                    changes.enter_context(mock.patch.object(where, name, what))
                yield
        finally:
            logging.disable(level)
            random.setstate(state)

    @contextmanager
    def over(self) -> Generator[None]:
        """Prevent writes to a trace inside the block: killed processes would write when Python unwinds them."""
        with mock.patch.object(os, "pwrite", side_effect=OSError(errno.EIO, os.strerror(errno.EIO))):
            yield

    def synced(self, path: Path) -> int:
        """Return the number of bytes of the file that survive a power failure."""
        status = path.stat()
        return min(self._synced.get((status.st_dev, status.st_ino), 0), status.st_size)

    def _slot(self) -> str:
        process = current()
        return "" if process in self.unsupervised else process.name

    def _host(self) -> str:
        host = self._host_of(current().name)
        return f"{host}, boot {self.boots}" if host == NEAR else host

    def _map_to_read(self, kind: str, real: Callable[[Path], memoryview]) -> Callable[[Path], memoryview]:
        """Return a mapping function whose slabs are unmapped when their process ends, unless it still refers to
        them."""

        def mapped(path: Path) -> memoryview:
            data = real(path)
            self.counts[f"slabs mapped by a {kind}"] += 1
            current().on_end.append(partial(_release, data.release))
            return data

        return mapped

    def _map_to_write(self, real: Callable[[Path, int], mmap.mmap]) -> Callable[[Path, int], mmap.mmap]:
        def mapped(path: Path, nbytes: int) -> mmap.mmap:
            data = self.lent[path.name] = real(path, nbytes)
            self.counts["slabs mapped by a writer"] += 1

            def over() -> None:
                self.lent.pop(path.name, None)
                _release(data.close)

            current().on_end.append(over)
            return data

        return mapped

    def _sync(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        self._synced[status.st_dev, status.st_ino] = status.st_size

    def _allocate(self, real: Callable[..., None]) -> Callable[..., None]:
        def allocate(descriptor: int, offset: int, size: int) -> None:
            if self.full_folder is not None:
                self.counts["weights full"] += 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(descriptor, offset, size)

        return allocate

    def _rename(self, real: Callable[..., None]) -> Callable[..., None]:
        def rename(source: Any, target: Any, **options: Any) -> None:
            self.num_renames += 1
            if self.kill_at_rename is None or Path(target).parent != self.kill_at_rename[0]:
                real(source, target, **options)
                return
            process = self.kill_at_rename[1]()
            self.kill_at_rename = None
            if self._rng.random() < 0.5:
                real(source, target, **options)
            if process is not None:
                self.counts["killed at a rename"] += 1
                self._conductor.kill(process)
                raise Killed

        return rename


def _release(end: Callable[[], None]) -> None:
    with suppress(BufferError):  # an array of the dead process still refers to it
        end()
