"""Imports only point to lower layers, the ledger is pure, and torch stays in its adapters."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS: tuple[tuple[str, ...], ...] = (
    ("staleflow.protocols.consistency",),
    ("staleflow.protocols.wire", "staleflow.protocols.coordination"),
    ("staleflow.configs",),
    ("staleflow.net", "staleflow.store"),
    ("staleflow.process",),
    ("staleflow.trace", "staleflow.metrics"),
    ("staleflow.servers", "staleflow.clients"),
    ("staleflow.sim",),
    ("staleflow.supervisor",),
    ("staleflow.monitor",),
    ("staleflow.report",),
    ("staleflow.api",),
    ("staleflow.launch",),
    ("staleflow.cli",),
)
"""Floors, lowest first. Packages of one floor do not import each other."""

OUTSIDE = ("staleflow.examples",)
"""Shipped user code: configurations reach it by import path, and no module imports it."""

PURE = frozenset(
    {"__future__", "bisect", "collections", "dataclasses", "enum", "hashlib", "heapq", "itertools", "typing"}
)
ADAPTERS = ("torch", "transformers", "tokenizers", "safetensors", "vllm", "deepspeed", "sklearn", "scipy")
LIGHT = ("staleflow.servers.scheduler.main", "staleflow.servers.trajectories.main", "staleflow.servers.parameters.main")


def modules() -> Iterator[tuple[str, Path]]:
    for folder in ("protocols", "configs", "servers", "clients", "staleflow"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if folder == "staleflow" and path.relative_to(ROOT / folder).parts[0] in {
                "protocols",
                "configs",
                "servers",
                "clients",
            }:
                continue  # these are links; each file is checked once, in its real folder
            dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            yield (dotted if folder == "staleflow" else f"staleflow.{dotted}"), path


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield node.module or ""


def floor(module: str) -> int | None:
    return next(
        (level for level, names in enumerate(FLOORS) for name in names if (module + ".").startswith(name + ".")), None
    )


def package(module: str) -> str | None:
    return next((name for names in FLOORS for name in names if (module + ".").startswith(name + ".")), None)


def test_imports_only_go_down() -> None:
    wrong: list[str] = []
    for module, path in modules():
        mine = floor(module)
        for imported in imports(path):
            theirs = floor(imported)
            if mine is None or theirs is None:
                if mine is not None and imported.startswith(OUTSIDE):
                    wrong.append(f"{module} imports the user code {imported}")
                continue
            if theirs > mine or (theirs == mine and package(imported) != package(module)):
                wrong.append(f"{module} imports {imported}")
    assert wrong == []


def test_every_module_has_a_floor() -> None:
    roots = {"staleflow", "staleflow.protocols", "staleflow.servers", "staleflow.clients"}
    homeless = [m for m, _ in modules() if floor(m) is None and m not in roots and not m.startswith(OUTSIDE)]
    assert homeless == []


def test_the_ledger_imports_only_pure_parts_of_the_standard_library() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module, path in modules()
        if module.startswith("staleflow.protocols.consistency")
        for imported in imports(path)
        if not imported.startswith("staleflow.protocols.consistency") and imported.split(".")[0] not in PURE
    ]
    assert wrong == []


def test_no_module_unpickles() -> None:
    banned = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "multiprocessing"}
    wrong = [f"{m} imports {i}" for m, path in modules() for i in imports(path) if i.split(".")[0] in banned]
    assert wrong == []


@pytest.mark.parametrize("module", [*LIGHT, "staleflow.cli", "staleflow.supervisor", "staleflow.clients.rollout.main"])
def test_a_process_without_a_model_starts_without_torch(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({{m.split('.')[0] for m in sys.modules}} & set({ADAPTERS!r})))"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout.split() == []
