"""Keys of ``trainer.algorithm`` are checked against each other, and user functions are accepted."""

from pathlib import Path

import msgspec
import pytest

from staleflow.configs.algorithm import Algorithm
from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import load
from staleflow.configs.loading.presence import present
from staleflow.configs.rules.algorithm import ADVANTAGES, LOSSES, check_algorithm, filter_of, warnings
from staleflow.configs.rules.checks import import_paths
from tests.configs.conftest import MINIMAL, Write


def overrides(keys: str) -> list[str]:
    return ["model.path=/m", *(f"trainer.algorithm.{key}" for key in keys.split())]


@pytest.mark.parametrize("advantage", ADVANTAGES)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_advantage_goes_with_every_loss(write: Write, advantage: str, loss: str) -> None:
    check_algorithm(Algorithm(advantage=advantage, loss=loss, distill_coef=float(advantage == "none")))


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ("loss=ppo", r'algorithm\.loss is "ppo"; it must be one of "aipo", .*, "ppo_clip", or module:function'),
        ("advantage=best", r'algorithm\.advantage is "best"; it must be one of "dr_grpo", "gae", "grpo"'),
        ("loss=:f", r'algorithm\.loss is ":f"; it must be module:function'),
        ("correction=some", r'algorithm\.correction is "some"; it must be one of "decoupled", "masked_is"'),
        ("dual_clip=0.5", r"algorithm\.dual_clip is 0\.5; it must be above 1, or 0 to switch it off"),
        ("tis_cap=0", r"algorithm\.tis_cap is 0; it must be a number > 0 and <= 1000000000"),
        ("gae_lambda=1.5", r"algorithm\.gae_lambda is 1\.5; it must be a number from 0"),
        ("correction=masked_is mask_low=5", r"mask_low is 5\.0; it must be below trainer\.algorithm\.mask_high = 5"),
        ("loss=gspo clip_low=0.1", r'clip_low is 0\.1; it is a bound of the losses "ppo_clip" and "opsm"; leave it at'),
        ("loss=cispo correction=none", r'correction is "none"; it corrects "gspo" and "ppo_clip" with'),
        ("ratio_to=behavior correction=none", r'correction is "none"; it corrects "gspo" and "ppo_clip" with'),
        ("loss=aipo ratio_to=behavior", r'ratio_to is "behavior"; only the losses "gspo" and "ppo_clip" have the'),
        ("correction=none tis_cap=3", r'tis_cap is 3\.0; it is a bound of the corrections "tis" and "masked_is_geomet'),
        (
            "geometric_low=0.9",
            r'geometric_low is 0\.9; it is a bound of the correction "masked_is_geometric"; leave it',
        ),
        ("correction=masked_is_geometric geometric_low=1", r"geometric_low is 1; it must be a number >= 0 and < 1"),
        ("correction=masked_is_geometric geometric_high=1", r"geometric_high is 1; it must be a number > 1"),
        ("veto_below=1", r"veto_below is 1; it must be a number >= 0 and < 1"),
        (
            "loss_agg=mean",
            r'loss_agg is "mean"; it must be one of "auto", "sequence_mean", "sequence_sum", "token_mean"',
        ),
        ("gmpo_low=0.1", r'gmpo_low is 0\.1; it is a bound of the loss "gmpo"; leave it at 0\.4'),
        ("dppo_high=0.1", r'dppo_high is 0\.1; it is a bound of the loss "dppo"; leave it at 0\.15'),
        ("dppo_divergence=kl", r'dppo_divergence is "kl"; it is the distance of the loss "dppo"'),
        (
            "advantage=none",
            r'advantage is "none"; nothing would train; it needs trainer\.algorithm\.distill_coef above 0',
        ),
        ("teacher=a/b", r'teacher is "a/b"; it is the teacher of distill_coef, which is 0; leave it at'),
        (
            "distill_coef=1 teacher=a/b",
            r'teacher is "a/b"; it must be a column with one number for each token, of this',
        ),
        ("distill_coef=1 teacher=reward/reward", r'teacher is "reward/reward"; it must be a column with one number'),
        ("mask_high=3", r'mask_high is 3\.0; it is a bound of the correction "masked_is"'),
        ("sequence_cap=3", r'sequence_cap is 3\.0; it is a bound of the correction "masked_is_sequence"'),
        ("loss=gspo ratio_to=behavior", r"gspo_low is 0\.0003; with ratio_to \"behavior\" numeric noise alone exceeds"),
        ("loss=gspo ratio_to=behavior gspo_low=0.02", r"gspo_high is 0\.0004; .*; set it, for example to 0\.01"),
        ("gspo_low=0.1", r'gspo_low is 0\.1; it is a bound of the loss "gspo"'),
        ("cispo_high=1", r'cispo_high is 1\.0; it is a bound of the loss "cispo"'),
        ("aipo_cap=1", r'aipo_cap is 1\.0; it is a bound of the loss "aipo"'),
        ("m2_threshold=1", r'm2_threshold is 1\.0; it is a bound of the loss "m2po"'),
        ("opsm_delta=1", r'opsm_delta is 1\.0; it is a bound of the loss "opsm"'),
        ("kl=k1", r'kl is "k1"; it is the estimator of a KL term in the loss; leave it at'),
        ("advantage=gae kl_coef=1 kl_in_reward=true kl=k1", r'kl is "k1"; it is the estimator of a KL term in the'),
        ("advantage=gae kl_in_reward=true", r"kl_in_reward is true; it needs trainer\.algorithm\.kl_coef above 0"),
        ("kl_coef=1 kl_in_reward=true", r'kl_in_reward is true; it is for the advantages "gae" and "reinforce_pp"'),
        ("gamma=0.9", r'gamma is 0\.9; it is a key of the advantage "gae"'),
        ("whiten_advantages=false", r'whiten_advantages is false; it is a key of the advantage "gae"; leave it at'),
        ("loss=a:b correction=decoupled", r'correction is "decoupled"; it corrects "gspo" and'),
    ],
)
def test_what_means_nothing_or_contradicts_is_named(write: Write, keys: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        load(write(MINIMAL), overrides(keys))


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ([], r"trainer\.critic_warmup is 5; the run has no critic: trainer\.algorithm\.advantage is not \"gae\""),
        (["trainer.algorithm.advantage=gae", "trainer.steps=5"], r"critic_warmup is 5; .* below trainer\.steps = 5"),
    ],
)
def test_a_warm_up_of_the_critic_needs_a_critic_and_a_step_after_it(write: Write, keys: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        load(write(MINIMAL), ["model.path=/m", "trainer.critic_warmup=5", *keys])


def test_a_decaying_trace_over_a_critic_that_starts_cold_is_warned_about(write: Write) -> None:
    decays, warm = "advantage=gae gae_lambda=0.95", "trainer.critic_warmup=5"
    (line,) = warnings(load(write(MINIMAL), overrides(decays)).trainer)
    assert line.startswith("trainer.algorithm.gae_lambda is 0.95 and trainer.critic_warmup is 0: until the critic has")
    fine = ([*overrides(decays), warm], overrides("advantage=gae"), overrides("advantage=rloo"))
    assert [list(warnings(load(write(MINIMAL), keys).trainer)) for keys in fine] == [[], [], []]


def test_bounds_are_taken_where_they_mean_something(write: Write) -> None:
    for keys in (
        "clip_low=0.1 dual_clip=3 ratio_to=behavior",
        "loss=gspo correction=masked_is gspo_low=0.001",
        "loss=gspo ratio_to=behavior gspo_low=0.02 gspo_high=0.02",
        "loss=opsm clip_high=0.3 opsm_delta=0.1",
        "correction=masked_is mask_low=0.2",
        "advantage=gae gamma=0.9 gae_lambda=0 whiten_advantages=false kl_coef=0.1 kl_in_reward=true",
        "kl_coef=0.1 kl=k1",
        "correction=masked_is_geometric geometric_low=0.8 geometric_high=2 tis_cap=3",
        "loss=gmpo gmpo_low=0.1 loss_agg=sequence_sum veto_below=1e-4",
        "loss=dppo dppo_divergence=kl dppo_low=0.05 entropy_coef=0.001 ess_scaled_lr=true",
        "advantage=none distill_coef=1",
    ):
        load(write(MINIMAL), overrides(keys))


def test_the_default_is_grpo_with_truncated_importance_sampling(write: Write) -> None:
    how = load(write(MINIMAL)).trainer.algorithm
    assert (how.advantage, how.loss, how.ratio_to, how.correction) == ("grpo", "ppo_clip", "old", "tis")
    assert how == msgspec.convert({}, Algorithm)


def test_a_users_functions_are_found_beside_the_file_and_tried_before_anything_starts(
    write: Write, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "def advantage(rewards, group_ids): ...\n"
        "def loss(logprobs, old, behavior, advantages, row): ...\n"
        "def short(logprobs): ...\n"
    )
    text = MINIMAL + '[trainer.algorithm]\nadvantage = "mine.py:advantage"\nloss = "mine.py:loss"\n'
    config = load(write(text))
    assert import_paths(config)["trainer.algorithm.loss"] == f"{tmp_path}/mine.py:loss"
    present(config)
    with pytest.raises(ConfigError, match=r"trainer\.algorithm\.loss is .*mine\.py:other.* has no other"):
        present(load(write(text), [f"trainer.algorithm.loss={tmp_path}/mine.py:other"]))
    with pytest.raises(ConfigError, match=r"it is called with 5 values, but too many positional arguments"):
        present(load(write(text), [f"trainer.algorithm.loss={tmp_path}/mine.py:short"]))


IN_GROUP = {"grpo": "zero_spread", "dr_grpo": "zero_spread", "rloo": "zero_spread"}


@pytest.mark.parametrize("advantage", [*ADVANTAGES, "mine.py:advantage"])
def test_equal_rewards_are_filtered_by_default_where_the_advantage_is_against_the_group(
    write: Write, advantage: str
) -> None:
    path = write(MINIMAL.replace('filter = "none"\n', ""))
    keys = overrides(f"advantage={advantage}{' distill_coef=1' if advantage == 'none' else ''}")
    assert filter_of(load(path, keys)) == IN_GROUP.get(advantage, "none")
    assert filter_of(load(path, [*keys, "trainer.algorithm.distill_coef=1"])) == "none"
    for chosen in ("none", "zero_spread"):
        assert filter_of(load(path, [*keys, f"rollout.filter={chosen}"])) == chosen


def test_a_group_of_one_needs_an_advantage_that_is_not_against_the_group(write: Write) -> None:
    path, one = write(MINIMAL.replace('filter = "none"\n', "")), "rollout.group_size=1"
    with pytest.raises(ConfigError, match=r'group_size is 1; .*"reinforce_pp_baseline" compares the group: at least 2'):
        load(path, [one, *overrides("advantage=reinforce_pp_baseline")])
    with pytest.raises(ConfigError, match=r'rollout\.group_size is 1; rollout\.filter "zero_spread" releases every'):
        load(path, [one])
    assert load(path, [one, *overrides("advantage=gae")]).rollout.group_size == 1
