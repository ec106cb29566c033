# pyright: basic, reportMissingImports=false
"""Routers of many architectures record the experts that compute, and replay others with weights of their own scores."""

from typing import Any

import pytest
import torch

from staleflow.clients.models.routers import Routers
from staleflow.configs.errors import ConfigError
from tests.clients.trainer.backends.test_shared_prompts import built

CPU = torch.device("cpu")
SIX: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
LATENT: dict[str, Any] = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
DEEPSEEK = SIX | LATENT | {"head_dim": 4, "v_head_dim": 8, "n_routed_experts": 6, "n_shared_experts": 1}
KINDS: dict[str, tuple[str, dict[str, Any], int]] = {
    "qwen3_moe": ("qwen3_moe", SIX | {"num_experts": 6}, 2),
    "raw weights": ("olmoe", SIX | {"num_experts": 6, "norm_topk_prob": False}, 2),
    "mixtral": ("mixtral", SIX | {"num_local_experts": 6}, 2),
    "logits": ("granitemoe", SIX | {"num_local_experts": 6}, 2),
    "biases": ("gpt_oss", SIX | {"num_local_experts": 6, "layer_types": ["full_attention"] * 2}, 2),
    "one group": ("deepseek_v3", DEEPSEEK | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}, 2),
    "groups": ("deepseek_v3", DEEPSEEK | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}, 1),
}
"""Architecture, its configuration, and the number of layers with a router."""


def model_of(kind: str) -> Any:
    architecture, more, _ = KINDS[kind]
    return built(architecture, **more)


def pass_over(model: Any, tokens: int = 12) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=torch.arange(tokens)[None] % 20, use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_of_its_own_choice_changes_nothing_and_one_of_others_the_experts(kind: str) -> None:
    model = model_of(kind)
    routers = Routers(model)
    assert (routers.layers, routers.experts, routers.per_token) == (KINDS[kind][2], 6, 2)
    routers.check(model, model, CPU)
    plain = pass_over(model)
    with routers.recording() as chosen:
        torch.testing.assert_close(pass_over(model), plain, rtol=0, atol=0)
    records, everywhere = torch.stack(chosen, 1), torch.ones(12, dtype=torch.bool)
    routers.replay(records, everywhere)
    torch.testing.assert_close(pass_over(model), plain, rtol=1e-5, atol=1e-6)
    counts = routers.take_counts()
    assert counts is not None
    assert counts.tolist() == [12 * routers.layers, 0]
    last = torch.arange(12) == 11
    routers.replay((records + 1) % 6, last)
    changed = pass_over(model)
    torch.testing.assert_close(changed[:-1], plain[:-1], rtol=1e-5, atol=1e-6)
    assert (changed[-1] - plain[-1]).abs().max() > 1e-3
    counts = routers.take_counts()
    assert counts is not None
    replayed, differ = counts.tolist()  # the second layer may choose the same experts for its changed input
    assert replayed == routers.layers
    assert differ >= 1
    routers.stop()
    torch.testing.assert_close(pass_over(model), plain, rtol=0, atol=0)


def test_a_replayed_router_has_the_gradient_of_its_weights_by_the_papers_formula() -> None:
    """R3 (arXiv:2510.11370): softmax over the router's own logits, restricted to the recorded experts."""
    model = model_of("mixtral")
    routers = Routers(model)
    block, hidden = model.model.layers[0].mlp, torch.randn(5, 32)
    records = torch.tensor([[0, 1], [2, 5], [4, 3], [1, 0], [5, 2]])
    routers.replay(records[:, None].expand(-1, 2, -1), torch.ones(5, dtype=torch.bool))
    _, weights, experts = block.gate(hidden)
    assert torch.equal(experts, records)
    masked = torch.full((5, 6), -torch.inf).scatter(1, records, 0.0)
    parameter = block.gate.weight
    expected = torch.softmax(hidden @ parameter.T + masked, -1).gather(1, records)
    torch.testing.assert_close(weights, expected)
    toward = torch.randn(5, 2)
    (ours,) = torch.autograd.grad((weights * toward).sum(), parameter)
    (theirs,) = torch.autograd.grad((expected * toward).sum(), parameter)
    torch.testing.assert_close(ours, theirs)
    assert ours.abs().max() > 1e-3


@pytest.mark.parametrize(
    ("kind", "more", "says"),
    [
        ("qwen3", {}, "qwen3 has no router that selects experts; set it to false"),
        (
            "phimoe",
            {"num_local_experts": 6, "num_experts_per_tok": 2},
            r"the routers of phimoe do not select their experts with torch\.topk; set it to false",
        ),
    ],
)
def test_models_without_such_routers_are_refused(kind: str, more: dict[str, Any], says: str) -> None:
    model = built(kind, **more)
    with pytest.raises(ConfigError, match=rf"trainer\.router_replay is true; {says}"):
        Routers(model).check(model, model, CPU)
