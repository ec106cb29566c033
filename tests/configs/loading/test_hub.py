"""A hub id is found in the local Hugging Face cache, and an id that is not there is named with its download."""

import sys
from pathlib import Path

import pytest

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading import hub
from staleflow.configs.loading.load import load, model_dir, read_run, write_resolved
from staleflow.configs.loading.presence import present
from staleflow.supervisor import model
from tests.configs.conftest import MINIMAL, Write

REVISION = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
FILES = ("config.json", "tokenizer.json", "model.safetensors")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def downloaded(cache: Path, files: tuple[str, ...] = FILES) -> Path:
    """Write ``org/name`` into the cache, as ``hf download`` lays it out."""
    repository = cache / "models--org--name"
    snapshot = repository / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    for name in files:
        (snapshot / name).write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(REVISION)
    return snapshot


@pytest.mark.parametrize("text", ["Qwen/Qwen2.5-0.5B-Instruct", "org/name", "models/qwen"])
def test_two_names_with_a_slash_may_be_a_hub_id(text: str) -> None:
    assert hub.is_hub_id(text)


@pytest.mark.parametrize(
    "text", ["", "name", "/org/name", "./name", "../name", "~/name", "org/name/", "a/b/c", "org/a b"]
)
def test_other_paths_are_none(text: str) -> None:
    assert not hub.is_hub_id(text)


def test_a_cached_model_is_linked_and_stays_at_the_revision_of_the_first_start(
    write: Write, cache: Path, tmp_path: Path
) -> None:
    snapshot = downloaded(cache)
    config = load(write(MINIMAL), ["model.path=org/name", "rollout.engine=transformers"])
    assert config.model.path == "org/name"
    present(config)
    run_dir = tmp_path / "run"
    write_resolved(config, run_dir)
    model.ensure(read_run(run_dir), run_dir)
    assert model_dir(config, run_dir).resolve() == snapshot.resolve()
    (cache / "models--org--name" / "refs" / "main").write_text("f" * 40)
    (snapshot.parent / ("f" * 40)).mkdir()
    model.ensure(read_run(run_dir), run_dir)
    assert model_dir(config, run_dir).resolve() == snapshot.resolve()


def test_a_directory_of_the_same_name_comes_first(
    write: Write, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloaded(cache)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert load(write(MINIMAL), ["model.path=org/name"]).model.path == str(tmp_path / "org" / "name")


@pytest.mark.parametrize("files", [(), ("config.json", "tokenizer.json")])
def test_a_model_that_is_not_cached_or_has_no_weights_is_named_with_its_download(
    write: Write, cache: Path, files: tuple[str, ...]
) -> None:
    if files:
        downloaded(cache, files)
    config = load(write(MINIMAL), ["model.path=org/name", "rollout.engine=transformers"])
    with pytest.raises(ConfigError) as raised:
        present(config)
    assert str(raised.value) == (
        'model.path is "org/name"; no such directory, and no such model in the local Hugging Face cache: '
        "hf download org/name"
    )


def test_the_path_of_a_stage_may_be_a_hub_id_too(cache: Path) -> None:
    snapshot = downloaded(cache)
    assert hub.locate_model("org/name", "reference.path") == snapshot
    with pytest.raises(ConfigError, match=r'^critic\.path is "org/other"; .*hf download org/other$'):
        hub.locate_model("org/other", "critic.path")


def test_without_the_package_no_model_is_cached(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloaded(cache)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match="hf download org/name"):
        hub.locate_model("org/name")
