"""Check a store in a separate process first if its last owner was killed by a memory fault.

LMDB trusts the content of its pages: a changed byte there may kill the reader by SIGSEGV, SIGBUS or an assertion,
without naming the file.

- ``note_crashes``: a fatal fault of this process writes the stacks of its threads to the store's file ``crash``. No
  other end does: not ``kill -9``, not an exception, not a power failure.
- ``open_store``: if that file has content, a separate process reads the whole store first. If that process is killed as
  well, or finds damage, opening raises ``StoreCorrupt`` with the file's name, at this start and every later one, until
  the file is replaced.
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
KEPT_NOTE = "crash.old"
"""The last crash note, after a check that found no damage."""
_DAMAGED = 4
"""Exit code of the checking process if it found damage, which it prints."""


def note_crashes(folder: Path) -> None:
    """Write fatal faults of this process to the folder of its store, until the process ends."""
    make_folder(folder)
    faulthandler.enable(os.open(folder / CRASH, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644))


def open_store(path: Path, *, tables: Sequence[str], map_bytes: int, durability: Durability) -> Store:
    """Open the store in ``path``. Raises ``StoreCorrupt`` also for damage that would kill this process."""
    crash = path / CRASH
    if crash.exists() and crash.stat().st_size:
        log.warning("%s: its last process was killed by a fault; checking the store first", path)
        _check_in_subprocess(path, [str(map_bytes), durability, *tables])
        shutil.copyfile(crash, path / KEPT_NOTE)
        os.truncate(crash, 0)
        log.warning("%s: no damage found; the stacks of the killed process are in %s", path, KEPT_NOTE)
    return Store(path, tables=tables, map_bytes=map_bytes, durability=durability)


def _check_in_subprocess(path: Path, arguments: Sequence[str]) -> None:
    command = (sys.executable, "-m", "staleflow.store.crash_recovery", str(path), *arguments)
    finished = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    code, file = finished.returncode, path / FILE
    if code < 0:
        raise StoreCorrupt(f"{file} is damaged: reading all of it raises {signal.Signals(-code).name}")
    if code == _DAMAGED:
        raise StoreCorrupt(finished.stdout.strip())
    if code:
        raise StoreError(f"{file} could not be checked, exit code {code}: {finished.stderr.strip()[-300:]}")


def main(arguments: Sequence[str]) -> int:
    """Check one store. Errors other than damage are left to the process that opens the store afterwards."""
    path, map_bytes, durability, *tables = arguments
    try:
        store = Store(Path(path), tables=tables, map_bytes=int(map_bytes), durability=cast("Durability", durability))
        store.verify()
        store.close()
    except StoreCorrupt as error:
        sys.stdout.write(f"{error}\n")
        return _DAMAGED
    except StoreError:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
