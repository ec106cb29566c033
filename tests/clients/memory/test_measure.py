# pyright: basic, reportMissingImports=false
"""The measured passes agree with the memory that the same step allocates on a CPU."""

import gc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig

from staleflow.clients.memory.allocations import Allocations
from staleflow.clients.memory.measure import measured
from staleflow.clients.memory.question import Measured, Question
from staleflow.clients.trainer.data.batch import FetchedGroup, TrainBatch, assemble
from staleflow.clients.trainer.torch_trainer import TorchTrainer
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import GroupId, Step
from tests.clients.trainer.making import header, payload

PROMPT, COMPLETION, GROUP = 24, 40, 4
TOLERANCE = 0.15


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers in which linear layers, attention and logits all matter, and grouped key heads."""
    folder = tmp_path_factory.mktemp("sized")
    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM(  # type: ignore[no-untyped-call]
        Qwen2Config(
            vocab_size=1500,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=True,
        )
    )
    model.save_pretrained(folder)
    return folder


def config(model: dict[str, Any], **trainer: Any) -> Config:
    table = {
        "prompts": {"source": "a:b"},
        "reward": {"run": "a:b"},
        "model": model,
        "rollout": {"max_new_tokens": COMPLETION, "group_size": GROUP},
        "trainer": {"micro_tokens": 1024, "logit_chunk": 256, **trainer},
    }
    return msgspec.convert(table, Config)


def question(config: Config, directory: Path, **more: Any) -> Question:
    return Question(config=config, directory=str(directory), prompt_tokens=PROMPT, **more)


def groups(step: int, count: int = 15) -> TrainBatch:
    members = [
        FetchedGroup(group=GroupId(g), row={}, payload=payload(g, [COMPLETION] * GROUP, prompt=PROMPT))
        for g in range(count)
    ]
    return assemble(header(step), members)


def allocated(trainer: TorchTrainer, step: int) -> int:
    """Return the peak of the bytes that torch's allocator gave to one step, kernels included."""
    batch = groups(step)
    gc.collect()
    gc.disable()  # a collection during the step would free tensors of earlier tests
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            trainer.train(batch, Step(step), lambda: False)
    finally:
        gc.enable()
    recorded: Any = record.profiler
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    return int(np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]).max())


@pytest.mark.parametrize(
    ("kind", "checkpointing"),
    [
        pytest.param("padded", False, marks=pytest.mark.long),
        ("padded", True),
        *(("shared", flag) for flag in (False, True)),
        ("lora", False),
        pytest.param("lora", True, marks=pytest.mark.long),
        *((kind, False) for kind in ("packed", "bfloat16", "whole logits")),
    ],
)
def test_the_peak_of_a_step_is_the_planned_one(directory: Path, kind: str, *, checkpointing: bool) -> None:
    model: dict[str, Any] = {"lora": {"rank": 8}} if kind == "lora" else {}
    model["dtype"] = "bfloat16" if kind == "bfloat16" else "float32"
    trainer = {"share_prompts": kind not in ("padded", "packed"), "packing": kind == "packed"}
    trainer["gradient_checkpointing"] = checkpointing
    settings = config(model, **trainer, **({"logit_chunk": 0} if kind == "whole logits" else {}))
    sizes = measured(question(settings, directory))
    assert sizes.problems == []
    real = TorchTrainer(settings, directory)
    assert sizes.trained == sum(p.numel() for p in real.model.parameters() if p.requires_grad)
    assert sizes.weights == sum(p.nbytes for p in real.model.parameters())
    real.train(groups(0), Step(0), lambda: False)  # the optimizer's moments exist from now on
    planned = 4 * sizes.trained + sizes.activations + sizes.logits
    assert allocated(real, 1) == pytest.approx(planned, rel=TOLERANCE)


def test_keys_and_values_of_a_token_are_those_of_all_layers(directory: Path) -> None:
    sizes = measured(question(config({"dtype": "bfloat16"}), directory))
    assert sizes.kv_token == 4 * 2 * 2 * 32 * 2  # layers, keys and values, heads, size, bytes


def test_reference_and_critic_are_measured_with_their_own_models(directory: Path) -> None:
    plain = measured(question(config({}), directory))
    both = measured(question(config({}), directory, reference=str(directory), critic=str(directory)))
    assert (plain.reference_parameters, plain.reference_pass, plain.critic_parameters, plain.critic_pass) == (0,) * 4
    assert both.problems == []
    assert both.reference_parameters == plain.parameters
    assert both.critic_parameters == plain.parameters + 128 + 1  # the output layer is tied; a head of one value
    assert both.reference_pass >= 1024 * 1500 * 4  # logits of all tokens
    assert both.critic_pass > both.reference_pass / 4


def test_a_model_that_cannot_run_without_values_says_what_is_missing(tmp_path: Path) -> None:
    layers: dict[str, Any] = {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "hidden_size": 32,
    }
    experts: dict[str, Any] = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "vocab_size": 100,
    }
    Qwen3MoeConfig(**layers, **experts).save_pretrained(tmp_path)
    sizes: Measured = measured(question(config({}), tmp_path))
    assert sizes.parameters > 0
    assert sizes.activations == 0
    assert any(text.startswith("the trainer's passes: ") for text in sizes.problems)


def test_a_tensor_counts_once_until_its_last_view_is_gone() -> None:
    old = torch.zeros(10)
    with Allocations() as count:
        assert old.t() is not None
        assert count.live == 0
        new = torch.zeros(100)
        view = new[3:] + 0 * old[0]
        assert count.live == 400 + 388
        rest = new.view(10, 10)[2]
        del new, view
        assert count.live == 400
        del rest
        assert count.live == 0
        assert count.peak >= 788
        assert count.reset_peak() == count.peak == 0
