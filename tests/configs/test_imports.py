"""User code is loaded by import path."""

from pathlib import Path

import pytest

from staleflow.configs.errors import ConfigError
from staleflow.configs.imports import load_object


def test_a_module_and_a_file_give_their_callable(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text("class Judge:\n    @staticmethod\n    def score(): return 7\n")
    assert load_object("json:dumps") is __import__("json").dumps
    assert load_object(f"{tmp_path}/judge.py:Judge.score")() == 7


def test_the_old_path_of_a_shipped_example_still_works_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert load_object("staleflow.quickstart.task:reward") is load_object("staleflow.examples.quickstart.task:reward")
    assert "staleflow.quickstart.task is deprecated; use staleflow.examples.quickstart.task" in caplog.text


def test_a_file_is_run_once(tmp_path: Path) -> None:
    path = tmp_path / "once.py"
    path.write_text("def f(): ...")
    first = load_object(f"{path}:f")
    path.write_text("raise ValueError")
    assert load_object(f"{path}:f") is first


def test_a_file_that_failed_is_run_again(tmp_path: Path) -> None:
    path = tmp_path / "later.py"
    path.write_text("raise ValueError('not yet')")
    with pytest.raises(ConfigError, match=r"x is .*later\.py:f\"; it cannot be imported \(ValueError: not yet\)"):
        load_object(f"{path}:f", "x")
    path.write_text("def f(): ...")
    assert load_object(f"{path}:f")
