"""Extras: optional dependencies of the package, and the command that installs one."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
"""Root of the checkout, if the package runs from one."""


def install(extra: str) -> str:
    """Return the command that adds an extra to this installation, quoted for a shell.

    The package is not on PyPI yet, so a checkout is named by its path. Elsewhere pip adds the extra to the installed
    package.
    """
    if (ROOT / "pyproject.toml").is_file():
        return f"pip install -e '{ROOT}[{extra}]'"
    return f"pip install 'staleflow[{extra}]'"
