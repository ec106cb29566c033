"""The pages build into a site without a warning, and load nothing from another host.

The theme's own script would fetch mermaid for a diagram in mermaid notation, so no page has one.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT

ZENSICAL = Path(sys.executable).with_name("zensical")

pytestmark = pytest.mark.skipif(not ZENSICAL.is_file(), reason="the extra docs is not installed")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    shutil.copytree(ROOT / "docs", folder / "docs")
    built = subprocess.run([ZENSICAL, "build", "--strict"], cwd=folder, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "No issues found" in built.stdout + built.stderr
    return folder / "site"


def test_every_page_is_on_the_site(site: Path) -> None:
    pages = [path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")]
    missing = [page for page in pages if page.name != "index" and not (site / page / "index.html").is_file()]
    assert missing == []
    assert (site / "index.html").is_file()


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    loaded = {
        address
        for path in site.rglob("*.html")
        for address in re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', path.read_text())
    }
    assert loaded == set()


def test_no_page_has_a_diagram_that_a_script_from_elsewhere_draws() -> None:
    assert [str(path) for path in (ROOT / "docs").rglob("*.md") if "```mermaid" in path.read_text()] == []
