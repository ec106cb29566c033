"""In a real browser the scripts of the pages run, no element is wider than a phone, and no request is sent."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from staleflow.configs.loading.load import load, write_resolved
from staleflow.report.page import report, timeline
from staleflow.report.reading import read
from tests.report.traces import PLAIN, save

ROOT = Path(__file__).parent.parent.parent
BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)

pytestmark = [pytest.mark.long, pytest.mark.skipif(not BROWSER, reason="there is no Chromium here")]

LOOK = """<script>
const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
const box = document.querySelector("figure[data-hover] .box"), place = box.getBoundingClientRect();
const stretch = document.querySelector(".stretch"), tip = box.querySelector(".tip");
box.dispatchEvent(new PointerEvent("pointermove", { clientX: place.right - 1, clientY: place.top + 1 }));
document.querySelector("[data-by='2']").click();
const asked = performance.getEntriesByType("resource").length;
document.body.dataset.seen = [wide, tip.textContent, stretch.style.cssText, asked].join("|");
</script></body>"""


def seen(page: Path, width: int) -> str:
    """Result of loading a page in a browser of that width."""
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={page.parent / 'browser'}"]
    command += [f"--window-size={width},900", "--virtual-time-budget=2000", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert 'data-ready="yes"' in done.stdout
    found = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert found is not None
    return found[1]


def pages(folder: Path) -> dict[str, str]:
    """The timeline and the report of a run whose trace is hostile: it has no hashes at all, and its model writes text
    that a browser might take for a script, and a word wider than any screen."""
    trace = save(folder, PLAIN)
    write_resolved(load(ROOT / "configs" / "simulated.toml"), folder)
    text = "</td><script>document.body.dataset.ready='no'</script>" + "wide" * 100
    sample = {"lineage": 0, "step": 1, "version": 0, "reward": 0.5, "tokens": 9, "prompt": text, "completion": text}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    facts, shown = read(trace)
    return {"timeline": timeline(trace, shown, facts, (0.0, 12.0)), "report": report(folder)}


@pytest.mark.parametrize("width", [500, 1400])
@pytest.mark.parametrize(("name", "tip"), [("timeline", "second 11"), ("report", "step 1")])
def test_it_fits_answers_to_a_finger_and_loads_nothing(tmp_path: Path, width: int, name: str, tip: str) -> None:
    page = tmp_path / "page.html"
    page.write_text(pages(tmp_path)[name].replace("</body>", LOOK))
    assert seen(page, width) == f"0|{tip}: oldest 1, mean 1|--zoom: 2;|0"


def test_a_broken_promise_is_the_first_thing_that_is_said(tmp_path: Path) -> None:
    text = pages(tmp_path)["report"]
    assert re.search(r'<p class="verdict bad">\d+ violations in \d+ events. The first, at line 1: ', text)
    assert "<details open><summary>every rule" in text


def test_what_the_model_writes_is_text(tmp_path: Path) -> None:
    text = pages(tmp_path)["report"]
    assert "&lt;script&gt;" in text
    assert "<script>document.body" not in text
