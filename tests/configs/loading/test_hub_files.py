"""Datasets of the hub are read from its local cache, and never downloaded."""

import json
from pathlib import Path

import pytest

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import load
from staleflow.configs.loading.presence import present
from staleflow.configs.loading.prompt_rows import open_prompts
from staleflow.configs.schema import Prompts
from tests.configs.conftest import Write

constants = pytest.importorskip("huggingface_hub.constants")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "main/train-00000-of-00002.jsonl": ["a", "b"],
    "main/train-00001-of-00002.jsonl": ["c"],
    "main/test-00000-of-00001.jsonl": ["d"],
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache as ``hf download me/sums --repo-type dataset`` fills it."""
    repository = tmp_path / "datasets--me--sums"
    for name, prompts in FILES.items():
        file = repository / "snapshots" / COMMIT / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps({"prompt": text, "answer": ""}) + "\n" for text in prompts))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def texts(path: str) -> list[str]:
    rows = open_prompts(Prompts(path=path), seed=0)
    return [rows[row]["prompt"] for row in range(len(rows))]


@pytest.mark.usefixtures("cache")
def test_without_a_pattern_the_training_split_is_read_in_the_order_of_its_files() -> None:
    assert texts("hf://me/sums") == ["a", "b", "c"]
    assert texts("hf://me/sums/main/test-*.jsonl") == ["d"]


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("hf://me/other", r"it is not in the local cache, .*: hf download me/other --repo-type dataset$"),
        ("hf://me", r'prompts\.path is "hf://me"; it must be hf://ORGANIZATION/NAME, optionally followed by'),
        ("hf://me/sums/val*", r'no file matches "val\*"; the dataset has main/test-00000-of-00001\.jsonl, main/train-'),
        ("hf://me/a..b", r"it must be hf://ORGANIZATION/NAME, .* \("),
    ],
)
def test_a_dataset_that_cannot_be_read_is_named_with_what_to_do(path: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        open_prompts(Prompts(path=path), seed=0)


@pytest.mark.usefixtures("cache")
def test_a_configuration_may_name_a_dataset_and_its_rows_are_counted(write: Write) -> None:
    config = load(write(), ["prompts.source=", "prompts.path=hf://me/sums", "prompts.epochs=1"])
    assert config.prompts.path == "hf://me/sums"
    with pytest.raises(ConfigError, match="3 rows x 1 give 3 groups"):
        present(config)
