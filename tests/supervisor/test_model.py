"""The model directory is linked or built exactly once, and never left half built."""

from pathlib import Path

import pytest

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import load
from staleflow.configs.schema import Config
from staleflow.supervisor import model

SIMULATED = Path(__file__).parent.parent.parent / "configs" / "simulated.toml"
BUILDER = """
from pathlib import Path
def build(directory, *, seed, name="tokenizer.json"):
    Path(directory).mkdir()
    (Path(directory) / "config.json").write_text(str(seed))
    if name: (Path(directory) / name).write_text("{}")
"""


def config(tmp_path: Path, *overrides: str) -> Config:
    (tmp_path / "builder.py").write_text(BUILDER)
    build = f"model.build={tmp_path}/builder.py:build"
    return load(SIMULATED, ["rollout.engine=transformers", "seed=5", *(overrides or (build,))])


def test_a_model_is_built_once(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    it = config(tmp_path)
    assert model.missing(it, run_dir)
    model.ensure(it, run_dir)
    assert (run_dir / "model" / "config.json").read_text() == "5"
    assert not model.missing(it, run_dir)
    (tmp_path / "builder.py").unlink()
    model.ensure(it, run_dir)


def test_a_model_without_tokenizer_never_becomes_the_model_of_the_run(tmp_path: Path) -> None:
    it = config(tmp_path, f"model.build={tmp_path}/builder.py:build", 'model.options.name=""')
    with pytest.raises(ConfigError, match=r"model\.build is .* it has no tokenizer"):
        model.ensure(it, tmp_path / "run")
    assert not (tmp_path / "run" / "model").exists()


def test_half_a_model_of_a_killed_builder_is_thrown_away(tmp_path: Path) -> None:
    partial = tmp_path / "run" / ".model.partial"
    partial.mkdir(parents=True)
    (partial / "model.safetensors").touch()
    model.ensure(config(tmp_path), tmp_path / "run")
    assert not (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_a_download_that_says_nothing_is_told_by_its_file(tmp_path: Path) -> None:
    assert model.download_progress(tmp_path, "fetching") == "fetching"
    partial = tmp_path / ".model.partial" / ".cache"
    partial.mkdir(parents=True)
    (partial / "config.json").write_bytes(bytes(100))
    assert model.download_progress(tmp_path) == ""
    (partial / "model.safetensors").write_bytes(bytes(3_400_000))
    assert model.download_progress(tmp_path, "fetching") == "fetching, model.safetensors: 3 MB so far"
    (partial / "model.safetensors").rename(partial / "A1b2.incomplete")
    assert model.download_progress(tmp_path) == "a download: 3 MB so far"


def test_a_model_of_the_user_is_linked(tmp_path: Path) -> None:
    users = tmp_path / "users"
    users.mkdir()
    it = config(tmp_path, f"model.path={users}")
    with pytest.raises(ConfigError, match=r"it has no config\.json"):
        model.ensure(it, tmp_path / "run")
    for name in ("config.json", "tokenizer.json"):
        (users / name).write_text("{}")
    model.ensure(it, tmp_path / "run")
    assert (tmp_path / "run" / "model").resolve() == users.resolve()


def test_a_simulated_run_needs_no_model(tmp_path: Path) -> None:
    model.ensure(load(SIMULATED), tmp_path / "run")
    assert not (tmp_path / "run").exists()
