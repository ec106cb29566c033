"""Parts of a Markdown page for the tests: its blocks of code, its links, its headings."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")

_FENCE = re.compile(r"^( *)```([\w-]*)")
_LINK = re.compile(r"!?\[[^\]\n]*\]\(([^)\s]+)\)")
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Return every page, as a path from the repository's root."""
    return [*TOP, *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]


def blocks() -> Iterator[Block]:
    """Yield every fenced block of every page."""
    for page in pages():
        yield from _blocks(page)


def _blocks(page: str) -> Iterator[Block]:
    begun: tuple[int, str, str] | None = None
    held: list[str] = []
    for number, line in enumerate((ROOT / page).read_text().splitlines(), start=1):
        fence = _FENCE.match(line)
        if begun is None and fence:
            begun, held = (number, fence[2], fence[1]), []
        elif begun is not None and line.strip() == "```":
            text = "\n".join(part.removeprefix(begun[2]) for part in held)
            yield Block(page=page, line=begun[0], language=begun[1], text=text)
            begun = None
        elif begun is not None:
            held.append(line)
    assert begun is None, f"{page}:{begun[0] if begun else 0} is never closed"


def prose(page: str) -> str:
    """Return the page without its blocks."""
    inside = False
    kept: list[str] = []
    for line in (ROOT / page).read_text().splitlines():
        if line.strip().startswith("```"):
            inside = not inside
            line = ""
        kept.append("" if inside else line)
    return "\n".join(kept)


def links(page: str) -> list[str]:
    """Return the targets of the page's links and pictures."""
    return _LINK.findall(_INLINE.sub("", prose(page)))


def inline(page: str) -> list[str]:
    """Return the page's inline code."""
    return _INLINE.findall(prose(page))


def anchors(page: str) -> set[str]:
    """Return the names that a link into the page may use after ``#``."""
    found: set[str] = set()
    for title in re.findall(r"^#+ +(.+)$", prose(page), re.MULTILINE):
        plain = re.sub(r"[`*]|\]\([^)]*\)|\[", "", title).strip().lower()
        found.add(re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", plain)))
    return found
