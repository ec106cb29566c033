"""Sets of ``[[eval]]`` are checked, and a reward with stages can be evaluated."""

import pytest

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import load
from staleflow.configs.loading.presence import present
from staleflow.configs.loading.prompt_rows import open_eval_set
from staleflow.configs.stages import before_reward
from tests.configs.conftest import MINIMAL, Write

SET = """
[[eval]]
name = "sums"
source = "staleflow.examples.quickstart.task:held_out"
"""
JUDGED = """
needs = ["judge/score"]
[[stage]]
name = "judge"
run = "staleflow.examples.stages.examples:length"
makes = ["score"]
[[stage]]
name = "late"
run = "staleflow.examples.stages.examples:length"
needs = ["reward/reward"]
makes = ["score"]
"""


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ('name = "A b"', r'eval\[0\]\.name is "A b"; it must be at most 40 lower-case letters'),
        ('name = "a"\n[[eval]]\nname = "a"\nsource = "x:y"', r'eval\[1\]\.name is "a"; eval\[0\] has it already'),
        ('name = "a"\npath = "x.jsonl"', r"x.jsonl and .*task:held_out\"; exactly one of it and eval\[0\]\.source"),
        ('name = "a"\nsamples = 2', r"eval\[0\]\.temperature is 0\.0; with eval\[0\]\.samples = 2 it must be above 0"),
        ('name = "a"\nsamples = 0', r"eval\[0\]\.samples is 0; it must be an integer from 1 to 1024"),
        ('name = "a"\nsample = 2', r"eval\[0\]\.sample is 2; there is no such key, did you mean eval\.samples"),
    ],
)
def test_a_set_that_cannot_be_played_is_named(write: Write, keys: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        load(write(MINIMAL + SET.replace('name = "sums"', keys.split("\n[[eval]]")[0]) + _second(keys)))


def _second(keys: str) -> str:
    _, marker, second = keys.partition("\n[[eval]]")
    return marker + second


def test_neither_path_nor_source_is_named(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"eval\[0\]\.path is missing; exactly one of it and eval\[0\]\.source"):
        load(write(MINIMAL + '[[eval]]\nname = "a"\n'))


def test_vllm_cannot_sample_at_nearly_no_temperature(write: Write) -> None:
    with pytest.raises(ConfigError, match=r'temperature is 0\.001; with rollout.engine "vllm" it must be 0 or at'):
        load(write(MINIMAL + SET + "temperature = 0.001"), ["rollout.engine=vllm", "model.path=/m"])


def test_the_first_prompts_are_played_with_the_runs_column_names(write: Write) -> None:
    config = load(write(MINIMAL + SET + "prompts = 3"))
    present(config)
    rows = open_eval_set(config.eval[0], config.prompts, 0, seed=config.seed)
    assert [set(row) for row in rows] == [{"prompt", "answer"}] * 3


def test_paths_are_relative_to_the_file(write: Write) -> None:
    path = write(MINIMAL + '[[eval]]\nname = "a"\npath = "held_out.jsonl"\n')
    assert load(path).eval[0].path == str(path.parent / "held_out.jsonl")
    with pytest.raises(ConfigError, match=r"eval\[0\]\.path is .*held_out.jsonl\"; no such file"):
        present(load(path))


def test_a_set_is_scored_by_the_stages_that_the_reward_waits_for(write: Write) -> None:
    config = load(write(MINIMAL.replace('task:reward"\n', 'task:reward"\n' + JUDGED) + SET))
    assert [node.name for node in before_reward(config)] == ["judge", "reward"]
