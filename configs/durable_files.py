"""Atomic file replacement that survives a power failure: a file has the old content or the new one.

A file is durable after three syncs: of its content, of the folder that contains it, and, for a new folder, of the
folder above. A rename without the first sync may leave an empty file after a power failure; without the others the name
may be lost.
"""

import os
import secrets
from pathlib import Path


def write_durably(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Replace a file atomically. With ``sync`` it is durable on return. A failure leaves the old file."""
    # A random name rather than the process id: in containers that share the folder every process may have the id 1.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(data)
        if sync:
            replace_durably(temporary, path)
        else:
            temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def replace_durably(source: Path, target: Path) -> None:
    """Rename a file, or a folder with its contents, after making the contents durable."""
    sync_tree(source)
    source.replace(target)
    sync_path(target.parent)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Create a folder and its missing parents. Their names are durable on return."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(mode=mode, exist_ok=True)
    sync_path(path.parent)


def sync_tree(path: Path) -> None:
    """Make the content of a file, or of a folder and everything in it, durable."""
    if path.is_dir():
        for below in path.iterdir():
            if not below.is_symlink():
                sync_tree(below)
    sync_path(path)


def sync_path(path: Path) -> None:
    """Make the content of a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
