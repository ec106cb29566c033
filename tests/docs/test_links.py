"""Every link resolves, on the repository's own pages and on the site."""

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.docs.markdown import ROOT, anchors, links, pages

DOCS = ROOT / "docs"


@pytest.mark.parametrize("page", pages())
def test_every_link_leads_somewhere(page: str) -> None:
    broken: list[str] = []
    for target in links(page):
        if urlsplit(target).scheme:
            assert target.startswith("https://"), f"{page}: {target}"
            continue
        name, _, place = target.partition("#")
        path = ((ROOT / page).parent / name).resolve() if name else (ROOT / page)
        there = path.exists() and path.is_relative_to(ROOT)
        if there and place:
            there = path.suffix == ".md" and place in anchors(path.relative_to(ROOT).as_posix())
        broken += [] if there else [target]
    assert broken == []


@pytest.mark.parametrize("page", [page for page in pages() if page.startswith("docs/")])
def test_a_page_of_the_site_links_to_pages_of_the_site(page: str) -> None:
    inside = [target.partition("#")[0] for target in links(page) if not urlsplit(target).scheme]
    targets = [((ROOT / page).parent / name).resolve() for name in inside if name]
    assert [str(path) for path in targets if not path.is_relative_to(DOCS)] == []


def test_the_navigation_names_every_page_once() -> None:
    named = [word for word in (ROOT / "mkdocs.yml").read_text().split() if word.endswith(".md")]
    there = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    assert sorted(named) == there


def test_every_picture_is_on_a_page() -> None:
    shown = {Path(target).name for page in pages() for target in links(page)}
    assert [path.name for path in DOCS.rglob("*.svg") if path.name not in shown] == []
