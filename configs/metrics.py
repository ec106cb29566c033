"""Destinations of a run's metrics besides ``metrics.jsonl``, and the checks of their keys."""

import re
import stat
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from msgspec import field

from staleflow.configs.errors import ConfigError
from staleflow.configs.section import Section, Text

MIN_TOKEN = 16
"""Minimum number of characters of a token."""
_LOOPBACK = re.compile(r"localhost|127(\.\d{1,3}){3}|::1")

Writer = Literal["tensorboard", "wandb"]


class Metrics(Section, frozen=True, kw_only=True):
    """Destinations of a run's metrics besides ``metrics.jsonl``, all with the same names."""

    bind: Text = ""
    """``http://host:port``: the scheduler serves ``GET /metrics`` for Prometheus at this address. Plain HTTP: loopback
    only, unless a ``token`` is set. Empty: disabled."""
    token: Text = ""
    """File of mode 0600 with a word of at least 16 characters that a reader must send (``Authorization: Bearer WORD``).
    Empty: any client that reaches ``bind`` may read."""
    writers: list[Writer] = field(default_factory=list[Writer])
    """``tensorboard`` writes to ``tensorboard`` in the run directory, ``wandb`` as that package is configured. Both run
    in the process of ``staleflow run``, and each is an extra. A writer that fails loses its metrics and never ends the
    run."""


def check_metrics(metrics: Metrics, *, insecure: bool) -> None:
    """Raise ``ConfigError`` for keys that cannot be served. ``insecure``: ``security.insecure`` allows any bind."""
    bind, token = metrics.bind, metrics.token
    if len(set(metrics.writers)) < len(metrics.writers):
        raise ConfigError("metrics.writers", metrics.writers, "each only once")
    if not bind:
        if token:
            raise ConfigError("metrics.token", token, 'it guards metrics.bind, which is missing; leave it at ""')
        return
    form = "it must be http://host:port, with a port from 1 to 65535"
    try:
        parts = urlsplit(bind)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise ConfigError("metrics.bind", bind, form) from None
    if parts.scheme != "http" or not host or not port or parts.path.strip("/") or parts.query:
        raise ConfigError("metrics.bind", bind, form)
    if not _LOOPBACK.fullmatch(host) and not token and not insecure:
        allowed = "without metrics.token only loopback may be bound: 127.0.0.1, ::1 or localhost"
        raise ConfigError("metrics.bind", bind, allowed)


def read_token(path: str) -> str:
    """Return the word in a token file; "" without a path.

    Raises ``ConfigError`` if the file does not exist, other users may read it, or the word is too short.
    """
    if not path:
        return ""
    file = Path(path)
    try:
        mode, word = file.stat().st_mode, file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("metrics.token", path, f"it cannot be read: {error}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError("metrics.token", path, "others may read it: its mode must be 0600")
    if len(word) < MIN_TOKEN or not word.isprintable() or " " in word:
        raise ConfigError("metrics.token", path, f"it must hold one word of at least {MIN_TOKEN} characters")
    return word
