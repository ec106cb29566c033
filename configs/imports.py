"""Import of user code by import path: ``module:function`` or ``file.py:function``.

A module is searched on ``sys.path`` and in the working directory; a file may import its neighbours.
"""

import hashlib
import importlib
import importlib.util
import logging
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from staleflow.configs.errors import ConfigError

log = logging.getLogger(__name__)

MOVED = {
    f"staleflow.{name}": f"staleflow.examples.{name}" for name in ("environments", "quickstart", "stages", "starter")
}
"""Packages of shipped examples that were renamed after 0.1; configurations may still use the old names."""

FORM = "it must be module:function or file.py:function"


def split(spec: str, key: str = "import path") -> tuple[str, str]:
    """Return the module (or file) and the attribute of an import path."""
    place, colon, attribute = spec.rpartition(":")
    if not colon or not place or not attribute:
        raise ConfigError(key, spec, FORM)
    return place, attribute


def is_file(place: str) -> bool:
    """Return True if the first half of an import path names a file."""
    return place.endswith(".py")


def load_object(spec: str, key: str = "import path") -> Any:
    """Return the callable that ``spec`` names. ``ConfigError`` names ``key`` and the cause."""
    place, attribute = split(spec, key)
    try:
        target: Any = _from_file(Path(place)) if is_file(place) else _from_name(place)
    except Exception as error:  # user code may raise anything, and the operator must see it
        raise ConfigError(key, spec, f"it cannot be imported ({type(error).__name__}: {error})") from error
    for name in attribute.split("."):
        if not hasattr(target, name):
            raise ConfigError(key, spec, f"{place} has no {attribute}")
        target = getattr(target, name)
    if not callable(target):
        raise ConfigError(key, spec, f"{attribute} must be callable, it is {type(target).__name__}")
    return target


def _from_name(name: str) -> ModuleType:
    _reachable(os.getcwd())
    package, dot, rest = name.rpartition(".")
    if package in MOVED:
        log.warning("import path %s is deprecated; use %s", name, f"{MOVED[package]}{dot}{rest}")
        name = f"{MOVED[package]}{dot}{rest}"
    return importlib.import_module(name)


def _from_file(path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise FileNotFoundError("no such file")
    name = f"staleflow_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file")
    _reachable(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _reachable(folder: str) -> None:
    """Let user code import its neighbours. The folder comes last in ``sys.path``, so that it hides no other module."""
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)
