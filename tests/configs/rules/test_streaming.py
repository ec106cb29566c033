"""A configuration that cannot be trained in pieces is rejected by name before anything starts."""

from typing import Any

import msgspec
import pytest

from staleflow.configs.errors import ConfigError
from staleflow.configs.rules.checks import consistent
from staleflow.configs.schema import Config


def config(algorithm: dict[str, Any] | None = None, **trainer: Any) -> Config:
    table = {
        "model": {"path": "somewhere"},
        "prompts": {"source": "somewhere:prompts"},
        "reward": {"run": "somewhere:reward"},
        "trainer": {"streaming": True, "algorithm": algorithm or {}, **trainer},
    }
    return msgspec.convert(table, Config)


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"advantage": "dr_grpo"},
        {"advantage": "gae", "whiten_advantages": False},
        {"advantage": "rloo", "loss": "gspo"},
        {"loss": "mine.py:loss"},
        {"kl_coef": 0.1},
        {"advantage": "none", "distill_coef": 1.0, "loss_agg": "sequence_mean", "entropy_coef": 0.01},
    ],
    ids=str,
)
def test_algorithms_that_need_no_more_than_a_group_may_stream(algorithm: dict[str, Any]) -> None:
    consistent(config(algorithm, stream_groups=8))


@pytest.mark.parametrize(("nproc", "groups"), [(2, 2), (2, 3), (3, 4), (4, 8)])
def test_every_rank_must_have_a_group_of_every_piece(nproc: int, groups: int) -> None:
    consistent(config(backend="fsdp", nproc=nproc, stream_groups=groups))


@pytest.mark.parametrize(
    ("settings", "what", "value", "allowed"),
    [
        (
            config({"advantage": "reinforce_pp"}),
            "trainer.algorithm.advantage",
            "reinforce_pp",
            'it must be one of "dr_grpo", "gae", "grpo", "none", "rloo"',
        ),
        (
            config({"advantage": "reinforce_pp_baseline"}),
            "trainer.algorithm.advantage",
            "reinforce_pp_baseline",
            'it must be one of "dr_grpo", "gae", "grpo", "none", "rloo"',
        ),
        (
            config({"advantage": "mine.py:advantage"}),
            "trainer.algorithm.advantage",
            "mine.py:advantage",
            'it must be one of "dr_grpo", "gae", "grpo", "none", "rloo"',
        ),
        (
            config({"advantage": "gae"}),
            "trainer.algorithm.whiten_advantages",
            True,
            "with trainer.streaming it must be false",
        ),
        (
            config({"loss": "m2po"}),
            "trainer.algorithm.loss",
            "m2po",
            'it must be one of "aipo", "cispo", "dppo", "gmpo", "gspo", "opsm", "ppo_clip"',
        ),
        (config(backend="ddp", nproc=2), "trainer.stream_groups", 1, "2 ranks needs a group of every micro-batch"),
        (config(backend="fsdp", nproc=4, stream_groups=6), "trainer.stream_groups", 6, "trainer.batch_size = 8 none"),
        (config(stream_groups=9), "trainer.stream_groups", 9, "trainer.batch_size = 8 groups"),
        (config(streaming=False, stream_groups=2), "trainer.stream_groups", 2, "leave it at 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_needs_the_whole_batch_is_refused_by_name(
    settings: Config, what: str, value: object, allowed: str
) -> None:
    with pytest.raises(ConfigError) as error:
        consistent(settings)
    assert (error.value.what, error.value.value) == (what, value)
    assert allowed in error.value.allowed
