"""Every invalid configuration is rejected in one line with the key, the value and the allowed values."""

from pathlib import Path

import pytest

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import (
    addresses,
    config_sha,
    difference,
    from_json,
    load,
    model_dir,
    read_run,
    to_json,
    write_resolved,
)
from staleflow.protocols.consistency.limits import Bound
from tests.configs.conftest import MINIMAL, Write

FOLDER = Path(__file__).parent.parent.parent.parent / "configs"
SHIPPED = sorted(path for path in FOLDER.rglob("*.toml") if path.parent.name != "presets")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_configuration_loads(path: Path) -> None:
    assert load(path).name == path.stem


def test_an_override_changes_one_key_and_nothing_else(write: Write) -> None:
    path = write()
    assert difference(load(path), load(path, ["staleness.max_staleness=0"])) == ("staleness.max_staleness", 2, 0)


def test_overrides_are_toml_values_and_bare_words(write: Write) -> None:
    given = ["staleness.bound=token", "trainer.betas=[0.5, 0.6]", "trainer.lr=3e-4", "prompts.chat_template=true"]
    config = load(
        write(), [*given, 'prompts.columns={prompt="question"}', "prompts.options.limit=7", "name=2026-01-01"]
    )
    assert config.staleness.bound is Bound.TOKEN
    assert config.trainer.betas == (0.5, 0.6)
    assert config.trainer.lr == 3e-4
    assert config.prompts.chat_template is True
    assert config.prompts.columns == {"prompt": "question"}
    assert config.prompts.options == {"limit": 7}
    assert config.name == "2026-01-01"


def test_the_last_of_two_overrides_counts(write: Write) -> None:
    assert load(write(), ["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("staleness.max_staleness=-1", "staleness.max_staleness is -1; it must be an integer from 0 to 1024"),
        ("staleness.max_staleness=1.5", "staleness.max_staleness is 1.5; it must be an integer from 0 to 1024"),
        ("staleness.max_staleness=two", 'staleness.max_staleness is "two"; it must be an integer from 0 to 1024'),
        ("staleness.max_staleness=true", "staleness.max_staleness is true; it must be an integer from 0 to 1024"),
        ("staleness.bound=x", 'staleness.bound is "x"; it must be one of "token", "trajectory"'),
        ("model.matmul_precision=tf32", 'model.matmul_precision is "tf32"; it must be one of "high", "highest"'),
        (
            "rollout.engine=x",
            'rollout.engine is "x"; it must be one of "simulated", "transformers", "vllm", "vllm_server", or'
            " module:Class or file.py:Class of your own",
        ),
        ("rollout.redundancy.groups=9", "rollout.redundancy.groups is 9; it must be a number from 1 to 8"),
        ("trajectories.shards=65", "trajectories.shards is 65; it must be an integer from 1 to 64"),
        ("trainer.lr=0", "trainer.lr is 0; it must be a number > 0 and <= 1000000000"),
        ("trainer.lr=nan", "trainer.lr is nan; it must be a finite number"),
        ("trainer.lr=inf", "trainer.lr is inf; it must be a finite number"),
        ("seed=99999999999999999999", "seed is 99999999999999999999; it must be an integer of at most 64 bits"),
        ("trainer.betas=[1]", "trainer.betas is [1]; it must be a list of 2, each a number"),
        ("trainer.betas=[0.9, 1.0]", "trainer.betas is [0.9, 1.0]; each must be at least 0 and below 1"),
        ("prompts.columns.a=3", "prompts.columns is {'a': 3}; it must be a table of strings"),
        ("rollout.gpus=[0,-1]", "rollout.gpus is [0, -1]; it must be a list, each an integer from 0 to 1000000000"),
        (
            "simulation.fleet=3",
            "simulation.fleet is 3; it must be a list, each a table with count, kind, price, speed, compute, slots,"
            " kv_tokens, remote, preemptible",
        ),
        (
            "simulation.fleet=[{count=1}, {}]",
            "simulation.fleet[1].count is missing; it must be an integer from 1 to 4096",
        ),
        (
            "simulation.fleet=[{count=1,speed=0}]",
            "simulation.fleet[0].speed is 0; it must be a number > 0 and <= 1000000000",
        ),
        (
            "simulation.fleet=[{count=1,spede=0}]",
            "simulation.fleet[0].spede is 0; there is no such key, did you mean simulation.fleet.speed?",
        ),
        ("rollout.simulated.k1=nan", "rollout.simulated.k1 is nan; it must be a finite number"),
        ("prompts.chat_template=1", "prompts.chat_template is 1; it must be true or false"),
        ("name=3", "name is 3; it must be a printable string"),
        ("name=a/b", "name is \"a/b\"; it names run directories: letters, digits, '.', '_' and '-' only"),
        ("staleness.bnd=token", 'staleness.bnd is "token"; there is no such key, did you mean staleness.bound?'),
        ("trainer.stpes=1", "trainer.stpes is 1; there is no such key, did you mean trainer.steps?"),
        ("trainner.steps=1", "trainner is a table; there is no such key, did you mean trainer?"),
        ("max_staleness=1", "max_staleness is 1; there is no such key, did you mean staleness.max_staleness?"),
        ("seed.x=1", "seed.x is 1; seed is 0, not a table"),
        ("seed", 'override is "seed"; it must be key=value, for example staleness.max_staleness=2'),
        (".=1", 'override is ".=1"; it must be key=value, for example staleness.max_staleness=2'),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(write: Write, override: str, line: str) -> None:
    path = write("seed = 0\n" + MINIMAL)
    with pytest.raises(ConfigError) as raised:
        load(path, [override])
    assert str(raised.value) == line


def test_a_key_like_no_other_is_answered_with_those_that_exist(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"reward\.zzz is 1; there is no such key; allowed here: run, functions,"):
        load(write(), ["reward.zzz=1"])


def test_a_missing_key_is_named(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"reward is missing; it must be a table with run, functions"):
        load(write("[prompts]\n"))
    with pytest.raises(ConfigError, match=r"prompts is missing; it must be a table with path, source"):
        load(write(""))


def test_a_file_that_is_not_there_or_not_toml_is_named(write: Write, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"it must be TOML: .*line 1"):
        load(write("a = = 1"))
    with pytest.raises(ConfigError, match="it cannot be read"):
        load(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(ConfigError, match="it must be TOML"):
        load(tmp_path / "latin.toml")


def test_every_error_is_one_line(write: Write) -> None:
    with pytest.raises(ConfigError) as raised:
        load(write(), ['name="a\\nb"'])
    assert "\n" not in str(raised.value)


def test_paths_in_a_file_belong_to_its_folder_and_those_in_an_override_to_the_working_folder(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    text = MINIMAL.replace('run = "staleflow.examples.quickstart.task:reward"', 'run = "judge.py:score"')
    config = load(write(text), ["prompts.eval_path=../held.jsonl", "model.path=/models/m"])
    assert config.reward.run == f"{tmp_path}/judge.py:score"
    assert config.prompts.eval_path == f"{tmp_path}/held.jsonl"
    assert config.prompts.source == "staleflow.examples.quickstart.task:prompts"
    assert config.model.path == "/models/m"


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("prompts.path=~nosuch/x.jsonl", "prompts.path", "~nosuch/x.jsonl"),
        ("model.path=~nosuch/m", "model.path", "~nosuch/m"),
        ("reward.run=~nosuch/r.py:f", "reward.run", "~nosuch/r.py"),
        ("stage=[{name='a',run='~nosuch/a.py:f',makes=['x']}]", "stage[0].run", "~nosuch/a.py"),
    ],
)
def test_the_home_of_nobody_is_named(write: Write, override: str, key: str, value: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(write(MINIMAL), [override])
    assert str(error.value) == f'{key} is "{value}"; no user of that name has a home directory here'


def test_a_run_directory_gives_back_what_it_was_given(write: Write, tmp_path: Path) -> None:
    config = load(write(), ["prompts.options.limit=5", 'prompts.columns."a b"="q\\"\\n"'])
    write_resolved(config, tmp_path / "run")
    assert read_run(tmp_path / "run") == config
    assert load(tmp_path / "run" / "config.toml") == config


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"it has no config\.json, so no run was started there"):
        read_run(tmp_path)


def test_a_torn_configuration_of_a_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"name": ')
    with pytest.raises(ConfigError, match="it is not JSON"):
        read_run(tmp_path)


def test_a_run_of_another_version_is_named_with_the_key_that_is_not_known(write: Write, tmp_path: Path) -> None:
    write_resolved(load(write()), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"seed"', '"seeds"'))
    words = (
        r"this version of staleflow cannot read its config\.json: seeds is 0; there is no such key, did you mean seed\?"
    )
    with pytest.raises(ConfigError, match=words):
        read_run(tmp_path)


def test_the_sha_is_of_the_values_not_of_the_file(write: Write) -> None:
    first = config_sha(load(write()))
    assert config_sha(load(write("# a comment\nseed = 0\n" + MINIMAL, "other.toml"))) == first
    assert config_sha(load(write(), ["seed=1"])) != first
    assert config_sha(from_json(to_json(load(write())))) == first


def test_sockets_are_in_the_run_directory_unless_its_path_is_too_long(write: Write, tmp_path: Path) -> None:
    config = load(write(), ["trajectories.shards=2", "parameters.bind=tcp://127.0.0.1:5555"])
    short = addresses(config, Path("/tmp/r"))
    assert short.trajectories == ("ipc:///tmp/r/sock/trajectories-0", "ipc:///tmp/r/sock/trajectories-1")
    assert short.all == (short.scheduler, *short.trajectories, "tcp://127.0.0.1:5555")
    long = addresses(config, tmp_path / ("x" * 100))
    assert long == addresses(config, tmp_path / ("x" * 100))
    assert len(long.scheduler) < 100
    assert long.scheduler != addresses(config, tmp_path / ("y" * 100)).scheduler


def test_the_model_is_where_the_configuration_says_or_in_the_run_directory(write: Write) -> None:
    assert model_dir(load(write(), ["model.path=/m"]), Path("/r")) == Path("/m")
    assert model_dir(load(write(), ["model.build=a:b"]), Path("/r")) == Path("/r/model")
