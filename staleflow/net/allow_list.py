"""The allow-list: public keys that may connect, each with its role. Reloaded when the file changes, to rotate keys
live.

A file that cannot be read, or that lacks the servers' key, leaves the list unchanged and is logged, so a slip of an
editor neither locks out workers nor admits strangers. ``keygen`` writes the servers' key last: a writer that truncates
the file in place and is read halfway produces a list without that key.
"""

import logging
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from staleflow.configs.durable_files import replace_durably
from staleflow.configs.errors import ConfigError
from staleflow.net.keys import as_key, check_private
from staleflow.net.permissions import Role

log = logging.getLogger(__name__)

_HEADER = """\
# Allowed keys: one table per role, one line per key (name = "public key"). Servers reload this file when it changes:
# a removed key is rejected at once, an added key is accepted at once.
"""


class Holder(NamedTuple):
    """Owner of a key."""

    role: Role
    name: str


def read_allowed(path: Path) -> dict[bytes, Holder]:
    """Return public keys (Z85) and their holders. Raise ``ConfigError`` if the file is no allow-list."""
    try:
        return _read(path)
    except OSError as error:
        raise ConfigError("allow-list", str(path), f"it cannot be read: {error.strerror}") from None


def _read(path: Path) -> dict[bytes, Holder]:
    """Like ``read_allowed``, but raise ``OSError`` when the file cannot be read."""
    check_private(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("allow-list", str(path), f"it must be TOML: {error}") from None
    holders: dict[bytes, Holder] = {}
    for section, names in table.items():
        if section not in list(Role) or not isinstance(names, dict):
            raise ConfigError("allow-list", str(path), f'it has "{section}"; its tables are {", ".join(Role)}')
        for name, value in cast(dict[str, Any], names).items():
            public = as_key(value, path, f"{section}.{name}")
            if public in holders:
                other = holders[public]
                raise ConfigError(
                    "allow-list", str(path), f"{other.role}.{other.name} and {section}.{name} are one key"
                )
            holders[public] = Holder(Role(section), name)
    return holders


def write_allowed(path: Path, holders: Mapping[bytes, Holder]) -> None:
    """Replace the file atomically, with mode 0600."""
    text = _HEADER
    for role in Role:
        text += f"\n[{role}]\n"
        text += "".join(f'{h.name} = "{public.decode()}"\n' for public, h in holders.items() if h.role is role)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    replace_durably(beside, path)


class AllowList:
    """The current content of the allow-list file. Raises ``ConfigError`` at construction if there is no usable file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._signature_read = self._signature()
        self._read_failed = False
        """True while the last version of the file could not be read: retry although the file has not changed."""
        self._holders = read_allowed(path)

    def find(self, public: bytes) -> Holder | None:
        """Return the holder of a key (Z85), or None."""
        return self._holders.get(public)

    def refresh(self) -> bool:
        """Reload the file if it changed; return True if the list is different now."""
        signature = self._signature()
        unchanged = signature == self._signature_read
        if unchanged and not self._read_failed:
            return False
        self._signature_read, self._read_failed = signature, False
        try:
            holders = _read(self._path)
            if _has_server(self._holders) and not _has_server(holders):
                raise ConfigError("allow-list", str(self._path), "it lacks the key of the servers")
        except (OSError, ConfigError) as error:
            self._read_failed = isinstance(error, OSError)
            if unchanged and self._read_failed:  # already logged
                return False
            log.error("allow-list not reloaded: %s", error)
            return False
        if holders == self._holders:
            return False
        log.info("allow-list reloaded: %d keys, %d before", len(holders), len(self._holders))
        self._holders = holders
        return True

    def _signature(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino, status.st_size


def _has_server(holders: Mapping[bytes, Holder]) -> bool:
    return any(holder.role is Role.SERVER for holder in holders.values())
