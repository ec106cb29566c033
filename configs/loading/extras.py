"""What this package can do without is in extras of it; how an error says to install one."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
"""The checkout, if this is one."""


def install(extra: str) -> str:
    """The command that adds an extra to this installation, quoted for a shell.

    No index has the package yet: a checkout is named by its path. Elsewhere pip takes the extras of the one that is
    installed.
    """
    if (ROOT / "pyproject.toml").is_file():
        return f"pip install -e '{ROOT}[{extra}]'"
    return f"pip install 'staleflow[{extra}]'"
