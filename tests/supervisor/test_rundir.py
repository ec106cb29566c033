"""No run overwrites the directory of another."""

import fcntl
import os
import time
from pathlib import Path
from typing import Any

import pytest

from staleflow.cli.main import main
from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import load, read_run, write_resolved
from staleflow.configs.schema import Config
from staleflow.supervisor import rundir, summary

SIMULATED = Path(__file__).parent.parent.parent / "configs" / "simulated.toml"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def config(*overrides: str) -> Config:
    return load(SIMULATED, overrides)


def make(path: Path, *overrides: str) -> Path:
    with rundir.claim(config(*overrides), path, resume=False):
        return path


def test_choosing_writes_nothing(tmp_path: Path) -> None:
    chosen = rundir.choose(config(), None, resume=False)
    assert chosen.parent == Path("runs")
    assert chosen.name.startswith("simulated-")
    assert list(tmp_path.iterdir()) == []


def test_a_new_run_takes_a_new_or_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert rundir.choose(config(), tmp_path / "empty", resume=False) == tmp_path / "empty"
    make(tmp_path / "new")
    assert read_run(tmp_path / "new") == config()


def test_a_neighbour_that_cannot_be_read_is_none_to_go_on_with(tmp_path: Path) -> None:
    used = make(tmp_path / "runs" / "simulated-1")
    (torn := make(tmp_path / "runs" / "simulated-2") / "config.json").write_text("{")
    assert rundir.choose(config(), None, resume=True).resolve() == used
    assert torn.read_text() == "{"


def test_a_used_run_directory_needs_resume(tmp_path: Path) -> None:
    used = make(tmp_path / "used")
    with pytest.raises(ConfigError, match="add --resume to continue it, or choose a new --run-dir"):
        rundir.choose(config(), used, resume=False)
    assert rundir.choose(config(), used, resume=True) == used


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"it must be new or empty; it contains thesis\.tex, which is kept"):
        rundir.choose(config(), tmp_path, resume=False)
    with pytest.raises(ConfigError, match="it must be a directory"):
        rundir.choose(config(), tmp_path / "thesis.tex", resume=False)
    with pytest.raises(ConfigError, match=r"it has no config\.json"):
        rundir.choose(config(), tmp_path, resume=True)


def test_a_run_directory_of_another_configuration_is_refused_with_the_key(tmp_path: Path) -> None:
    used = make(tmp_path / "used", "trainer.steps=7")
    with pytest.raises(ConfigError) as raised:
        rundir.choose(config("trainer.steps=7", "seed=8"), used, resume=True)
    assert str(raised.value) == f"seed is 8; {used} was created with 0: use its configuration or choose a new --run-dir"


def test_a_run_is_resumed_with_other_steps_down_to_those_that_are_trained(tmp_path: Path) -> None:
    used = make(tmp_path / "used", "trainer.steps=7")
    outcome: dict[str, Any] = {"name": "it", "run_dir": "", "outcome": "failed", "max_staleness": 2, "bound": ""}
    for steps in (8, 5):
        summary.write(summary.Summary(**outcome, steps=5, steps_wanted=7), used)
        changed = config(f"trainer.steps={steps}")
        assert rundir.choose(changed, used, resume=True) == used
        with rundir.claim(changed, used, resume=True):
            assert read_run(used) == changed
    summary.write(summary.Summary(**outcome, steps=5, steps_wanted=7), used)
    with pytest.raises(ConfigError) as raised:
        rundir.choose(config("trainer.steps=4"), used, resume=True)
    assert str(raised.value) == f"trainer.steps is 4; 5 steps are trained already in {used}: use at least as many"


def test_resuming_without_a_directory_takes_the_newest_of_that_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run of this name exists under runs/"):
        rundir.choose(config(), None, resume=True)
    make(Path("runs/simulated-1"))
    make(Path("runs/simulated-other-2"), "name=simulated-other")
    newest = make(Path("runs/simulated-2"))
    assert rundir.choose(config(), None, resume=True) == newest


def test_one_supervisor_at_a_time(tmp_path: Path) -> None:
    run = tmp_path / "run"
    running = rf"it is running \(process {os.getpid()}\); watch it with staleflow top {run}"
    with rundir.claim(config(), run, resume=False):
        assert rundir.holder(run) == str(os.getpid())
        for resume in (False, True):
            with pytest.raises(ConfigError, match=running):
                rundir.choose(config(), run, resume=resume)
        with pytest.raises(ConfigError, match=running), rundir.claim(config(), run, resume=True):
            pass
    assert rundir.holder(run) is None
    assert rundir.holder(tmp_path / "none") is None


def test_whoever_looks_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(tmp_path / "run")
    with (run / ".lock").open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        attempts = iter(range(5))

        def looked(seconds: float) -> None:
            """Release the lock after five failed attempts."""
            if next(attempts) == 4:
                fcntl.flock(looking, fcntl.LOCK_UN)

        monkeypatch.setattr(time, "sleep", looked)
        with rundir.claim(config(), run, resume=True):
            assert rundir.holder(run) is not None


def test_the_newest_run_is_the_one_that_somebody_came_to_last() -> None:
    assert rundir.newest() is None
    old, new = make(Path("runs/simulated-2")), make(Path("runs/another-1"), "name=another")
    write_resolved(config(), Path("runs/attached-x"))  # the directory of a worker whose run is elsewhere
    for second, path in enumerate((old, new)):
        for name in (".lock", "config.json"):
            os.utime(path / name, (1000 + second, 1000 + second))
    assert rundir.newest() == new
    with rundir.claim(config(), old, resume=True):
        assert rundir.newest() == old


def test_daemons_by_hand_agree_on_the_configuration(tmp_path: Path) -> None:
    rundir.create(config(), tmp_path / "run")
    rundir.check_same(config(), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"seed is 1; .* was created with 0"):
        rundir.check_same(config("seed=1"), tmp_path / "run")


def test_a_run_that_goes_on_has_no_summary_until_it_ends_again(tmp_path: Path) -> None:
    used = make(tmp_path / "used")
    (used / "summary.json").write_text("{}")
    with rundir.claim(config(), used, resume=True):
        assert not (used / "summary.json").exists()


@pytest.mark.parametrize("verb", [["serve", "scheduler"], ["run"]])
def test_a_run_directory_that_others_may_write_to_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: list[str]
) -> None:
    run_dir = tmp_path / "shared"
    run_dir.mkdir()
    run_dir.chmod(0o775)
    file = tmp_path / "run.toml"
    file.write_text('prompts.source = "nobody:opens"\nreward.run = "nobody:calls"\nmodel.build = "nobody:builds"\n')
    assert main([*verb, "--config", str(file), "--run-dir", str(run_dir)]) == 2
    said = capsys.readouterr().err
    assert f"others may write to it (mode 0775); only you may: chmod go-w {run_dir}" in said
    assert list(run_dir.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a directory away")
@pytest.mark.parametrize("verb", [["serve", "scheduler"], ["run"]])
def test_a_run_directory_of_another_user_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: list[str]
) -> None:
    run_dir = tmp_path / "theirs"
    run_dir.mkdir()
    os.chown(run_dir, 54321, -1)
    file = tmp_path / "run.toml"
    file.write_text('prompts.source = "nobody:opens"\nreward.run = "nobody:calls"\nmodel.build = "nobody:builds"\n')
    assert main([*verb, "--config", str(file), "--run-dir", str(run_dir)]) == 2
    said = capsys.readouterr().err
    assert str(run_dir) in said
    assert "it belongs to user 54321; it must be your own" in said
    assert list(run_dir.iterdir()) == []
