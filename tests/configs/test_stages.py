"""The graph of stages has an order, and an invalid graph is rejected before anything starts."""

import pytest

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import load
from staleflow.configs.stages import batch_of, graph, seconds_a_group, stages, workers_of
from tests.configs.conftest import MINIMAL, Write

STAGES = """
[[stage]]
name = "mix"
run = "stages.py:mix"
needs = ["judge/score", "reward/reward"]
makes = ["total", "weights:token"]
workers = 3
batch = 4
timeout_s = 2.0
retries = 1
[[stage]]
name = "judge"
run = "my.module:judge"
makes = ["score:sample"]
"""


def with_stages(*given: str) -> str:
    """A configuration with ``name needs makes`` per stage; lists use commas."""
    text = MINIMAL
    for one in given:
        name, needs, makes = one.split(" ")
        listed = [repr(part.split(",") if part else []) for part in (needs, makes)]
        text += f'\n[[stage]]\nname = "{name}"\nrun = "m:f"\nneeds = {listed[0]}\nmakes = {listed[1]}\n'
    return text


def test_each_stage_comes_after_those_that_make_what_it_needs(write: Write) -> None:
    path = write(MINIMAL + STAGES)
    config = load(path)
    nodes = {node.name: node for node in graph(config)}
    assert list(nodes) == ["reward", "judge", "mix"]
    assert nodes["mix"].after == ("judge", "reward")
    assert nodes["mix"].needs == ("stage/judge/score", "stage/reward/reward")
    assert nodes["mix"].makes == ("stage/mix/total", "stage/mix/weights:token")
    assert (nodes["judge"].after, nodes["judge"].makes) == ((), ("stage/judge/score",))
    assert config.stage[0].run == f"{path.parent}/stages.py:mix"
    assert config.stage[1].run == "my.module:judge"
    assert (batch_of(config, "mix"), workers_of(config, "mix"), seconds_a_group(config)["mix"]) == (4, 3, 4.0)


def test_a_worker_may_take_so_long_for_a_group_as_what_all_shards_gave_it_needs(write: Write) -> None:
    own = "timeout_s = 2\nretries = 1\n"
    text = MINIMAL.replace("[reward]\n", f"[reward]\n{own}") + "\n[trajectories]\nshards = 3\n"
    config = load(write(text))
    assert seconds_a_group(config)["reward"] == 2 * 2 * config.rollout.group_size * 3


def test_the_shipped_stages_are_stages_of_the_same_graph(write: Write) -> None:
    overrides = ["trainer.algorithm.kl_coef=0.1", "trainer.algorithm.advantage=gae", "model.path=/m"]
    path = write(with_stages("late critic/values,reference/logprobs end"))
    after = {node.name: node.after for node in graph(load(path, overrides))}
    assert after == {
        "reward": (),
        "reference": ("reward",),
        "critic": ("reward",),
        "late": ("critic", "reference"),
    }
    nodes = graph(load(path, [*overrides, "trainer.algorithm.kl_in_reward=true"]))
    assert {node.name: node.after for node in nodes}["critic"] == ("reward", "reference")


def test_the_reward_may_wait_for_other_stages(write: Write) -> None:
    path = write(with_stages("judge  score"))
    assert stages(load(path, ["reward.needs=['judge/score']"])) == ("judge", "reward")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["a b/x x", "b c/x x", "c a/x x"], 'needs is "b/x"; stages wait for each other in a circle: a → b → c → a'),
        (["a a/x x"], 'stage[0].needs is "a/x"; stages wait for each other in a circle: a → a'),
        (
            ["z  y", "a b/x,z/y x", "b a/x x"],
            'stage[1].needs is "b/x"; stages wait for each other in a circle: a → b → a',
        ),
        (["a  score", "b a/scor x"], 'stage[1].needs is "a/scor"; no stage makes it, did you mean a/score?'),
        (["a critic/values x"], 'needs is "critic/values"; no stage makes it; columns of this run: reward/reward, a/x'),
        (["b a/x,a/x y", "a  x"], 'stage[0].needs is "a/x"; it is listed twice'),
        (["a  x", "a  y"], 'stage[1].name is "a"; stage[0] has it already'),
        (["reward  x"], 'stage[0].name is "reward"; it must be none of reward, reference, critic, environment'),
        (["engine  x"], 'stage[0].name is "engine"; it must be none of reward, '),
        (["A-1  x"], 'stage[0].name is "A-1"; it must be at most 40 lower-case letters'),
        (["a  "], 'stage[0].makes is []; it must name a column at least, "score" or "values:token"'),
        (["a  x:group"], 'stage[0].makes is "x:group"; a column is at most 40 lower-case letters'),
        (["a  x,x:token"], 'stage[0].makes is "x"; it is listed twice'),
    ],
)
def test_what_is_no_graph_is_named(write: Write, given: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(write(with_stages(*given)))
    assert line in str(raised.value)


@pytest.mark.parametrize(
    ("needs", "line"),
    [
        ("['a/v']", 'reward.needs is "a/v"; it has a value a token; the reward takes columns of one a sample'),
        ("['a/x','b/x']", 'reward.needs is "a/x"; the reward has another argument "x" already'),
        ("['c/y']", "stages wait for each other in a circle: reward → c → reward"),
    ],
)
def test_what_the_reward_cannot_take_is_named(write: Write, needs: str, line: str) -> None:
    path = write(with_stages("a  x,v:token", "b  x", "c reward/reward y"))
    with pytest.raises(ConfigError) as raised:
        load(path, [f"reward.needs={needs}"])
    assert line in str(raised.value)


def test_held_out_prompts_go_through_no_stage_before_the_reward(write: Write) -> None:
    path = write(with_stages("judge  score"))
    given = ["reward.needs=['judge/score']", "prompts.eval_source=a:b"]
    with pytest.raises(ConfigError, match="held-out prompts go through no other stage"):
        load(path, given)
    load(path, [*given, "trainer.eval_prompts=0"])


def test_a_stage_without_a_function_is_named(write: Write) -> None:
    path = write(MINIMAL + '\n[[stage]]\nname = "a"\nmakes = ["x"]\nrun = ""\n')
    with pytest.raises(ConfigError, match=r'^stage\[0\]\.run is ""; it must be module:function'):
        load(path)


FUNCTIONS = """
[[reward.functions]]
run = "rewards.py:correct"
[[reward.functions]]
run = "my.module:f"
name = "brief"
weight = 0.1
"""
WITHOUT_RUN = MINIMAL.replace('run = "staleflow.examples.quickstart.task:reward"', "", 1)


def test_each_reward_function_makes_a_column_that_stages_may_need(write: Write) -> None:
    text = f"{WITHOUT_RUN}{FUNCTIONS}{STAGES}".replace('"reward/reward"]', '"reward/brief"]')
    path = write(text)
    config = load(path)
    nodes = {node.name: node for node in graph(config)}
    assert nodes["reward"].makes == ("stage/reward/reward", "stage/reward/correct", "stage/reward/brief")
    assert nodes["mix"].needs == ("stage/judge/score", "stage/reward/brief")
    assert config.reward.functions[0].run == f"{path.parent}/rewards.py:correct"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            f"{MINIMAL}{FUNCTIONS}",
            r'reward\.run is ".*task:reward"; with reward\.functions there must be only one of the',
        ),
        (WITHOUT_RUN, r'reward\.run is ""; it must be module:function or file\.py:function'),
        (
            WITHOUT_RUN + FUNCTIONS.replace('name = "brief"', 'name = "correct"'),
            r'reward\.functions\[1\]\.name is "correct"; reward\.functions\[0\] has it already',
        ),
        (
            WITHOUT_RUN + FUNCTIONS.replace('"brief"', '"mean"'),
            r'reward\.functions\[1\]\.name is "mean"; it must be none of reward, mean, std, eval, eval_failed',
        ),
        (
            WITHOUT_RUN + FUNCTIONS.replace(":correct", ":Correct"),
            r'reward\.functions\[0\]\.name is "Correct"; it must be at most 40 lower-case letters',
        ),
        (
            WITHOUT_RUN + FUNCTIONS.replace("my.module:f", "my.module"),
            r'reward\.functions\[1\]\.run is "my\.module"; it must be module:function',
        ),
        (
            WITHOUT_RUN + FUNCTIONS.replace("weight", "wieght"),
            r"reward\.functions\[1\]\.wieght is 0\.1; there is no such key, did you mean .*weight\?",
        ),
    ],
)
def test_reward_functions_that_contradict_are_named(write: Write, given: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        load(write(given))
