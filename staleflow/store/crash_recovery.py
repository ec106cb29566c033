"""A store whose last owner was ended by a fault in memory is looked at before anything is served of it.

LMDB believes what stands in its pages: a changed byte there may end whoever reads it by SIGSEGV, SIGBUS or an
assertion, without a word about the file.

- ``note_crashes``: such an end of this process leaves what its threads were doing in the store's ``crash``. Nothing
  else does: not ``kill -9``, not an exception, not a power failure.
- ``open_store``: where something is noted, a process of its own reads all of the store first. If that one ends
  likewise, or finds damage, the store is ``StoreCorrupt``, which names the file, at this start and at every other,
  until another file is there.
"""

import faulthandler
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from staleflow.configs.durable_files import make_folder
from staleflow.store.base import Durability, StoreCorrupt, StoreError
from staleflow.store.lmdb import FILE, Store

log = logging.getLogger(__name__)

CRASH = "crash"
KEPT = "crash.old"
"""The last note, after a look that found nothing."""
_DAMAGED = 4
"""Exit code of a look: its output says what is damaged."""


def note_crashes(folder: Path) -> None:
    """From now on, until the process ends, its fatal faults are noted in the folder of its store."""
    make_folder(folder)
    faulthandler.enable(os.open(folder / CRASH, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644))


def open_store(path: Path, *, tables: Sequence[str], map_bytes: int, durability: Durability) -> Store:
    """The store in ``path``, as ``Store`` opens it; ``StoreCorrupt`` also for damage that would end this process."""
    crash = path / CRASH
    if crash.exists() and crash.stat().st_size:
        log.warning("%s: its last process was ended by a fault; the store is looked at first", path)
        _look_apart(path, [str(map_bytes), durability, *tables])
        shutil.copyfile(crash, path / KEPT)
        os.truncate(crash, 0)
        log.warning("%s: nothing is damaged; what ended that process stands in %s", path, KEPT)
    return Store(path, tables=tables, map_bytes=map_bytes, durability=durability)


def _look_apart(path: Path, how: Sequence[str]) -> None:
    looking = (sys.executable, "-m", "staleflow.store.crash_recovery", str(path), *how)
    ended = subprocess.run(looking, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    code, file = ended.returncode, path / FILE
    if code < 0:
        raise StoreCorrupt(f"{file} is damaged: who reads all of it is ended by {signal.Signals(-code).name}")
    if code == _DAMAGED:
        raise StoreCorrupt(ended.stdout.strip())
    if code:
        raise StoreError(f"{file} could not be looked at, exit code {code}: {ended.stderr.strip()[-300:]}")


def main(arguments: Sequence[str]) -> int:
    """Look at one store; any other trouble than damage is met again by who opens it."""
    path, map_bytes, durability, *tables = arguments
    try:
        store = Store(Path(path), tables=tables, map_bytes=int(map_bytes), durability=cast("Durability", durability))
        store.look()
        store.close()
    except StoreCorrupt as error:
        sys.stdout.write(f"{error}\n")
        return _DAMAGED
    except StoreError:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
