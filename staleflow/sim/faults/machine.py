"""The machine under the simulated processes: what randomness it gives, and how its files behave.

The product asks the system for random names, asks which host it runs on, and writes two kinds of plain files, the
trace and the weights. While ``Machine.installed`` holds, those calls go through here: names come from the seed, hosts
from the plan, the disk of the weights can be full, a process can be killed between two of its file operations, and it
is known what of a file was synced.
"""

import errno
import importlib
import logging
import os
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

from staleflow.clients.parameters import chunks, mapped, publish, relays, written
from staleflow.clients.stage import main as stage_main
from staleflow.protocols.coordination import migration
from staleflow.runtime import supervised, weights
from staleflow.servers.parameters import relay, service, tree
from staleflow.sim.virtual import Conductor, Killed, Process, current

PIECE_BYTES: Final = 64
"""Of one message of weights: a version takes several. And relays hang in a row."""

LOOK_EVERY_S: Final = 10.0
"""Between looks at the scheduler's status, which costs more than anything else here."""

BEGIN_UNIX_NS = 1_800_000_000_000_000_000


class SimClock:
    """A ``Clock`` of virtual time; ``jump_ns`` is what the label that people read is off."""

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
        """``host_of``: the host of a process, by its name. Those of one host share files."""
        self._host_of = host_of
        self.full_folder: Path | None = None
        """Files in it cannot grow."""
        self.kill_at_rename: tuple[Path, Callable[[], Process | None]] | None = None
        """The next rename into this folder kills that process, right before or right after it."""
        self.unsupervised: set[Process] = set()
        """Processes that no supervisor started: they fill no slot and take no name from a live process."""
        self.counts: Counter[str] = Counter()
        self._synced: dict[tuple[int, int], int] = {}
        self._conductor = conductor
        self._rng = rng
        self._names = random.Random(rng.getrandbits(64))

    @contextmanager
    def installed(self) -> Generator[None]:
        """Everything that runs inside sees this machine."""
        importlib.import_module("numpy.random")  # takes randomness when it comes first, which must not be this one
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
                    (supervised, "slot", self._slot),
                    (tree, "FANOUT", 1),
                    (migration, "MIN_AGE_MS", 200),  # groups here are written in a second
                    (migration, "MIN_LEFT_S", 0.05),
                    *((module, "LOOK_EVERY_S", LOOK_EVERY_S) for module in (relay, stage_main)),
                    *((module, "CHUNK_BYTES", PIECE_BYTES) for module in (weights, chunks, publish)),
                    (weights, "SPAN_BYTES", PIECE_BYTES),
                    *((module, "boot_id", self._host) for module in (mapped, written, relays, relay, service)),
                ):
                    changes.enter_context(mock.patch.object(where, name, what))
                yield
        finally:
            logging.disable(level)
            random.setstate(state)

    @contextmanager
    def over(self) -> Generator[None]:
        """Nothing inside writes to a trace any more: whoever was killed would, as Python unwinds it."""
        with mock.patch.object(os, "pwrite", side_effect=OSError(errno.EIO, os.strerror(errno.EIO))):
            yield

    def synced(self, path: Path) -> int:
        """Bytes of the file that a power failure leaves."""
        found = path.stat()
        return min(self._synced.get((found.st_dev, found.st_ino), 0), found.st_size)

    def _slot(self) -> str:
        process = current()
        return "" if process in self.unsupervised else process.name

    def _host(self) -> str:
        return self._host_of(current().name)

    def _sync(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        self._synced[found.st_dev, found.st_ino] = found.st_size

    def _allocate(self, real: Callable[..., None]) -> Callable[..., None]:
        def allocate(descriptor: int, offset: int, size: int) -> None:
            if self.full_folder is not None:
                self.counts["weights full"] += 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(descriptor, offset, size)

        return allocate

    def _rename(self, real: Callable[..., None]) -> Callable[..., None]:
        def rename(source: Any, target: Any, **options: Any) -> None:
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
