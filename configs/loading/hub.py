"""Models by their id on the Hugging Face hub. Only the local cache is read; nothing is downloaded."""

import importlib
import re
from pathlib import Path
from typing import Any

from staleflow.configs.errors import ConfigError

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_WEIGHTS = ("*.safetensors", "*.bin")


def is_hub_id(text: str) -> bool:
    """Return True if ``text`` has the form ``org/name``. A relative path may have the same form."""
    return _ID.fullmatch(text) is not None


def locate_model(text: str, key: str = "model.path") -> Path:
    """Return the directory of a model: ``text`` itself, or the snapshot of a hub id in the local cache.

    Raises ``ConfigError`` for a hub id whose weights are not in the cache.
    """
    if not is_hub_id(text):
        return Path(text)
    snapshot = _cached_snapshot(text)
    if snapshot is None or not any(path for pattern in _WEIGHTS for path in snapshot.glob(pattern)):
        allowed = f"no such directory, and no such model in the local Hugging Face cache: hf download {text}"
        raise ConfigError(key, text, allowed)
    return snapshot


def _cached_snapshot(model_id: str) -> Path | None:
    """Return the snapshot of the revision ``main``; None if the cache has none."""
    try:
        hub: Any = importlib.import_module("huggingface_hub")  # comes with transformers, and not every process needs it
        errors: Any = importlib.import_module("huggingface_hub.errors")
    except ImportError:
        return None
    try:
        return Path(hub.snapshot_download(model_id, local_files_only=True))
    except (errors.LocalEntryNotFoundError, errors.HFValidationError):
        return None
