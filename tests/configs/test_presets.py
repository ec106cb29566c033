"""Presets set equal keys and rank below the file that names one; the command line is applied in order."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast, get_args

import msgspec
import pytest

from staleflow.configs import presets
from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import load, read_run, write_resolved
from staleflow.configs.schema import Config, Preset
from staleflow.protocols.consistency.limits import Bound, OnOverdue
from tests.configs.conftest import MINIMAL, Write

FOLDER = Path(presets.__file__).parent
QUICKSTART = FOLDER.parent / "quickstart.toml"


def leaves(table: dict[str, Any], above: str = "") -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from leaves(cast(dict[str, Any], value), f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def values(config: Config) -> dict[str, object]:
    return dict(leaves(msgspec.to_builtins(config)))


def test_the_schema_the_files_and_the_list_name_the_same() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.toml")) == sorted(presets.NAMES)
    assert sorted(get_args(Preset)) == sorted(("", *presets.NAMES))


def test_each_sets_the_same_keys_so_that_one_takes_the_whole_place_of_another() -> None:
    keys = {name: sorted(key for key, _ in leaves(presets.read(name))) for name in presets.NAMES}
    assert all(found == keys["staleflow"] for found in keys.values())


@pytest.mark.parametrize("name", presets.NAMES)
def test_each_goes_with_the_quickstart(name: str) -> None:
    config = values(load(QUICKSTART, [f"preset={name}"]))
    assert {key: config[key] for key, _ in leaves(presets.read(name))} == dict(leaves(presets.read(name)))
    assert config["preset"] == name


def test_our_own_spells_out_the_defaults(write: Write) -> None:
    assert values(load(write(), ["preset=staleflow"])) == values(load(write())) | {"preset": "staleflow"}


def test_the_file_comes_before_the_preset_that_it_names(write: Write) -> None:
    config = load(write('preset = "prime-rl"\n' + MINIMAL + "\n[staleness]\nmax_staleness = 3\n"))
    assert (config.staleness.max_staleness, config.staleness.on_overdue) == (3, OnOverdue.DROP)


def test_the_command_line_is_read_in_order(write: Write) -> None:
    path = write('preset = "prime-rl"\n' + MINIMAL + "\n[staleness]\nmax_staleness = 3\n")
    config = load(path, ["staleness.max_staleness=5", "preset=areal", "rollout.on_update=keep"])
    assert (config.preset, config.staleness.max_staleness, config.staleness.bound) == ("areal", 2, Bound.TOKEN)
    assert (config.staleness.on_overdue, config.rollout.on_update) == (OnOverdue.WAIT, "keep")


@pytest.mark.parametrize("wrong", ["arael", "3", "[1]"])
def test_one_that_there_is_not(write: Write, wrong: str) -> None:
    with pytest.raises(ConfigError, match=r'^preset is .*; it must be one of "areal", "prime-rl", "slime"'):
        load(write(), [f"preset={wrong}"])


def test_a_run_directory_keeps_what_came_of_it(write: Write, tmp_path: Path) -> None:
    config = load(write(), ["preset=slime", "staleness.max_staleness=4"])
    write_resolved(config, tmp_path / "run")
    assert read_run(tmp_path / "run") == config == load(tmp_path / "run" / "config.toml")


def test_each_says_what_it_is_and_where_it_differs() -> None:
    for name in presets.NAMES:
        text = (FOLDER / f"{name}.toml").read_text()
        assert f"preset={name}" in text.partition("[staleness]")[0]
        assert tomllib.loads(text)


def test_an_empty_one_on_the_command_line_takes_back_that_of_the_file(write: Write) -> None:
    path = write('preset = "prime-rl"\n' + MINIMAL + "\n[trainer.algorithm]\nclip_low = 0.1\n")
    assert (load(path).staleness.on_overdue, load(path).trainer.algorithm.ratio_to) == (OnOverdue.DROP, "behavior")
    expected = load(write(MINIMAL + "\n[trainer.algorithm]\nclip_low = 0.1\n", "plain.toml"))
    assert load(path, ["preset="]) == expected
    assert expected.preset == ""


def test_what_a_preset_set_and_does_not_go_with_the_rest_is_laid_to_the_preset(write: Write) -> None:
    keys = ["rollout.on_update=keep", "trainer.algorithm.loss=cispo"]
    by_verl = r'^trainer\.algorithm\.ratio_to is "behavior"; .*; preset "verl" sets it$'
    with pytest.raises(ConfigError, match=by_verl):
        load(write(), ["preset=verl", *keys])
    with pytest.raises(ConfigError, match=by_verl):
        load(write('preset = "verl"\n' + MINIMAL), keys)
    keys += ["trainer.algorithm.ratio_to=old", "trainer.algorithm.correction=none"]
    with pytest.raises(ConfigError, match=r"^trainer\.algorithm\.correction is .*; leave it at 'tis'$"):
        load(write(), ["preset=verl", *keys])
