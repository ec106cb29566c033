# pyright: basic, reportMissingImports=false
"""The torch backend trains a two-layer model: steps, literal gradient, resuming, and data that must not be trained."""

import dataclasses
import json
import math
import shutil
import weakref
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from staleflow.clients.models import files as torch_files
from staleflow.clients.trainer.backends.base import Stopped
from staleflow.clients.trainer.backends.collectives import ManyRanks, OneRank
from staleflow.clients.trainer.data.batch import FetchedGroup, TrainBatch, assemble
from staleflow.clients.trainer.data.micro_batches import concatenated
from staleflow.clients.trainer.torch_trainer import TorchTrainer
from staleflow.configs.errors import ConfigError
from staleflow.configs.ranks import Place
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import GroupId, Step, Version
from staleflow.protocols.wire.trajectory import GroupPayload
from tests.clients.trainer.making import batch, config, header, members, payload
from tests.docs.test_blocks import defined


def going_on() -> bool:
    return False


def trained(trainer: TorchTrainer, *steps: int) -> dict[str, float]:
    values: dict[str, float] = {}
    for step in steps:
        result = trainer.train(batch(step), Step(step), going_on)
        assert result.bad == ""
        values = result.values
    return values


def optimizer(trainer: TorchTrainer) -> Any:
    learner: Any = trainer.learner
    return learner.optimizer


def copied(trainer: TorchTrainer) -> dict[str, Any]:
    return {name: array.copy() for name, array in trainer.weights().items()}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def test_the_gradient_is_that_of_a_literal_loop_over_sequences_and_tokens(model_directory: Path) -> None:
    settings = config(micro_tokens=40, grad_clip=1e9)
    trainer, data = TorchTrainer(settings, model_directory), batch(0)
    gradients: dict[str, Any] = {}
    step = optimizer(trainer).step

    def keep(number: int, lr_factor: float) -> float:
        gradients.update({name: p.grad.clone() for name, p in trainer.model.named_parameters()})
        return float(step(number, lr_factor))

    optimizer(trainer).step = keep
    loss = trained(trainer, 0)["loss"]

    model = TorchTrainer(settings, model_directory).model
    total, tokens = torch.zeros(()), 0
    for row in range(len(data.rewards)):
        group = data.rewards[data.group_ids == data.group_ids[row]]
        advantage = float((data.rewards[row] - group.mean()) / (group.std(ddof=1) + 1e-6))
        length = int(data.sequence_lengths[row])
        ids = torch.from_numpy(data.input_ids[row, :length])
        logprobs = model(input_ids=ids.unsqueeze(0)).logits[0].log_softmax(-1)
        for place in range(3, length):
            logprob = logprobs[place - 1, ids[place]]
            weight = min(math.exp(float(logprob.detach()) - float(data.behavior_logprobs[row, place])), 2.0)
            total = total - weight * torch.exp(logprob - logprob.detach()) * advantage
            tokens += 1
    (total / tokens).backward()  # type: ignore[no-untyped-call]
    assert loss == pytest.approx(float(total.detach()) / tokens, rel=1e-4, abs=1e-6)
    for name, parameter in model.named_parameters():
        assert torch.allclose(gradients[name], parameter.grad, rtol=1e-3, atol=1e-6), name


def test_the_cut_into_micro_batches_changes_nothing_but_rounding(model_directory: Path) -> None:
    whole, cut = TorchTrainer(config(), model_directory), TorchTrainer(config(micro_tokens=20), model_directory)
    first, second = trained(whole, 0), trained(cut, 0)
    assert first == pytest.approx(second, rel=1e-4, abs=1e-6)
    for name, array in whole.weights().items():
        assert np.allclose(array, copied(cut)[name], atol=2e-5), name


def test_tokens_outside_the_loss_mask_change_nothing(model_directory: Path) -> None:
    one, two = TorchTrainer(config(), model_directory), TorchTrainer(config(), model_directory)
    data, other = batch(0), batch(0)
    for each in (data, other):
        each.loss_mask[:, -2:] = False
    other.behavior_logprobs[:, -2:] = np.nan
    first, second = one.train(data, Step(0), going_on), two.train(other, Step(0), going_on)
    assert first == second
    assert same(copied(one), copied(two))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_is_bit_identical_to_one_that_never_stopped(
    model_directory: Path, tmp_path: Path, dtype: str
) -> None:
    settings = msgspec.structs.replace(config(micro_tokens=40, warmup_steps=3), model=msgspec.convert(
        {"dtype": dtype}, type(config().model)))  # fmt: skip
    straight = TorchTrainer(settings, model_directory)
    expected = trained(straight, 0, 1, 2, 3)
    stopped = TorchTrainer(settings, model_directory)
    trained(stopped, 0, 1)
    stopped.save(tmp_path)
    torch.manual_seed(999)
    resumed = TorchTrainer(settings, model_directory)
    resumed.load(tmp_path)
    assert same(copied(resumed), copied(stopped))
    assert trained(resumed, 2, 3) == expected
    assert same(copied(resumed), copied(straight))


def test_the_random_state_goes_on_after_a_resume(model_directory: Path, tmp_path: Path) -> None:
    trainer = TorchTrainer(config(), model_directory)
    trainer.save(tmp_path)
    expected = torch.rand(3)
    torch.manual_seed(999)
    TorchTrainer(config(), model_directory).load(tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_a_checkpoint_opens_as_any_model_directory_and_holds_no_pickle(model_directory: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer = TorchTrainer(config(), model_directory)
    trained(trainer, 0)
    trainer.save(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(model.model.embed_tokens.weight, trainer.model.model.embed_tokens.weight)
    assert AutoTokenizer.from_pretrained(tmp_path)("1+2")["input_ids"] == [1, 10, 2]
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} <= {
        ".json",
        ".safetensors",
        ".jinja",
        ".txt",
        ".model",
    }


@pytest.mark.parametrize(
    "generation", [{"temperature": 0.9, "eos_token_id": [2, 5]}, {"do_sample": False, "top_p": 0.7}]
)
def test_a_generation_config_that_its_library_would_refuse_to_save_goes_along(
    model_directory: Path, tmp_path: Path, generation: dict[str, Any]
) -> None:
    directory, saved = tmp_path / "model", tmp_path / "saved"
    shutil.copytree(model_directory, directory)
    saved.mkdir()
    (directory / "generation_config.json").write_text(json.dumps(generation))
    trainer = TorchTrainer(config(), directory)
    before = trainer.model.generation_config.to_dict()
    trainer.save(saved)
    assert json.loads((saved / "generation_config.json").read_bytes()) == generation
    assert trainer.model.generation_config.to_dict() == before
    assert TorchTrainer(config(), saved).model.generation_config.eos_token_id == generation.get("eos_token_id")


def test_small_steps_of_a_bfloat16_model_add_up(model_directory: Path) -> None:
    """At this rate no single step moves a bfloat16 weight; sixteen steps in the master weights do."""
    settings = msgspec.structs.replace(
        config(lr=2e-6), model=msgspec.convert({"dtype": "bfloat16"}, type(config().model))
    )
    trainer = TorchTrainer(settings, model_directory)
    master = optimizer(trainer)._master["model.norm.weight"]
    assert master.dtype == torch.float32
    before = master.detach().clone()
    trained(trainer, *range(16))
    assert 1e-6 < float((master.detach() - before).abs().max()) < 1e-4
    assert copied(trainer)["model.norm.weight"].dtype == np.uint16


def test_the_learning_rate_warms_up_and_stays(model_directory: Path) -> None:
    trainer = TorchTrainer(config(lr=0.01, warmup_steps=4), model_directory)
    rates = [trainer.train(batch(step), Step(step), going_on).values["lr"] for step in range(6)]
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])


def test_the_policy_stays_while_the_critic_warms_up_and_then_starts_as_if_from_the_first_step(
    model_directory: Path,
) -> None:
    """Neither weights nor moments of the optimizer move; a critic of 0 everywhere gives every step advantages."""

    def valued(step: int) -> TrainBatch:
        data = batch(step)
        data.token_stages["critic/values"] = np.zeros_like(data.behavior_logprobs)
        return data

    def made(warmup: int) -> TorchTrainer:
        how = {"advantage": "gae"}
        return TorchTrainer(config(lr=0.01, warmup_steps=2, critic_warmup=warmup, algorithm=how), model_directory)

    trainer, warm = made(2), made(0)
    initial = copied(trainer)
    results = [trainer.train(valued(step), Step(step), going_on) for step in range(2)]
    assert [result.values["lr"] for result in results] == [0.0, 0.0]
    assert all(result.values["grad_norm"] > 0 and not result.bad for result in results)
    assert same(copied(trainer), initial)
    for number in range(3):
        late = trainer.train(valued(number), Step(2 + number), going_on)
        assert late == warm.train(valued(number), Step(number), going_on)
    assert not same(copied(trainer), initial)
    assert same(copied(trainer), copied(warm))


def test_gradient_clipping_bounds_the_gradient_and_reports_its_norm_from_before(model_directory: Path) -> None:
    trainer = TorchTrainer(config(grad_clip=1e-3), model_directory)
    norms: list[float] = []
    step = optimizer(trainer).step

    def look(number: int, lr_factor: float) -> float:
        squares = [float((p.grad.double() ** 2).sum()) for p in trainer.model.parameters()]
        norms.append(math.sqrt(sum(squares)))
        return float(step(number, lr_factor))

    optimizer(trainer).step = look
    assert trained(trainer, 0)["grad_norm"] > 0.01
    assert norms[0] == pytest.approx(1e-3, rel=1e-3)


def test_a_loss_that_is_not_finite_is_named_and_changes_nothing(model_directory: Path) -> None:
    trainer, clean = TorchTrainer(config(), model_directory), TorchTrainer(config(), model_directory)
    before, data = copied(trainer), batch(0)
    data.behavior_logprobs[0, 4] = np.nan
    result = trainer.train(data, Step(0), going_on)
    assert result.bad == "loss is nan"
    assert same(copied(trainer), before)
    assert trained(trainer, 1) == trained(clean, 1)
    assert same(copied(trainer), copied(clean))


def test_a_gradient_that_is_not_finite_is_named_and_changes_nothing(model_directory: Path) -> None:
    trainer = TorchTrainer(config(), model_directory)
    before = copied(trainer)
    trainer.model.model.norm.weight.register_hook(lambda gradient: gradient * math.inf)
    result = trainer.train(batch(0), Step(0), going_on)
    assert result.bad in ("gradient norm is nan", "gradient norm is inf")
    assert same(copied(trainer), before)


@pytest.mark.parametrize("parts", [1, 3])
def test_trajectories_that_were_cut_off_are_left_out_of_the_loss_and_of_what_it_is_divided_by(
    model_directory: Path, parts: int
) -> None:
    """The step equals that of the same rewards with those tokens masked, whole or in pieces; without the key it
    differs."""
    cut = np.arange(12) % 3 == 0
    whole, masked = dataclasses.replace(batch(0), cut=cut), batch(0)
    masked.loss_mask[cut] = False
    every, left = whole.trained_tokens, masked.trained_tokens
    assert 0 < left < every
    trainer, expected, plain = (
        TorchTrainer(config(mask_truncated=key, batch_size=3), model_directory) for key in (True, False, False)
    )
    wanted = expected.train(masked, Step(0), going_on).values
    assert plain.train(dataclasses.replace(batch(0), cut=cut), Step(0), going_on).values["trainer/tokens"] == every
    if parts == 1:
        found = trainer.train(whole, Step(0), going_on).values
    else:
        pieces = [
            dataclasses.replace(assemble(header(0), [one]), cut=cut[4 * place : 4 * place + 4])
            for place, one in enumerate(members(0))
        ]
        trainer.begin()
        for place, piece in enumerate(pieces):
            trainer.add(piece, going_on, last=place == 2)
        found = trainer.finish(concatenated(pieces, header(0)), Step(0)).values
    assert found["trainer/tokens"] == wanted["trainer/tokens"] == left
    assert found["length/truncated"] == pytest.approx(4 / 12)
    assert (found["loss"], found["grad_norm"]) == pytest.approx((wanted["loss"], wanted["grad_norm"]), rel=1e-4)
    assert parts > 1 or same(copied(trainer), copied(expected))
    assert not same(copied(plain), copied(expected))


class _Amid(OneRank):
    """One of two ranks; the other rank adds one to every count."""

    def gather(self, values: Any) -> Any:
        return np.concatenate([values, np.ones_like(values)])


def all_cut(step: int) -> TrainBatch:
    return dataclasses.replace(batch(step), cut=np.ones(12, np.bool_))


def test_a_batch_without_a_trained_token_is_named_and_changes_nothing(
    model_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """AdamW would otherwise continue with the momentum of earlier steps and with its weight decay."""
    settings = config(mask_truncated=True, weight_decay=0.1)
    trainer, clean = TorchTrainer(settings, model_directory), TorchTrainer(settings, model_directory)
    for one in (trainer, clean):
        trained(one, 0)
    before = copied(trainer)
    result = trainer.train(all_cut(1), Step(1), going_on)
    assert (result.bad, result.values["trainer/tokens"], result.values["grad_norm"]) == ("", 0.0, 0.0)
    assert same(copied(trainer), before)
    assert "step 1: no token to train; batch consumed, weights unchanged" in caplog.text
    assert trained(trainer, 2) == trained(clean, 2)
    assert same(copied(trainer), copied(clean))


def test_a_rank_without_a_trained_token_takes_the_step_that_others_have_tokens_for(
    model_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = TorchTrainer(config(mask_truncated=True), model_directory, None, _Amid(torch.device("cpu")))
    trained(trainer, 0)
    before = copied(trainer)
    trainer.train(all_cut(1), Step(1), going_on)
    assert not same(copied(trainer), before)
    assert "no token to train" not in caplog.text


def test_being_asked_to_end_between_micro_batches_undoes_the_step(model_directory: Path) -> None:
    trainer, clean = TorchTrainer(config(micro_tokens=20), model_directory), TorchTrainer(config(), model_directory)
    looks = iter([False, False, True])
    with pytest.raises(Stopped):
        trainer.train(batch(0), Step(0), lambda: next(looks))
    assert same(copied(trainer), copied(clean))
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def sampled(trainer: TorchTrainer, settings: Config) -> TrainBatch:
    """A batch that the transformers engine wrote with the trainer's own weights."""
    from staleflow.clients.rollout.engines.base import Sampling
    from staleflow.clients.rollout.engines.transformers.engine import TransformersEngine, generate

    engine = TransformersEngine(trainer.model, [19])
    sampling = Sampling(max_new_tokens=12, temperature=settings.rollout.temperature)
    groups = generate(engine, [[1, 10, 2, 13], [3, 10]], 4, sampling, seed=1)
    members = []
    for group, trajectories in enumerate(groups):
        made = payload(group, [len(t.token_ids) for t in trajectories])
        columns = made.to_arrays() | {
            "prompt_ids": np.array([[1, 10, 2, 13], [3, 10]][group], np.int32),
            "token_ids": np.concatenate([t.token_ids for t in trajectories]).astype(np.int32),
            "logprobs": np.concatenate([t.logprobs for t in trajectories]),
        }
        made = GroupPayload.from_arrays(columns)
        members.append(FetchedGroup(group=GroupId(group), row={}, payload=made))
    return assemble(header(0), members)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_trainer_and_engine_agree_on_the_probability_of_every_token(model_directory: Path, temperature: float) -> None:
    settings = config()
    rollout = msgspec.structs.replace(settings.rollout, temperature=temperature)
    settings = msgspec.structs.replace(settings, rollout=rollout)
    trainer = TorchTrainer(settings, model_directory)
    values = trainer.train(sampled(trainer, settings), Step(0), going_on).values
    assert values["mismatch_kl"] == pytest.approx(0.0, abs=1e-9)
    assert values["is_weight/mean"] == pytest.approx(1.0, abs=1e-4)
    assert values["is_weight/max"] == pytest.approx(1.0, abs=1e-3)
    assert values["is_weight/ess"] == pytest.approx(1.0, abs=1e-6)
    assert (values["clip/low"], values["clip/high"]) == (0.0, 0.0)


def test_tied_weights_are_published_once_and_load_into_an_engine(model_directory: Path) -> None:
    from staleflow.clients.rollout.engines.load_weights import copy_weights

    trainer, other = TorchTrainer(config(), model_directory), TorchTrainer(config(), model_directory)
    trained(trainer, 0)
    weights = copied(trainer)
    assert "model.embed_tokens.weight" in weights
    assert "lm_head.weight" not in weights
    copy_weights(other.model, weights)
    assert same(copied(trainer), copied(other))


def evaluating(directory: Path, folder: Path, prompts: list[str], reward: str) -> TorchTrainer:
    """A trainer with some held-out prompts, of which it uses the first five."""
    from staleflow.clients.trainer.evaluation.factory import open_evaluation

    held_out = folder / "held_out.jsonl"
    held_out.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    rewards = Path(__file__).parent.parent / "user_code" / "rewards.py"
    table = msgspec.to_builtins(config(eval_prompts=5))
    table["prompts"] |= {"eval_path": str(held_out)}
    table["reward"] |= {"run": f"{rewards}:{reward}", "retries": 0}
    settings = msgspec.convert(table, Config)
    return TorchTrainer(settings, directory, open_evaluation(settings, directory))


def test_held_out_prompts_that_get_no_reward_or_no_completion_are_left_out_and_counted(
    model_directory: Path, tmp_path: Path
) -> None:
    good = evaluating(model_directory, tmp_path, ["1+1=", "2+7"], "length").evaluate(Version(0), going_on)
    some = evaluating(model_directory, tmp_path, ["1+1=", "2+7", "1" * 128], "picky").evaluate(Version(0), going_on)
    alone = evaluating(model_directory, tmp_path, ["1+1="], "length").evaluate(Version(0), going_on)
    assert some == alone | {"length/eval": good["length/eval"], "reward/eval_failed": 2.0}
    none = evaluating(model_directory, tmp_path, ["1" * 128, "7"], "picky").evaluate(Version(0), going_on)
    assert none.keys() == {"length/eval", "reward/eval_failed"}
    assert evaluating(model_directory, tmp_path, ["1" * 200], "length").evaluate(Version(0), going_on) == {
        "reward/eval_failed": 1.0
    }


def test_evaluation_draws_the_same_numbers_each_time_and_disturbs_nothing(
    model_directory: Path, tmp_path: Path
) -> None:
    settings = config()
    trainer = evaluating(model_directory, tmp_path, [f"{n}+1=" for n in range(9)], "length")
    clean = TorchTrainer(settings, model_directory)
    before = torch.get_rng_state()
    first = trainer.evaluate(Version(0), going_on)
    assert first == trainer.evaluate(Version(0), going_on)
    assert first["reward/eval"] > 0
    assert torch.equal(torch.get_rng_state(), before)
    assert trained(trainer, 0) == trained(clean, 0)
    with pytest.raises(Stopped):
        trainer.evaluate(Version(0), lambda: True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 3}, "missing model.layers.2."),
        ({"num_hidden_layers": 1}, "unexpected model.layers.1."),
        ({"intermediate_size": 48}, "mismatched .*model.layers.0.mlp.down_proj.weight"),
    ],
)
def test_weights_that_do_not_fit_the_model_directory_are_refused_by_name(
    model_directory: Path, tmp_path: Path, change: dict[str, int], message: str
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(model_directory, directory)
    table = json.loads((directory / "config.json").read_bytes()) | change
    table.pop("layer_types", None)
    (directory / "config.json").write_text(json.dumps(table))
    with pytest.raises(ConfigError, match=message):
        TorchTrainer(config(), directory)


def test_a_checkpoint_of_another_backend_is_refused_and_its_writer_named(model_directory: Path, tmp_path: Path) -> None:
    trainer = TorchTrainer(config(), model_directory)
    trainer.save(tmp_path)
    (tmp_path / "random-0.safetensors").rename(tmp_path / "deepspeed-zero2-0-of-4.safetensors")
    for use in (trainer.check, trainer.load):
        with pytest.raises(ConfigError, match="it was written by deepspeed-zero2 on 4 ranks, whose files only the sam"):
            use(tmp_path)


def test_a_resumed_ddp_trainer_does_not_keep_the_initial_model(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reducer's own references are included. ``test_backends`` covers the other backends."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    ranks = ManyRanks(Place())
    try:
        trainer = TorchTrainer(config(backend="ddp"), model_directory, None, ranks)
        trained(trainer, 0)
        trainer.save(tmp_path)
        initial = weakref.ref(trainer.model)
        trainer.load(tmp_path)
        assert initial() is None
        trained(trainer, 1)
    finally:
        ranks.close()


def test_a_model_saved_tensor_by_tensor_is_the_one_saved_at_once(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(torch_files, "FILE_BYTES", 20_000)
    trainer = TorchTrainer(config(), model_directory)
    trained(trainer, 0)
    torch_files.save_model(
        trainer.model, trainer.learner.tensors(), tmp_path, dtype="float32", tokenizer_of=model_directory
    )
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 1
    again, own = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict(), trainer.model.state_dict()
    assert again.keys() == own.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in own.items())


def test_a_checkpoint_is_a_model_that_transformers_opens_as_the_page_says(
    model_directory: Path, tmp_path: Path
) -> None:
    trainer = TorchTrainer(config(), model_directory)
    trained(trainer, 0)
    trainer.save(tmp_path)
    (complete,) = defined("complete")
    written = complete(str(tmp_path), "1+1=")
    assert written.startswith("1 + 1 =")
    assert len(written) > len("1 + 1 =")
    assert same(copied(TorchTrainer(config(), tmp_path)), copied(trainer)), "a new run begins with what was trained"
