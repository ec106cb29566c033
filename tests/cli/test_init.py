"""A configuration written by ``staleflow init`` runs unchanged, and the command never overwrites a file."""

import json
from pathlib import Path

import pytest

from staleflow.configs.imports import load_object
from staleflow.configs.loading.load import load
from staleflow.configs.loading.presence import present
from tests.cli.conftest import Cli

UNTRAINED = ("rollout.engine=simulated", "trainer.backend=simulated", "model.build=", "model.options={}")
"""Importing it does not import torch."""
FILES = ["config.toml", "held_out.jsonl", "prompts.jsonl", "reward.py"]


def test_it_writes_a_task_under_the_folders_name(cli: Cli, short_dir: Path) -> None:
    said = cli("init", "my task")
    assert (said.code, said.left, said.err) == (0, ["my task"], "")
    assert said.out.splitlines()[-1] == "next:  staleflow run 'my task/config.toml'"
    assert sorted(path.name for path in (short_dir / "my task").iterdir()) == FILES
    config = load(short_dir / "my task" / "config.toml")
    assert (config.name, config.prompts.path) == ("my-task", str(short_dir.resolve() / "my task" / "prompts.jsonl"))


def test_no_held_out_problem_is_trained_on_or_warmed_up_with(cli: Cli, short_dir: Path) -> None:
    cli("init")
    trained, held_out = (
        {json.loads(line)["prompt"] for line in (short_dir / f"{name}.jsonl").read_text().splitlines()}
        for name in ("prompts", "held_out")
    )
    config = load(short_dir / "config.toml")
    assert (len(trained) + len(held_out), trained & held_out) == (config.model.options["limit"] ** 2, set())


@pytest.mark.parametrize("there", FILES)
def test_nothing_is_overwritten(cli: Cli, short_dir: Path, there: str) -> None:
    (short_dir / there).write_text("mine")
    said = cli("init", ".")
    assert (said.code, said.out, said.left) == (2, "", [there])
    assert said.err == f'staleflow: DIR is "{there}"; it exists already and is not overwritten: choose another folder\n'
    assert (short_dir / there).read_text() == "mine"


def test_nothing_is_written_through_a_link(cli: Cli, short_dir: Path) -> None:
    (short_dir / "t").mkdir()
    (short_dir / "t" / "reward.py").symlink_to(short_dir / "elsewhere")
    said = cli("init", "t")
    assert (said.code, said.left) == (2, ["t"])
    assert "it exists already and is not overwritten" in said.err


def test_a_folder_that_cannot_be(cli: Cli, short_dir: Path) -> None:
    (short_dir / "file").write_text("")
    said = cli("init", "file/inside")
    assert (said.code, said.err) == (2, 'staleflow: DIR is "file/inside"; cannot create it: Not a directory\n')


def test_what_it_names_is_there_and_its_reward_is_one(cli: Cli, short_dir: Path) -> None:
    cli("init", "t")
    config = load(short_dir / "t" / "config.toml", UNTRAINED)
    present(config)
    score = load_object(config.reward.run)
    row = json.loads((short_dir / "t" / "prompts.jsonl").read_text().splitlines()[0])
    assert score(**row, completion=f" {row['answer']}") == 1.0
    assert score(**row, completion=f"{row['answer']}?") == 0.0


@pytest.mark.long
def test_it_learns_as_it_is(cli: Cli, short_dir: Path) -> None:
    cli("init", "t")
    said = cli("run", "t/config.toml", "--run-dir", "r", "--json", timeout_s=280.0)
    assert said.code == 0, said.err
    summary = json.loads(said.out)
    assert (summary["outcome"], summary["violations"], summary["reward_of"]) == ("finished", 0, "held-out prompts")
    assert summary["reward_end"] > summary["reward_start"] + 0.1
