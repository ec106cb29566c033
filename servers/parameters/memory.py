"""The folder of versions in shared memory, and the choice between it and the disk."""

import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path

from staleflow.configs.durable_files import make_folder
from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Parameters
from staleflow.configs.version_store import in_memory, may_use_memory, room_for
from staleflow.process import memory_folder
from staleflow.process.main_memory import available

log = logging.getLogger(__name__)


class Memory:
    """Folder in shared memory beside a folder on disk. With ``parameters.store`` "auto", versions go to the disk from
    the first one on for which there is no room in memory."""

    def __init__(self, folder: Path, parameters: Parameters) -> None:
        """Raise ``Unusable`` if another process uses the folder."""
        self.folder = folder
        self._lock: int | None = memory_folder.lock(folder)
        self._parameters = parameters
        self._accepted_bytes = -1
        """Size of a version up to which all versions fit into memory."""
        self._left = False

    def close(self) -> None:
        """Let another process use the folder, or remove it. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    @property
    def required(self) -> bool:
        """True if versions may not go to the disk instead."""
        return self._parameters.store == "memory"

    def accepts(self, nbytes: int) -> bool:
        """Return True if a version of this size is to lie in memory.

        Raise ``ConfigError`` if it must, and all versions can never fit.
        """
        if not self._left and nbytes > self._accepted_bytes:
            self._decide(nbytes)
        return not self._left

    def leave(self, why: str) -> None:
        """Store the further versions on disk."""
        self._left = True
        log.info("versions are stored on disk: %s", why)

    def _decide(self, nbytes: int) -> None:
        needed, shared = room_for(self._parameters, nbytes), shutil.disk_usage(self.folder)
        versions = f"{needed >> 20} MiB for {needed // max(nbytes, 1)} versions of the weights"
        if self.required and needed > shared.total:
            allowed = (
                f"{versions} are needed and {memory_folder.SHARED_MEMORY} has {shared.total >> 20} MiB: enlarge it "
                '(in containers: --shm-size), or choose "disk" or "auto"'
            )
            raise ConfigError("parameters.store", "memory", allowed)
        stored = _nbytes(self.folder)
        free = available() + stored
        if in_memory(self._parameters, nbytes, free) and (self.required or needed <= shared.free + stored):
            if self._accepted_bytes < 0:
                log.info("versions are stored in memory, in %s", self.folder)
            self._accepted_bytes = nbytes
        else:
            room = f"{free >> 20} MiB of memory and {shared.free + stored >> 20} MiB of {memory_folder.SHARED_MEMORY}"
            self.leave(f"{versions} are needed; {room} are free")


def _nbytes(folder: Path) -> int:
    """Return the size of all files, while another thread may delete some."""
    total = 0
    for file in folder.iterdir():
        with suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


def open_memory(folder: Path, parameters: Parameters) -> Memory | None:
    """Return the memory for the versions of a folder on disk; None if they lie on disk. Raise ``ConfigError`` if they
    must lie in memory, and it cannot be used."""
    if not may_use_memory(parameters):
        return None
    make_folder(folder)  # a sweep removes memory whose folder on disk is missing
    try:
        return Memory(memory_folder.create(folder), parameters)
    except memory_folder.Unusable as error:
        if parameters.store == "memory":
            raise ConfigError("parameters.store", "memory", f'{error}; or choose "disk" or "auto"') from error
        log.info("versions are stored on disk: %s", error)
        return None
