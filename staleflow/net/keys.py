"""Key files: one CURVE key pair, its role, and the public key of the servers it may connect to.

A worker needs its own key file only. A secret exists only in a file of mode 0600: never in a configuration, on a
command line, in the environment or in a ``repr``.
"""

import os
import re
import stat
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import zmq

from staleflow.configs.durable_files import sync_path
from staleflow.configs.errors import ConfigError
from staleflow.net.permissions import Role

VARIABLE: Final = "STALEFLOW_KEY"
"""Environment variable: path of this process's key file, or of a folder of key files, instead of ``security.keys``."""
ALLOWED: Final = "allowed.toml"
"""Name of the allow-list, in the folder of the key files."""
KEY_CHARS: Final = 40
"""Length of a key in Z85."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
_HEADER: Final = "# A staleflow key. Its holder has the rights of its role: keep it secret, mode 0600.\n"
_FOREIGN: Final = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key pair and the servers' public key, all in Z85."""

    role: Role
    public: bytes
    secret: bytes = field(repr=False)
    server: bytes
    """Public key of the servers."""
    path: str
    """File that the key was read from."""


def new_pair() -> tuple[bytes, bytes]:
    """Return a new public and secret key, in Z85."""
    return zmq.curve_keypair()


def write_key(path: Path, role: Role, public: bytes, secret: bytes, server: bytes) -> None:
    """Create a key file of mode 0600. Raise ``ConfigError`` if the file exists; it is left unchanged."""
    text = f'{_HEADER}role = "{role}"\npublic = "{public.decode()}"\nsecret = "{secret.decode()}"\n'
    data = f'{text}server = "{server.decode()}"\n'.encode()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError("key file", str(path), "the file exists; choose another name, or delete it first") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    sync_path(path)
    sync_path(path.parent)


def read_key(path: Path) -> Key:
    """Read a key file. Raise ``ConfigError`` if it is no key file or if other users may access it."""
    table = _table(path)
    try:
        role = Role(table.get("role", ""))
    except ValueError:
        raise ConfigError("key file", str(path), f"its role must be one of {', '.join(Role)}") from None
    keys = {name: as_key(table.get(name), path, name) for name in ("public", "secret", "server")}
    return Key(role=role, path=str(path), **keys)


def as_key(value: object, path: Path, name: str) -> bytes:
    """Return the bytes of a key in Z85. The ``ConfigError`` for a bad value never contains the value."""
    if not isinstance(value, str) or len(value) != KEY_CHARS or not value.isascii():
        raise ConfigError("key file", str(path), f"its {name} must be a key of {KEY_CHARS} characters")
    return value.encode()


def _table(path: Path) -> dict[str, Any]:
    try:
        check_private(path)
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("key file", str(path), "no such file; staleflow keygen makes it") from None
    except OSError as error:
        raise ConfigError("key file", str(path), f"it cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise ConfigError("key file", str(path), "it must be TOML, as staleflow keygen writes it") from None


def check_private(path: Path) -> None:
    """Raise ``ConfigError`` if other users may access the file or own it, ``OSError`` if it does not exist."""
    status = path.stat()
    if status.st_uid not in (os.getuid(), 0):
        raise ConfigError("key file", str(path), "it belongs to another user")
    if status.st_mode & _FOREIGN:
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError("key file", str(path), f"others may use it (mode {mode:04o}); it must be private: chmod 600")


def check_name(name: str) -> str:
    """Return ``name`` if it is a valid key name."""
    if not _NAME.fullmatch(name):
        raise ConfigError("--name", name, "letters, digits, '_' and '-' only, at most 63")
    return name
