"""An error about a missing package names the command that installs it."""

import shlex
from pathlib import Path

import pytest

from staleflow.configs.loading import extras

ROOT = Path(__file__).parent.parent.parent.parent


def test_a_checkout_is_named_by_its_path_since_no_index_has_the_package() -> None:
    assert shlex.split(extras.install("vllm")) == ["pip", "install", "-e", f"{ROOT.resolve()}[vllm]"]


def test_where_a_wheel_is_installed_pip_takes_the_extra_of_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "ROOT", tmp_path)
    assert shlex.split(extras.install("vllm")) == ["pip", "install", "staleflow[vllm]"]
