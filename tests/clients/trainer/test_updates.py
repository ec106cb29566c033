# pyright: basic, reportMissingImports=false
"""Several optimizer updates in one step equal a plain PPO loop, and a step takes all of its updates or none."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from staleflow.clients.trainer.algorithms.objective import REFERENCE, VALUES
from staleflow.clients.trainer.backends.base import OutOfMemory, Stopped, Untrainable
from staleflow.clients.trainer.backends.collectives import ManyRanks
from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.clients.trainer.data.mini_batches import BatchGroups, mini_batches
from staleflow.clients.trainer.torch_trainer import TorchTrainer
from staleflow.configs.ranks import Place
from staleflow.protocols.consistency.ids import Step
from tests.clients.trainer.making import batch, config
from tests.clients.trainer.test_quarantine import rich
from tests.clients.trainer.test_torch_trainer import copied, going_on, optimizer, same

GROUPS = 4

USERS = '''
"""Losses that fail at the first update, and at the second."""

def broken(logprobs, old, behavior, advantages, row):
    raise TypeError("of no use")

def moved(logprobs, old, behavior, advantages, row):
    if (behavior < -50).any() and (logprobs - old).abs().max() > 1e-4:
        raise ValueError("a token of probability 0")
    return -(logprobs - old).exp() * advantages

def checked(rewards, group_ids):
    if (rewards > 50).any():
        raise ZeroDivisionError("a reward of too much")
    return rewards - rewards.mean()
'''


def trainer(directory: Path, *, minibatches: int = 2, epochs: int = 2, **keys: Any) -> TorchTrainer:
    """Without shared prompts, whose rounding is not that of a hand-written loop."""
    keys = {"batch_size": GROUPS, "minibatches": minibatches, "epochs": epochs, "share_prompts": False} | keys
    return TorchTrainer(config(**keys), directory)


def data(step: int) -> TrainBatch:
    return batch(step, groups=GROUPS)


def state(of: TorchTrainer) -> dict[str, Any]:
    """Copy weights and optimizer."""
    return copied(of) | {name: tensor.numpy().copy() for name, tensor in optimizer(of).tensors().items()}


def plan(of: TrainBatch, minibatches: int, epochs: int) -> list[np.ndarray]:
    """Return the rows of each update on a single rank."""
    ids = np.unique(of.group_ids)
    groups = BatchGroups(ids=ids, ranks=np.zeros_like(ids), tokens=np.zeros_like(ids))
    return [
        np.flatnonzero(np.isin(of.group_ids, ids[chosen]))
        for epoch in range(epochs)
        for chosen in mini_batches(groups, minibatches, seed=0, step=int(of.step), epoch=epoch)
    ]


# --- the result ----------------------------------------------------------------------------------------------------


def hand_written(
    directory: Path, of: TrainBatch, updates: list[np.ndarray], *, lr: float, clip: float, cap: float = 2.0
) -> tuple[dict[str, torch.Tensor], int]:
    """PPO with truncated importance weights in plain torch: the weights, and the number of clipped tokens."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    adam = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    completions = torch.from_numpy(of.completions)
    behavior = torch.from_numpy(of.behavior_logprobs)[completions]
    advantages = torch.zeros(len(of.rewards), 1)
    for group in np.unique(of.group_ids):
        rewards = torch.from_numpy(of.rewards[of.group_ids == group].astype(np.float64))
        each = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        advantages[of.group_ids == group, 0] = each.to(torch.float32)

    def logprobs(rows: np.ndarray) -> torch.Tensor:
        """[T]: completion tokens of the rows, padded to the longest."""
        width = int(of.sequence_lengths[rows].max())
        ids = torch.from_numpy(of.input_ids[rows, :width])
        logits = model(input_ids=ids, attention_mask=torch.from_numpy(of.attention_mask[rows, :width])).logits
        every: torch.Tensor = logits.gather(-1, ids.roll(-1, 1)[..., None]).squeeze(-1) - logits.logsumexp(-1)
        return every[:, :-1][torch.from_numpy(of.completions[rows, 1:width])]

    with torch.no_grad():
        old, every = torch.zeros(of.input_ids.shape), np.arange(len(of.rewards))
        old[completions] = logprobs(every)
    weight = torch.zeros(of.input_ids.shape)
    weight[completions] = (old[completions] - behavior).exp().clamp(max=cap)
    clipped = 0
    for update in updates:
        rows = update[np.argsort(-of.sequence_lengths[update], kind="stable")]
        chosen = torch.from_numpy(of.completions[rows])
        current, gain = logprobs(rows), advantages[rows].expand(chosen.shape)[chosen]
        ratio = (current - old[rows][chosen]).exp()
        surrogate = torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain)
        (-surrogate * weight[rows][chosen]).sum().backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= len(current)  # last, as Adam's direction depends on the rounding of tiny gradients
        clipped += int((((gain > 0) & (ratio > 1 + clip)) | ((gain < 0) & (ratio < 1 - clip))).sum())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        adam.step()
        adam.zero_grad()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}, clipped


@pytest.mark.parametrize(("minibatches", "epochs"), [(1, 1), (2, 1), (2, 2), (3, 2)])
def test_a_step_is_that_of_a_hand_written_ppo_loop(model_directory: Path, minibatches: int, epochs: int) -> None:
    lr, clip, of = 3e-4, 0.01, data(0)
    updates = plan(of, minibatches, epochs)
    expected, clipped = hand_written(model_directory, of, updates, lr=lr, clip=clip)
    one = trainer(
        model_directory, minibatches=minibatches, epochs=epochs, lr=lr, algorithm={"clip_low": clip, "clip_high": clip}
    )
    values = one.train(data(0), Step(0), going_on).values
    for name, array in one.weights().items():
        assert np.allclose(array, expected[name].numpy(), rtol=0, atol=1e-6), name
    assert (clipped > 0) == (len(updates) > 1), "the clip has an effect"
    assert (values["clip/low"] + values["clip/high"] > 0) == (clipped > 0)
    assert values.get("trainer/updates", 1.0) == len(updates)


def test_updates_with_shared_prompts_are_those_without(model_directory: Path) -> None:
    with_own, with_shared = (
        trainer(model_directory, share_prompts=shared).train(data(0), Step(0), going_on).values
        for shared in (False, True)
    )
    assert with_shared["approx_kl"] > 0
    assert with_shared == pytest.approx(with_own, rel=1e-3, abs=1e-5)


def test_a_step_of_one_update_has_the_bits_of_a_plain_loop(model_directory: Path) -> None:
    """The forward pass is torch's and the model's; everything after it is written out."""
    from transformers import AutoModelForCausalLM

    from staleflow.clients.models.likelihood import token_logprobs

    one, of = trainer(model_directory, minibatches=1, epochs=1), data(0)
    model: Any = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    adam = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors}], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    for step in range(3):
        of = data(step)
        order = np.argsort(-of.sequence_lengths, kind="stable")
        ids, inside = torch.from_numpy(of.input_ids[order]), torch.from_numpy(of.completions[order])
        mask = torch.from_numpy(of.attention_mask[order])
        logprobs = token_logprobs(model(input_ids=ids, attention_mask=mask, use_cache=False).logits, ids, 1.0)[inside]
        rewards = torch.from_numpy(of.rewards.astype(np.float64)).view(GROUPS, -1)
        gain = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
        gains = gain.flatten().to(torch.float32)[order][:, None].expand(inside.shape)[inside]
        behavior = torch.from_numpy(of.behavior_logprobs[order])[inside]
        weight = (logprobs.detach() - behavior).exp().clamp(max=2.0)
        (-((logprobs - logprobs.detach()).exp() * gains) * weight).sum().backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1.0 / int(inside.sum()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        adam.step()
        adam.zero_grad()
        values = one.train(data(step), Step(step), going_on).values
        assert not {"trainer/updates", "approx_kl", "grad_norm/max"} & values.keys()
    assert all(np.array_equal(array, model.state_dict()[name].numpy()) for name, array in one.weights().items())


def column(of: TrainBatch, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed).uniform(-3, 0, of.input_ids.shape)
    return np.where(of.completions, random, 0.0).astype(np.float32)


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"loss": "gspo"},
        {"advantage": "reinforce_pp"},
        {"advantage": "gae", "gae_lambda": 0.9},
        {"loss": "m2po", "m2_threshold": 0.3},
        {"loss": "opsm"},
        {"advantage": "dr_grpo", "kl_coef": 0.1, "kl": "k2"},
    ],
)
@pytest.mark.parametrize("packing", [False, True])
def test_what_belongs_to_the_batch_is_computed_over_all_of_it(
    model_directory: Path, algorithm: dict[str, Any], packing: bool
) -> None:
    """At a rate that moves no weight, the means over mini-batches of equal size are the values of one update."""
    found = []
    for minibatches, epochs in ((1, 1), (2, 2)):
        keys: dict[str, Any] = {"lr": 1e-12, "micro_tokens": 30, "packing": packing, "algorithm": algorithm}
        of = data(0)
        stages = {REFERENCE: column(of, 1), VALUES: column(of, 2)}
        of = dataclasses.replace(of, token_stages=stages)
        one = trainer(model_directory, minibatches=minibatches, epochs=epochs, **keys)
        found.append(one.train(of, Step(0), going_on).values)
    whole, cut = found
    assert cut["approx_kl"] == pytest.approx(0.0, abs=1e-9)
    assert cut["grad_norm/max"] >= cut["grad_norm"] > 0
    assert {name: cut[name] for name in whole if name != "grad_norm"} == pytest.approx(
        {name: whole[name] for name in whole if name != "grad_norm"}, rel=1e-4, abs=1e-6
    )


def test_the_correction_uses_the_policy_at_the_start_of_the_step_and_the_divergence_grows_with_its_updates(
    model_directory: Path,
) -> None:
    one, many = trainer(model_directory, minibatches=1, epochs=1), trainer(model_directory, epochs=4)
    first, second = (of.train(data(0), Step(0), going_on).values for of in (one, many))
    for name in ("mismatch_kl", "is_weight/mean", "is_weight/max", "is_weight/ess", "is_weight/truncated"):
        assert second[name] == pytest.approx(first[name], rel=1e-5), name
    assert second["approx_kl"] > 1e-4
    assert second["trainer/updates"] == 8.0
    assert second["lr"] == first["lr"]
    assert second["trainer/tokens"] == first["trainer/tokens"]


def test_an_update_without_a_trained_token_is_skipped(model_directory: Path) -> None:
    one, of = trainer(model_directory, minibatches=4, epochs=1, weight_decay=0.1), data(0)
    of.loss_mask[of.group_ids == 2] = False
    assert one.train(of, Step(0), going_on).values["trainer/updates"] == 3.0
    counts = {int(value["step"]) for value in optimizer(one)._adam.state.values()}
    assert counts == {3}
    empty, before = data(1), state(one)
    empty.loss_mask[:] = False
    result = one.train(empty, Step(1), going_on)
    assert (result.bad, result.values["trainer/updates"], result.values["grad_norm"]) == ("", 0.0, 0.0)
    assert same(state(one), before)


# --- all updates or none -------------------------------------------------------------------------------------------


def nothing_changed(one: TorchTrainer, before: dict[str, Any], clean: TorchTrainer) -> None:
    """The state is that from before the step, and the next step is that of a trainer that never tried this one."""
    assert same(state(one), before)
    assert all(parameter.grad is None for parameter in one.model.parameters())
    assert one.train(data(2), Step(2), going_on) == clean.train(data(2), Step(2), going_on)
    assert same(state(one), state(clean))


def two(directory: Path, steps: int, **keys: Any) -> tuple[TorchTrainer, TorchTrainer]:
    """Return equal trainers after some steps; without any, their optimizers have no state."""
    pair = (trainer(directory, **keys), trainer(directory, **keys))
    for one in pair:
        for step in range(steps):
            one.train(data(step), Step(step), going_on)
    return pair


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("update", [1, 3, 4])
def test_a_gradient_that_is_not_finite_in_any_update_undoes_the_step(
    model_directory: Path, steps: int, update: int
) -> None:
    one, clean = two(model_directory, steps)
    before, calls = state(one), iter(range(1, 99))
    hook = one.model.model.norm.weight.register_hook(
        lambda gradient: gradient * math.inf if next(calls) == update else gradient
    )
    result = one.train(data(1), Step(1), going_on)
    hook.remove()
    assert result.bad in (f"gradient norm is {value} in update {update} of 4" for value in ("nan", "inf"))
    assert result.values["trainer/updates"] == 0.0
    assert "lr" not in result.values
    nothing_changed(one, before, clean)


def test_a_loss_that_is_not_finite_undoes_the_step(model_directory: Path) -> None:
    one, clean = two(model_directory, 1, minibatches=GROUPS, epochs=1)
    before, of = state(one), data(1)
    last = plan(of, GROUPS, 1)[-1][0]
    of.behavior_logprobs[last][of.completions[last]] = np.nan
    assert one.train(of, Step(1), going_on).bad == "loss is nan in update 4 of 4"
    nothing_changed(one, before, clean)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_stop_request_at_any_pass_undoes_the_step(model_directory: Path, dtype: str) -> None:
    """Each update has two passes, as has the pass without gradient before them."""
    import msgspec

    settings = config(batch_size=GROUPS, minibatches=2, epochs=1, micro_tokens=70, share_prompts=False)
    settings = msgspec.structs.replace(settings, model=msgspec.convert({"dtype": dtype}, type(settings.model)))
    one, before, looks = TorchTrainer(settings, model_directory), {}, 0
    while True:
        before, asked = state(one), iter([False] * looks + [True])
        try:
            one.train(data(0), Step(0), lambda asked=asked: next(asked))  # type: ignore[misc]
        except Stopped:
            assert same(state(one), before), looks
            assert all(parameter.grad is None for parameter in one.model.parameters())
            looks += 1
        except StopIteration:
            pytest.fail("a step looks for a stop request more often than it has passes")
        else:
            break
        assert looks < 50
    assert looks > 4


@pytest.fixture
def users(tmp_path: Path) -> str:
    (tmp_path / "users.py").write_text(USERS)
    return str(tmp_path / "users.py")


@pytest.mark.parametrize(
    ("harm", "keys", "why"),
    [
        ("foreign", {}, "IndexError: index out of range in self"),
        ("rich", {"advantage": "checked"}, "ZeroDivisionError: a reward of too much"),
        ("surprising", {"loss": "moved"}, "ValueError: a token of probability 0"),
    ],
)
def test_the_group_that_makes_an_update_raise_is_named_and_the_step_is_undone(
    model_directory: Path, users: str, harm: str, keys: dict[str, str], why: str
) -> None:
    algorithm = {key: f"{users}:{name}" for key, name in keys.items()}
    one, clean = two(model_directory, 1, algorithm=algorithm)
    before, of = state(one), data(1)
    harms: dict[str, Callable[[], None]] = {
        "foreign": lambda: of.input_ids.__setitem__((np.flatnonzero(of.group_ids == 2)[0], 4), 1_000_000),
        "rich": lambda: rich(of, 2),
        "surprising": lambda: of.behavior_logprobs.__setitem__((of.group_ids == 2)[:, None] & of.completions, -60.0),
    }
    harms[harm]()
    with pytest.raises(Untrainable, match=why) as error:
        one.train(of, Step(1), going_on)
    assert (error.value.groups, error.value.every) == ([2], False)
    nothing_changed(one, before, clean)


def test_a_loss_that_bears_no_group_is_at_fault_itself_however_small_the_mini_batches(
    model_directory: Path, users: str
) -> None:
    one = trainer(model_directory, minibatches=GROUPS, algorithm={"loss": f"{users}:broken"})
    with pytest.raises(Untrainable, match="no group of the batch can be trained") as no:
        one.train(data(0), Step(0), going_on)
    assert no.value.every


@pytest.mark.parametrize("where", ["forward", "step", "snapshot"])
def test_running_out_of_memory_undoes_the_step(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    one, clean = two(model_directory, 1)
    before, calls = state(one), iter(range(1, 99))
    target: Any = optimizer(one)._adam if where == "step" else one.learner
    real, fails_at = getattr(target, where), {"forward": 4, "step": 3, "snapshot": 1}[where]

    def fails(*arguments: Any, **more: Any) -> Any:
        if (call := next(calls)) == fails_at or (where == "forward" and call > fails_at):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*arguments, **more)

    monkeypatch.setattr(target, where, fails)
    with pytest.raises(OutOfMemory) as error:
        one.train(data(1), Step(1), going_on)
    monkeypatch.undo()
    assert error.value.can_save == (where != "step")
    remedy = {"forward": "micro_tokens below", "step": "over more ranks", "snapshot": "trainer.minibatches and"}
    assert remedy[where] in str(error.value)
    if where == "step":
        one.learner.clear()
    nothing_changed(one, before, clean)


def test_a_sharded_model_is_restored_too(model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    ranks = ManyRanks(Place())
    try:
        settings = config(backend="fsdp", batch_size=GROUPS, minibatches=2, epochs=2, micro_tokens=50)
        one = TorchTrainer(settings, model_directory, None, ranks)
        first = one.train(data(0), Step(0), going_on).values
        before = {name: array.copy() for name, array in one.weights().items()}
        for looks in (1, 4, 7):  # of the four passes of the scan, or two of each update
            asked = iter([False] * looks + [True])
            with pytest.raises(Stopped):
                one.train(data(1), Step(1), lambda asked=asked: next(asked))  # type: ignore[misc]
            assert same({name: array.copy() for name, array in one.weights().items()}, before)
        second = one.train(data(1), Step(1), going_on).values
    finally:
        ranks.close()
    plain = trainer(model_directory)
    for step, values in enumerate((first, second)):
        assert values == pytest.approx(plain.train(data(step), Step(step), going_on).values, rel=1e-3, abs=1e-5)
