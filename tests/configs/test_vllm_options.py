"""Arguments of vLLM's engine: those of other keys are refused, and unknown names are corrected."""

import pytest

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import load
from staleflow.configs.vllm_options import check_names
from tests.configs.conftest import MINIMAL, Write

KNOWN = ("max_num_seqs", "max_num_batched_tokens", "quantization", "quantization_config")


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("max_num_seqs=7", "max_num_seqs is 7; another key sets this argument of vLLM: use rollout.max_inflight"),
        ("model=/m", 'model is "/m"; another key sets this argument of vLLM: use model.path or model.build'),
        (
            "data_parallel_size=2",
            "data_parallel_size is 2; another key sets this argument of vLLM: use rollout.workers: each worker is one "
            "engine",
        ),
        (
            "logprobs_mode=raw_logits",
            'logprobs_mode is "raw_logits"; staleflow sets this argument of vLLM: log-probabilities must be those of '
            "the distribution sampled from",
        ),
    ],
)
def test_an_argument_that_staleflow_sets_is_refused_with_the_key_to_use(write: Write, override: str, line: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(write(MINIMAL), [f"rollout.vllm.options.{override}"])
    assert str(raised.value) == f"rollout.vllm.options.{line}"


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("max-num-batched-tokens", "did you mean max_num_batched_tokens?"),
        ("quantisation", "did you mean quantization or quantization_config?"),
        ("max_num_seq", "AsyncEngineArgs in vLLM's documentation lists them"),  # the near match belongs to another key
        ("zzz", "AsyncEngineArgs in vLLM's documentation lists them"),
    ],
)
def test_a_name_that_vllm_does_not_have_is_refused_with_near_matches(name: str, near: str) -> None:
    check_names({"quantization": "fp8"}, KNOWN)
    with pytest.raises(ConfigError) as raised:
        check_names({name: 1}, KNOWN)
    expected = f"rollout.vllm.options.{name} is 1; the engine of the installed vLLM has no such argument; {near}"
    assert str(raised.value) == expected
