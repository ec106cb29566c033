"""Progress bars that libraries draw while they load become words."""

import io
import os
import subprocess
import sys

import pytest

from staleflow.supervisor.bars import is_bar, progress
from staleflow.supervisor.roles import PROGRESS_BARS


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a.bin:  34%|###4      | 1.21G/3.55G [00:10<00:20, 110MB/s]", "a.bin, 34 %, 1.21G of 3.55G"),
        ("Fetching 10 files:  30%|###       | 3/10 [00:01<00:03,  1.9it/s]", "Fetching 10 files, 30 %, 3 of 10"),
        ("Loading shards:  50% Completed | 2/4 [00:10<00:10,  5.1s/it]", "Loading shards, 50 %, 2 of 4"),
        ("  7%|7         | 7/100 [00:00<00:09,  9.9it/s]", "7 %, 7 of 100"),
        ("model.safetensors: 1.21GB [00:10, 110MB/s]", "model.safetensors, 1.21GB so far"),
        ("\x1b[Amodel.safetensors:   1%|          | 1/100 [00:00<?, ?it/s]\x1b[A", "model.safetensors, 1 %, 1 of 100"),
        ("Loading weights: 100%|##########| 50/50 [00:01<00:00, 40.1it/s]", ""),
        ("step 100: 40 % of the sums are right", ""),
    ],
)
def test_a_bar_in_words(line: str, words: str) -> None:
    assert progress(["before", line]) == words


def test_a_bar_is_told_until_something_else_is_printed() -> None:
    bar = "Loading weights:  10%|#         | 5/50 [00:01<00:09, 4.1it/s]"
    assert (is_bar(bar), is_bar("a line")) == (True, False)
    assert progress([bar, "a line"]) == progress([]) == ""


def test_what_tqdm_draws_is_understood() -> None:
    drawn, tqdm = io.StringIO(), pytest.importorskip("tqdm").tqdm
    with tqdm(total=3_550_000_000, desc="model.safetensors", unit="B", unit_scale=True, file=drawn) as bar:
        bar.update(1_210_000_000)
        bar.refresh()
        last = drawn.getvalue().rsplit("\r", 1)[-1]
        assert progress([last]) == "model.safetensors, 34 %, 1.21G of 3.55G"


def test_a_download_of_the_hub_draws_where_nobody_looks_at_a_terminal() -> None:
    pytest.importorskip("huggingface_hub")
    code = (
        "import logging\nfrom huggingface_hub.utils.tqdm import is_tqdm_disabled, tqdm\n"
        "bar = tqdm(total=100, desc='a.bin', disable=is_tqdm_disabled(logging.WARNING)); bar.update(34); bar.refresh()"
    )
    said = [
        subprocess.run([sys.executable, "-c", code], env=os.environ | more, capture_output=True, text=True, check=True)
        for more in ({}, dict(PROGRESS_BARS))
    ]
    shown = [[line for line in one.stderr.replace("\r", "\n").splitlines() if line.strip()] for one in said]
    assert [progress(lines[-1:]) for lines in shown] == ["", "a.bin, 34 %, 34 of 100"]
