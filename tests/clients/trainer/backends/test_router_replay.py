# pyright: basic, reportMissingImports=false
# mypy: disable-error-code="no-untyped-call"
"""Passes whose routers select the recorded experts: padded, packed, with shared prompts, and computed again."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from staleflow.clients.models.files import load_model
from staleflow.clients.models.routers import Routers
from staleflow.clients.rollout.engines.base import Sampling
from staleflow.clients.rollout.engines.transformers.engine import TransformersEngine, generate
from staleflow.clients.rollout.groups import payload as payload_of
from staleflow.clients.trainer.data.batch import FetchedGroup, TrainBatch, assemble, rows_of
from staleflow.clients.trainer.torch_trainer import TorchTrainer
from staleflow.configs.errors import ConfigError
from staleflow.protocols.consistency.ids import GroupId, Step
from staleflow.protocols.wire.messages import ModelLimits
from staleflow.protocols.wire.routed_experts import COLUMN, NAME
from tests.clients.trainer.backends.test_fused_weights import saved
from tests.clients.trainer.backends.test_shared_prompts import built
from tests.clients.trainer.making import config, header, payload, share
from tests.clients.trainer.rank_process import record_experts
from tests.clients.trainer.ranked import ranked

CPU = torch.device("cpu")
LAYERS, EXPERTS, PER_TOKEN = 2, 5, 2
WAYS: dict[str, dict[str, Any]] = {
    "padded": {"share_prompts": False},
    "packed": {"share_prompts": False, "packing": True},
    "shared prompts": {},
}


def made(directory: Path, *, experts: int = EXPERTS, per_token: int = PER_TOKEN) -> Path:
    """Save a small random model whose output depends strongly on its experts."""
    sizes = {"num_experts": experts, "num_experts_per_tok": per_token, "moe_intermediate_size": 16}
    built("qwen3_moe", **sizes, norm_topk_prob=True, max_position_embeddings=64).save_pretrained(directory)
    return directory


def records(tokens: int, seed: int = 0) -> NDArray[np.uint8]:
    """Different experts for each token and layer, at random: a replay of anything else gives other values."""
    random = np.random.default_rng(seed)
    keys = random.random((tokens, LAYERS, EXPERTS))
    return keys.argsort(-1)[..., :PER_TOKEN].astype(np.uint8)


def recorded() -> TrainBatch:
    """Groups with prompts of several lengths, an empty completion, and tokens of an environment in the last group."""
    groups = list[FetchedGroup]()
    for number, (prompt, lengths) in enumerate([(5, [4, 9, 1]), (1, [3, 0, 6]), (4, [9, 12])]):
        group = payload(number, lengths, prompt=prompt)
        mask = np.ones(sum(lengths), np.uint8)
        if number == 2:
            mask[:2] = mask[4:6] = mask[-5:-3] = 0
        columns: dict[str, Any] = {COLUMN.key: records(sum(lengths), number)}
        full = replace(group, loss_mask=mask, columns=columns)
        groups.append(FetchedGroup(group=GroupId(number), row={}, payload=full))
    return assemble(header(0), groups)


def passed(trainer: Any, data: TrainBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """The log-probabilities of all rows in one pass of the trainer, and the gradient of a weighted sum of them."""
    trainer.model.zero_grad()
    with trainer._passes.computing():
        logprobs = trainer._passes.logprobs(data, np.arange(len(data.rewards)), last=False)
        (logprobs * torch.linspace(-1.0, 1.0, len(logprobs))).sum().backward()
    return logprobs.detach(), {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


def literal(directory: Path, data: TrainBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """The same, each row alone, by a router that is written out: Qwen3-MoE's, with the experts of the records."""
    model = load_model(directory, "float32", CPU)
    rows = list[Tensor]()

    def route(gate: Any, layer: int, row: int) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = hidden @ gate.weight.T
            probabilities = logits.softmax(-1)
            experts = probabilities.topk(PER_TOKEN).indices
            for place in range(len(hidden) - 1):
                if data.token_versions[row, place + 1] >= 0:
                    experts[place] = torch.from_numpy(data.token_columns[NAME][row, place + 1, layer].astype(np.int64))
            weights = probabilities.gather(1, experts)
            return logits, weights / weights.sum(-1, keepdim=True) if gate.norm_topk_prob else weights, experts

        return forward

    for row, (length, completion) in enumerate(zip(data.sequence_lengths, data.completion_lengths, strict=True)):
        for layer, block in enumerate(model.model.layers):
            block.mlp.gate.forward = route(block.mlp.gate, layer, row)
        ids = torch.from_numpy(data.input_ids[row, :length])[None]
        every = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        rows.append(every.gather(1, ids[0, 1:, None])[int(length - completion) - 1 :, 0])
    logprobs = torch.cat(rows)
    (logprobs * torch.linspace(-1.0, 1.0, len(logprobs))).sum().backward()
    return logprobs.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(ours: tuple[Tensor, dict[str, Tensor]], theirs: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-4, atol=1e-5)
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        torch.testing.assert_close(ours[1][name], gradient, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_every_kind_of_pass_has_the_values_and_gradient_of_routers_that_select_the_recorded_experts(
    tmp_path: Path, checkpointing: bool | str
) -> None:
    directory, data = made(tmp_path), recorded()
    expected = literal(directory, data)
    assert expected[1]["model.layers.0.mlp.gate.weight"].abs().max() > 1e-4, "the router learns"
    free = passed(TorchTrainer(config(), directory), data)
    assert (free[0] - expected[0]).abs().max() > 1e-2, "the records matter"
    for way in WAYS.values():
        trainer: Any = TorchTrainer(config(router_replay=True, gradient_checkpointing=checkpointing, **way), directory)
        assert trainer._passes._shares_prompts == (not way)
        assert_same(passed(trainer, data), expected)
        assert trainer._passes.values(trainer._ranks)["router/replay_changed"] > 0.3
        with torch.no_grad():
            outside = trainer.model(input_ids=torch.arange(9)[None]).logits
            plain = load_model(directory, "float32", CPU)(input_ids=torch.arange(9)[None]).logits
        torch.testing.assert_close(outside, plain)


@pytest.mark.parametrize("way", WAYS)
def test_a_replay_of_the_trainers_own_choice_changes_nothing(tmp_path: Path, way: str) -> None:
    directory, data = made(tmp_path), recorded()
    model = load_model(directory, "float32", CPU)
    routers = Routers(model)
    for row, length in enumerate(data.sequence_lengths):
        with torch.no_grad(), routers.recording() as chosen:
            model(input_ids=torch.from_numpy(data.input_ids[row, :length])[None])
        data.token_columns[NAME][row, 1:length] = torch.stack(chosen, 1)[:-1]
    plain = passed(TorchTrainer(config(**WAYS[way]), directory), data)
    trainer: Any = TorchTrainer(config(router_replay=True, **WAYS[way]), directory)
    assert_same(passed(trainer, data), plain)
    assert trainer._passes.values(trainer._ranks) == {"router/replay_changed": 0.0}


def test_a_trainer_whose_rounding_chooses_other_experts_computes_with_those_of_the_engine(tmp_path: Path) -> None:
    """From the engine's float32 weights to the experts that compute in the trainer's bfloat16."""
    directory = made(tmp_path, experts=32, per_token=4)
    model = load_model(directory, "float32", CPU).eval()
    engine = TransformersEngine(model, [23], slots=6, routers=Routers(model), lineage=0, version=0)
    prompts = [[1, 2, 3, 4], [5, 6]]
    groups = [
        FetchedGroup(group=GroupId(number), row={}, payload=payload_of(np.array(prompt, np.int32), samples, [COLUMN]))
        for number, (prompt, samples) in enumerate(
            zip(prompts, generate(engine, prompts, 6, Sampling(max_new_tokens=24)), strict=True)
        )
    ]
    for group in groups:
        group.payload.stages["stage/reward/reward"] = np.zeros(6, np.float32)
    data = assemble(header(0), groups)

    given = config(router_replay=True, share_prompts=False)
    coarse = msgspec.structs.replace(given, model=msgspec.structs.replace(given.model, dtype="bfloat16"))
    trainer: Any = TorchTrainer(coarse, directory)
    received: list[Tensor] = []
    for layer in trainer.model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _, arguments: received.append(arguments[1].clone()))
    passed(trainer, data)
    width = int(data.sequence_lengths.max())
    for layer, experts in enumerate(received):
        found = experts.view(len(data.rewards), width, 4).numpy()
        for row in range(len(data.rewards)):
            (sampled,) = np.nonzero(data.token_versions[row] >= 0)
            assert np.array_equal(found[row, sampled - 1], data.token_columns[NAME][row, sampled, layer])
    assert trainer._passes.values(trainer._ranks)["router/replay_changed"] > 0, "bfloat16 would choose others"


def test_steps_of_several_updates_and_in_parts_replay_too(tmp_path: Path) -> None:
    directory, data = made(tmp_path), recorded()
    whole = TorchTrainer(config(router_replay=True), directory)
    values = whole.train(data, Step(0), lambda: False).values
    assert values["router/replay_changed"] > 0.3
    updates = TorchTrainer(config(router_replay=True, minibatches=3, router_aux_coef=0.01), directory)
    updated = updates.train(recorded(), Step(0), lambda: False).values
    assert updated["router/replay_changed"] > 0.3
    assert updated["router/aux_loss"] > 1
    parts = TorchTrainer(config(router_replay=True), directory)
    parts.begin()
    for group in range(3):
        parts.add(rows_of(data, np.flatnonzero(data.group_ids == group)), lambda: False, last=group == 2)
    streamed = parts.finish(data, Step(0)).values
    for name in ("router/replay_changed", "loss", "grad_norm"):
        assert streamed[name] == pytest.approx(values[name], rel=1e-4), name


def test_the_limits_that_shards_check_are_those_of_the_model(tmp_path: Path) -> None:
    directory = made(tmp_path)
    wanted = ModelLimits(vocabulary=20, context=64, moe_layers=LAYERS, experts_per_token=PER_TOKEN, experts=EXPERTS)
    assert TorchTrainer(config(router_replay=True), directory).limits == wanted
    assert TorchTrainer(config(), directory).limits == ModelLimits(vocabulary=20, context=64)


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    wanted = r"trainer\.router_replay is true; qwen3 has no router that selects experts; set it to false"
    with pytest.raises(ConfigError, match=wanted):
        TorchTrainer(config(router_replay=True), saved(tmp_path, "qwen3"))


@pytest.mark.slow
def test_ranks_with_sharded_weights_replay_the_records_of_the_rows_that_they_exchange(tmp_path: Path) -> None:
    directory = made(tmp_path / "model")
    sharded = config(router_replay=True, backend="fsdp")
    two = ranked(sharded, directory, tmp_path / "two", 2, steps=[0, 1], experts=EXPERTS, longest=3)
    trainer = TorchTrainer(config(router_replay=True), directory)
    for step in range(2):
        data = share(step, 0, 1, longest=3)
        record_experts(data, EXPERTS)
        values = trainer.train(data, Step(step), lambda: False).values
        for name, tolerance in (("router/replay_changed", 0.05), ("grad_norm", 1e-3)):
            assert two.column(name)[step] == pytest.approx(values[name], rel=tolerance), name
        assert values["router/replay_changed"] > 0.3
