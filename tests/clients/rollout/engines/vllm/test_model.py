# pyright: basic, reportMissingImports=false
"""The checks that run before vLLM starts work without vLLM."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from staleflow.clients.rollout.engines.base import EngineError, LoadError
from staleflow.clients.rollout.engines.load_weights import check_weights, one_name_each
from staleflow.clients.rollout.engines.vllm import model as vllm_model
from staleflow.clients.rollout.engines.vllm.model import (
    arguments,
    check_devices,
    check_heads,
    check_server,
    context_of,
    open_vllm,
    skeleton,
    start_engine,
)
from staleflow.clients.rollout.engines.vllm.package import PARENT, advice, prepare
from staleflow.clients.tokens import check_vocabulary, open_tokenizer, stop_ids
from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config, Model, Prompts, Reward, Rollout, Vllm
from staleflow.configs.vllm_options import FIXED, OWN
from tests.clients.rollout.fidelity import STOP, VOCABULARY, build, published, save


def config(**vllm: Any) -> Config:
    return Config(
        seed=(1 << 40) + 3,
        model=Model(path="model", dtype="bfloat16"),
        prompts=Prompts(path="prompts.jsonl"),
        reward=Reward(run="nothing:here"),
        rollout=Rollout(engine="vllm", max_inflight=7, vllm=Vllm(**vllm)),
    )


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_skeleton_has_the_names_shapes_and_ties_of_the_model_and_no_weights(tmp_path: Path, kind: str) -> None:
    model = build(kind)
    bones = skeleton(save(model, tmp_path), "float32")
    assert all(tensor.is_meta for tensor in bones.state_dict().values())
    weights = published(model)
    check_weights(bones, weights)
    tied = one_name_each(bones, weights)
    assert ("lm_head.weight" in tied) == (kind == "llama")
    assert list(tied) == [name for name in bones.state_dict() if name in tied]
    del weights["model.embed_tokens.weight"]
    if kind == "llama":
        with pytest.raises(LoadError, match=r"model\.embed_tokens\.weight is missing"):
            check_weights(bones, weights)
    else:
        check_weights(bones, weights)  # the tensor exists under its other name
        assert one_name_each(bones, weights)["model.embed_tokens.weight"] is weights["lm_head.weight"]
    assert stop_ids(bones, open_tokenizer(tmp_path)) == [STOP]


def test_bfloat16_is_asked_for_as_its_bits(tmp_path: Path) -> None:
    bones = skeleton(save(build(), tmp_path), "bfloat16")
    check_weights(bones, published(build(dtype="bfloat16")))
    with pytest.raises(LoadError, match=r"is float32 .* the model has torch\.bfloat16"):
        check_weights(bones, published(build()))


def test_a_context_longer_than_the_models_is_refused() -> None:
    assert (context_of(build(), 0), context_of(build(), 100)) == (512, 100)
    with pytest.raises(ConfigError, match=r"rollout\.vllm\.max_model_len is 513; the model's context is 512 tokens"):
        context_of(build(), 513)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    model = build()
    check_vocabulary(open_tokenizer(save(model, tmp_path)), model)
    other = open_tokenizer(save(model, tmp_path, words=VOCABULARY + 2))
    with pytest.raises(ConfigError, match=r"tokenizer is \"63 tokens\"; the model's vocabulary has 61"):
        check_vocabulary(other, model)


def test_tensor_parallel_needs_as_many_gpus_or_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(vllm_model, "usable_cores", lambda: 4)
    check_devices(2, cpu=False)
    check_devices(4, cpu=True)
    with pytest.raises(ConfigError, match="this machine has 2 GPUs: at most 2"):
        check_devices(4, cpu=False)
    with pytest.raises(ConfigError, match="this machine has 4 cores: at most 4"):
        check_devices(5, cpu=True)


def test_heads_without_a_kernel_are_refused() -> None:
    check_heads(build(), Path("model"), [32, 64])
    with pytest.raises(ConfigError, match="its attention heads have 32 numbers; vLLM on a CPU needs one of 64, 80"):
        check_heads(build(), Path("model"), [64, 80])


def test_arguments_say_what_the_contract_needs_and_differ_by_device() -> None:
    gpu = arguments(config(tensor_parallel=2, prefix_caching=False), Path("model"), 64, cpu=False)
    cpu = arguments(config(kv_cache_mb=3), Path("model"), 64, cpu=True)
    assert gpu == {
        "model": "model",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "seed": 3,
        "max_model_len": 64,
        "max_num_seqs": 7,
        "tensor_parallel_size": 2,
        "enable_prefix_caching": False,
        "enforce_eager": False,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "stream_interval": 16,
        "disable_log_stats": True,
        "weight_transfer_config": {"backend": "staleflow"},
        "gpu_memory_utilization": 0.9,
    }
    assert (cpu["enforce_eager"], cpu["kv_cache_memory_bytes"]) == (True, 3 << 20)
    assert (cpu["distributed_executor_backend"], "gpu_memory_utilization" in cpu) == ("uni", False)
    two = arguments(config(tensor_parallel=2), Path("model"), 64, cpu=True)
    assert (two["distributed_executor_backend"], two["tensor_parallel_size"]) == ("mp", 2)


def test_options_are_passed_on_and_replace_only_defaults() -> None:
    given = {"quantization": "fp8", "block_size": 64}
    for cpu in (True, False):
        plain = arguments(config(), Path("model"), 64, cpu=cpu)
        assert arguments(config(options=given), Path("model"), 64, cpu=cpu) == plain | given
        assert set(plain) - {*OWN, *FIXED} <= {"block_size", "distributed_executor_backend", "stream_interval"}


SERVER: dict[str, Any] = {
    "model_config": {"logprobs_mode": "processed_logprobs", "dtype": "torch.bfloat16", "max_model_len": 77},
    "weight_transfer_config": {"backend": "staleflow"},
    "parallel_config": {"data_parallel_size": 1},
}


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"weight_transfer_config": None}, r"has --weight-transfer-config .*None.*; start it with .*\"staleflow\""),
        ({"parallel_config": {"data_parallel_size": 2}}, r"--data-parallel-size 2; start it with .* '1'"),
        (
            {"model_config": SERVER["model_config"] | {"logprobs_mode": "raw_logprobs"}},
            r"--logprobs-mode raw_logprobs;",
        ),
        ({"model_config": SERVER["model_config"] | {"dtype": "torch.float16"}}, r"--dtype float16; .* 'bfloat16'"),
    ],
)
def test_a_server_that_cannot_serve_the_run_is_refused_with_the_option_to_set(wrong: Any, line: str) -> None:
    assert check_server(SERVER, "http://box:1", "bfloat16") == 77
    with pytest.raises(ConfigError, match=r'rollout\.vllm_server\.url is "http://box:1"; the server .*' + line):
        check_server(SERVER | wrong, "http://box:1", "bfloat16")


def test_the_environment_is_prepared_but_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "5"})
    prepare(2, cpu=False, matmul_precision="high")
    assert os.environ["VLLM_FLOAT32_MATMUL_PRECISION"] == "high"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in os.environ
    prepare(2, cpu=True)
    assert (os.environ["OMP_NUM_THREADS"], os.environ["VLLM_CPU_OMP_THREADS_BIND"]) == ("5", "nobind")
    prepare(2, cpu=True, ranks=2)
    assert os.environ["OMP_NUM_THREADS"] == "2", "both ranks together"
    assert (os.environ["VLLM_WORKER_MULTIPROC_METHOD"], os.environ[PARENT]) == ("spawn", str(os.getpid()))


def test_a_broken_torchvision_is_named_with_what_to_do() -> None:
    said = advice(RuntimeError("operator torchvision::nms does not exist"))
    assert said.startswith("RuntimeError: operator torchvision::nms does not exist; torchvision torchaudio torchcodec")
    assert said.endswith("-m pip uninstall torchvision torchaudio torchcodec")
    assert advice(OSError("no")) == "OSError: no"


def pretend(monkeypatch: pytest.MonkeyPatch, *, arguments: Exception | None = None, engine: Exception) -> None:
    """Install a fake vLLM whose argument checks, or whose engine, raise this exception."""

    def create_engine_config(usage: str) -> str:
        if arguments is not None:
            raise arguments
        return "checked"

    def from_vllm_config(found: str, **_: Any) -> None:
        assert found == "checked"
        raise engine

    made = SimpleNamespace(create_engine_config=create_engine_config, disable_log_stats=True)
    modules: dict[str, dict[str, Any]] = {
        "vllm.engine.arg_utils": {"AsyncEngineArgs": lambda **_: made},
        "vllm.usage.usage_lib": {"UsageContext": SimpleNamespace(ENGINE_CONTEXT="context")},
        "vllm.v1.engine.async_llm": {"AsyncLLM": SimpleNamespace(from_vllm_config=from_vllm_config)},
        "staleflow.clients.rollout.engines.vllm.counters": {"Counters": lambda: SimpleNamespace(of=None)},
    }
    for name, content in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))


def test_only_arguments_that_vllm_refuses_are_the_operators_error(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = ValueError("Total number of attention heads (2) must be divisible by tensor parallel size (3).")
    pretend(monkeypatch, arguments=heads, engine=OSError())
    with pytest.raises(ConfigError, match=r"rollout\.engine .*does not start .*: ValueError: Total number of"):
        start_engine(config(), Path("model"), 64, cpu=False)
    pretend(monkeypatch, arguments=OSError(98, "Address already in use"), engine=OSError())
    with pytest.raises(EngineError, match=r"vLLM does not start .*: OSError: .*Address already in use"):
        start_engine(config(), Path("model"), 64, cpu=False)


@pytest.mark.parametrize(
    "passing",
    [
        ValueError("Free memory on device (3.2/79.1 GiB) is less than desired GPU memory utilization"),
        AssertionError("Error in memory profiling."),
        RuntimeError("Engine core initialization failed. See root cause above."),
    ],
)
def test_an_engine_that_does_not_start_may_be_started_again(
    monkeypatch: pytest.MonkeyPatch, passing: Exception
) -> None:
    pretend(monkeypatch, engine=passing)
    with pytest.raises(EngineError) as raised:
        start_engine(config(), Path("model"), 64, cpu=False)
    assert str(passing) in str(raised.value)


async def test_an_engine_whose_first_request_fails_is_closed_and_may_be_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    closed = list[bool]()

    class Engine:
        def __init__(self, *_: object, **__: object) -> None: ...

        async def start(self) -> None:
            raise ValueError("CUDA out of memory")

        async def close(self) -> None:
            closed.append(True)

    for name, stand_in in {
        "prepare": lambda *_, **__: None,
        "open_package": lambda: None,
        "register": lambda: None,
        "head_sizes": lambda: [32],
        "start_engine": lambda *_, **__: (None, None),
    }.items():
        monkeypatch.setattr(vllm_model, name, stand_in)
    monkeypatch.setitem(
        sys.modules, "staleflow.clients.rollout.engines.vllm.engine", SimpleNamespace(VllmEngine=Engine)
    )
    with pytest.raises(EngineError, match=r"vLLM does not start .*: ValueError: CUDA out of memory"):
        await open_vllm(config(), save(build(), tmp_path))
    assert closed == [True]
