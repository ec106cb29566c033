"""Files of a dataset in the local cache of the Hugging Face hub. Nothing is downloaded."""

import importlib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.extras import install

SCHEME = "hf://"
FORM = "it must be hf://ORGANIZATION/NAME, optionally followed by /PATTERN of its files, such as /main/train-*.parquet"
SPLIT = "train"
"""Split that is read without a pattern."""
SUFFIXES = (".jsonl", ".parquet")


def is_hub(path: str) -> bool:
    """Return whether a path of prompts names a dataset of the hub."""
    return path.startswith(SCHEME)


def hub_files(key: str, path: str) -> list[Path]:
    """Return the files that ``path`` names, by name. Raise ``ConfigError`` if they are not in the cache."""
    organization, _, rest = path.removeprefix(SCHEME).partition("/")
    name, _, pattern = rest.partition("/")
    if not organization or not name:
        raise ConfigError(key, path, FORM)
    folder = _snapshot(key, path, f"{organization}/{name}")
    files = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.suffix in SUFFIXES}
    chosen = [file for file in sorted(files) if (fnmatch(file, pattern) if pattern else _is_of_split(file))]
    if not chosen:
        wanted = f'no file matches "{pattern}"' if pattern else f'no .jsonl or .parquet file has "{SPLIT}" in its name'
        there = ", ".join(sorted(files)[:8]) or "no .jsonl or .parquet file"
        raise ConfigError(key, path, f"{wanted}; the dataset has {there}")
    return [files[file] for file in chosen]


def _is_of_split(file: str) -> bool:
    return any(part.startswith(SPLIT) for part in file.split("/"))


def _snapshot(key: str, path: str, dataset: str) -> Path:
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        errors: Any = importlib.import_module("huggingface_hub.errors")
    except ImportError:
        raise ConfigError(key, path, f"the hub's cache needs the extra: {install('train')}") from None
    try:
        return Path(hub.snapshot_download(dataset, repo_type="dataset", local_files_only=True))
    except (errors.LocalEntryNotFoundError, errors.HFValidationError) as error:
        if isinstance(error, errors.HFValidationError):
            raise ConfigError(key, path, f"{FORM} ({error})") from None
        allowed = "it is not in the local cache, and nothing is downloaded by itself: hf download"
        raise ConfigError(key, path, f"{allowed} {dataset} --repo-type dataset") from None
