"""A run whose engines and trainer compute different distributions starts with a warning that names the key."""

import logging
from typing import Any

import msgspec
import pytest

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import load
from staleflow.configs.loading.presence import present
from staleflow.configs.rules.sampling import warnings
from staleflow.configs.schema import Config
from tests.configs.conftest import MINIMAL, Write


def config(rollout: dict[str, Any], algorithm: dict[str, Any] | None = None, **trainer: Any) -> Config:
    table = {
        "model": {"path": "somewhere"},
        "prompts": {"source": "somewhere:prompts"},
        "reward": {"run": "somewhere:reward"},
        "rollout": rollout,
        "trainer": {"algorithm": algorithm or {}, **trainer},
    }
    return msgspec.convert(table, Config)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("top_p", 0.9, "0.9"),
        ("top_k", 20, "20"),
        ("min_p", 0.1, "0.1"),
        ("repetition_penalty", 1.2, "1.2"),
        ("frequency_penalty", -0.5, "-0.5"),
        ("presence_penalty", 0.5, "0.5"),
    ],
)
def test_each_key_that_shapes_the_distribution_is_named(key: str, value: float, text: str) -> None:
    (line,) = warnings(config({key: value}))
    assert line.startswith(f"rollout.{key} is {text}, so engines do not sample from the distribution that the trainer")
    assert 'the weight of trainer.algorithm.correction "tis" is biased, at staleness 0 too' in line


@pytest.mark.parametrize(
    ("algorithm", "part"),
    [
        ({"correction": "masked_is"}, 'the weight of trainer.algorithm.correction "masked_is"'),
        ({"loss": "gspo"}, 'the weight of trainer.algorithm.correction "tis"'),
        ({"loss": "gspo", "ratio_to": "behavior"}, 'the ratio of trainer.algorithm.loss "gspo"'),
        ({"ratio_to": "behavior"}, 'the ratio of trainer.algorithm.loss "ppo_clip"'),
        (
            {"correction": "none", "advantage": "gae", "kl_coef": 0.1, "kl_in_reward": True},
            "the divergence of trainer.algorithm.kl_in_reward",
        ),
    ],
)
def test_the_part_of_the_loss_that_is_biased_is_named(algorithm: dict[str, Any], part: str) -> None:
    (line,) = warnings(config({"top_p": 0.9}, algorithm))
    assert f"{part} is biased" in line


def test_every_key_gives_a_line() -> None:
    penalties = {"repetition_penalty": 2, "frequency_penalty": 1, "presence_penalty": 1}
    assert len(list(warnings(config({"top_p": 0.9, "top_k": 5, "min_p": 0.1, **penalties})))) == 6


@pytest.mark.parametrize(
    "fine",
    [
        config({"temperature": 0.7, "stop": ["\n"], "top_p": 1.0}),
        config({"top_p": 0.9}, {"correction": "none"}),
        config({"top_p": 0.9}, {"loss": "gspo", "correction": "none"}),
        config({"top_p": 0.9, "engine": "simulated"}),
        config({"top_p": 0.9}, backend="simulated"),
    ],
)
def test_a_run_without_such_a_bias_has_no_warning(fine: Config) -> None:
    assert list(warnings(fine)) == []


def test_the_warning_is_logged_when_a_run_starts(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    real = MINIMAL.replace('"simulated"', '"transformers"', 1).replace('backend = "simulated"', "")
    chosen = load(write(real), ["model.build=staleflow.examples.quickstart.model:build", "rollout.top_k=5"])
    with caplog.at_level(logging.WARNING):
        present(chosen, ask=lambda question: {})
    assert [record.getMessage() for record in caplog.records] == list(warnings(chosen))


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("rollout.top_p=0", r"rollout\.top_p is 0"),
        ("rollout.min_p=1.5", r"rollout\.min_p is 1\.5"),
        ("rollout.top_k=-1", r"rollout\.top_k is -1"),
        ("rollout.repetition_penalty=0", r"rollout\.repetition_penalty is 0"),
        ("rollout.frequency_penalty=3", r"rollout\.frequency_penalty is 3"),
        ("rollout.presence_penalty=-2.5", r"rollout\.presence_penalty is -2\.5"),
        ("rollout.stop=['']", r"rollout\.stop"),
        ("rollout.topp=0.9", r"rollout\.topp .*did you mean rollout\.top_p"),
    ],
)
def test_a_value_out_of_range_is_named(write: Write, override: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        load(write(), [override])


def test_a_stop_string_may_end_a_line_and_survives_the_run_directory(write: Write) -> None:
    text = MINIMAL.replace("[rollout]", '[rollout]\nstop = ["\\n\\n", "User:"]')
    assert load(write(text)).rollout.stop == ["\n\n", "User:"]
