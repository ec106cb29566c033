# pyright: basic, reportMissingImports=false
"""Every backend matches plain torch: same losses on one rank and on two, resumed or not, and the same refusals."""

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from staleflow.clients.trainer.evaluation.factory import open_evaluation
from staleflow.clients.trainer.torch_trainer import TorchTrainer
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import Step, Version
from tests.clients.trainer.making import batch, config
from tests.clients.trainer.ranked import ranked

pytestmark = pytest.mark.slow

STEPS = 20
STOP_AFTER = 9

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="deepspeed is not installed: pip install -e '.[deepspeed]'",
)


def case(backend: str, stage: int, nproc: int, *, short: bool) -> Any:
    """Starting a rank takes seconds: ``make test`` runs the short cases, ``make test-backends`` all."""
    marks = [] if short else [pytest.mark.long]
    zero = backend == "deepspeed"
    name = f"zero{stage}-{nproc}" if zero else f"{backend}-{nproc}"
    return pytest.param(backend, stage, nproc, marks=[*marks, needs_deepspeed] if zero else marks, id=name)


EVERY = [
    *(case("ddp", 2, nproc, short=False) for nproc in (1, 2)),
    *(case("fsdp", 2, nproc, short=nproc == 2) for nproc in (1, 2)),
    *(case("deepspeed", stage, nproc, short=(stage, nproc) == (3, 2)) for stage in range(4) for nproc in (1, 2)),
]
TWO_RANKS = [
    case("ddp", 2, 2, short=False),
    case("fsdp", 2, 2, short=False),
    case("deepspeed", 2, 2, short=False),
    case("deepspeed", 3, 2, short=False),
]
EVALUATED = [
    case("ddp", 2, 2, short=False),
    case("fsdp", 2, 1, short=False),
    case("fsdp", 2, 2, short=False),
    case("deepspeed", 3, 1, short=False),
    case("deepspeed", 3, 2, short=False),
]
STREAMED = [
    case("ddp", 2, 2, short=False),
    case("fsdp", 2, 2, short=False),
    *(case("deepspeed", stage, 2, short=False) for stage in range(4)),
]
SHARDED = [case("fsdp", 2, 2, short=False), case("deepspeed", 2, 2, short=False)]


def settings(backend: str = "torch", stage: int = 2, **trainer: Any) -> Config:
    """Passes of several rows; the backends but plain torch compute their logits in chunks."""
    trainer |= {"micro_tokens": 40, "logit_chunk": 0 if backend == "torch" else 8}
    return config(backend=backend, zero_stage=stage, warmup_steps=3, grad_clip=1.0, weight_decay=0.1, **trainer)


def held_out(config: Config, folder: Path, *, environment: bool) -> Config:
    """Add five prompts for evaluation; the reward is the length of the completion."""
    here, table, rows = Path(__file__).parents[1], msgspec.to_builtins(config), folder / "held_out.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}+{n}=", "then": "tokens"}) + "\n" for n in range(5)))
    table["prompts"] |= {"eval_path": str(rows)}
    table["reward"] |= {"run": f"{here.parent}/user_code/rewards.py:length"}
    table["environment"] |= {"run": f"{here}/evaluation/held_out_environment.py:Asked" if environment else ""}
    return msgspec.convert(table, Config)


def going_on() -> bool:
    return False


def opens_as_any_model_directory(saved: Path, weights: dict[str, Any]) -> None:
    """The directory has these weights under their published names, and no pickle."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(saved)
    own = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    assert len(weights) == len(own) - 1  # tied tensors are stored once
    for name, array in weights.items():
        assert np.array_equal(own[name], array), name
    assert AutoTokenizer.from_pretrained(saved)("1+2")["input_ids"] == [1, 10, 2]
    assert {path.suffix for path in saved.rglob("*") if path.is_file()} <= {".json", ".safetensors"}


@pytest.fixture(scope="module")
def plain(model_directory: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Twenty steps of the torch backend: their values and the final weights."""
    trainer = TorchTrainer(settings(), model_directory)
    values = [trainer.train(batch(step), Step(step), going_on).values for step in range(STEPS)]
    return values, {name: array.copy() for name, array in trainer.weights().items()}


@pytest.mark.parametrize(("backend", "stage", "nproc"), EVERY)
def test_every_backend_follows_the_loss_of_plain_torch_and_goes_on_bit_by_bit_where_it_stopped(
    plain: Any, model_directory: Path, tmp_path: Path, backend: str, stage: int, nproc: int
) -> None:
    chosen, saved = settings(backend, stage), tmp_path / "saved"
    steps = list(range(STEPS))
    straight = ranked(
        chosen, model_directory, tmp_path / "straight", nproc, steps=steps, save=saved, save_after=STOP_AFTER
    )
    for name in ("loss", "grad_norm", "reward/mean", "length/p99", "trainer/tokens", "lr"):
        assert straight.column(name) == pytest.approx([values[name] for values in plain[0]], rel=1e-4, abs=2e-6), name
    assert "FutureWarning" not in "".join(straight.said), "of what a backend calls in torch, many times a step"
    assert straight.weights.keys() == plain[1].keys()
    for name, array in plain[1].items():
        assert np.allclose(straight.weights[name], array, atol=2e-4), name
    if (backend, stage) in (("fsdp", 2), ("deepspeed", 3)):
        straight.check_spans()
    opens_as_any_model_directory(saved, straight.saved)
    resumed = ranked(chosen, model_directory, tmp_path / "resumed", nproc, steps=steps[STOP_AFTER + 1 :], load=saved)
    assert resumed.column("loss") == straight.column("loss")[STOP_AFTER + 1 :]
    for name, array in straight.weights.items():
        assert np.array_equal(resumed.weights[name], array), name


@pytest.mark.parametrize(("backend", "stage", "nproc"), TWO_RANKS)
def test_a_step_that_is_bad_or_given_up_on_one_rank_changes_nothing_on_any(
    model_directory: Path, tmp_path: Path, backend: str, stage: int, nproc: int
) -> None:
    task = {"steps": [0, 1, 2], "bad": [0], "stopped": [1]}
    bad, stopped, good = ranked(settings(backend, stage), model_directory, tmp_path, nproc, **task).results
    assert (bad["bad"], stopped["bad"], good["bad"]) == ("loss is nan", "stopped", "")
    clean = TorchTrainer(settings(), model_directory).train(batch(2), Step(2), going_on).values
    assert math.isnan(bad["loss"])
    assert (good["loss"], good["grad_norm"]) == pytest.approx((clean["loss"], clean["grad_norm"]), rel=1e-4)


@pytest.mark.parametrize(("backend", "stage", "nproc"), STREAMED)
def test_ranks_that_share_out_pieces_take_the_steps_of_one_that_has_all_of_them(
    model_directory: Path, tmp_path: Path, backend: str, stage: int, nproc: int
) -> None:
    steps, plain = list(range(6)), TorchTrainer(settings(), model_directory)
    expected = [plain.train(batch(step, groups=6), Step(step), going_on).values for step in steps]
    found = ranked(settings(backend, stage), model_directory, tmp_path, nproc, steps=steps, pieces=3, groups=6)
    for name in ("loss", "grad_norm", "reward/mean", "length/p99", "trainer/tokens", "lr"):
        assert found.column(name) == pytest.approx([values[name] for values in expected], rel=1e-4, abs=2e-6), name
    for name, array in plain.weights().items():
        assert np.allclose(found.weights[name], array, atol=2e-4), name


def test_terms_of_the_loss_and_the_learning_rate_add_up_over_ranks_and_pieces(
    model_directory: Path, tmp_path: Path
) -> None:
    """The entropy bonus, the mean over trajectories and the effective sample size are those of the whole batch."""
    algorithm = {"entropy_coef": 0.1, "loss_agg": "sequence_mean", "ess_scaled_lr": True, "veto_below": 0.4}
    steps, plain = [0, 1, 2], TorchTrainer(settings(algorithm=algorithm), model_directory)
    expected = [plain.train(batch(step, groups=6), Step(step), going_on).values for step in steps]
    chosen = settings("ddp", algorithm=algorithm)
    found = ranked(chosen, model_directory, tmp_path, 2, steps=steps, pieces=3, groups=6)
    for name in ("loss", "entropy", "masked/sequence", "grad_norm", "lr"):
        assert found.column(name) == pytest.approx([values[name] for values in expected], rel=1e-4, abs=2e-6), name
    assert all(0 < values["masked/sequence"] < 1 and 0 < values["lr"] < 1e-3 for values in expected)
    for name, array in plain.weights().items():
        assert np.allclose(found.weights[name], array, atol=2e-4), name


@pytest.mark.parametrize("environment", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize(("backend", "stage", "nproc"), EVALUATED)
def test_every_backend_says_of_the_held_out_prompts_what_plain_torch_says_and_trains_on(
    model_directory: Path, tmp_path: Path, backend: str, stage: int, nproc: int, environment: bool
) -> None:
    chosen = held_out(settings(backend, stage), tmp_path, environment=environment)
    alone = TorchTrainer(settings(), model_directory, open_evaluation(chosen, model_directory))
    for step in range(2):
        alone.train(batch(step), Step(step), going_on)
    expected = alone.evaluate(Version(2), going_on)
    _, evaluated, after = ranked(chosen, model_directory, tmp_path, nproc, steps=[0, 1, 2], evaluated=[1]).results
    assert {name: evaluated[name] for name in expected} == pytest.approx(expected)
    assert after["loss"] == pytest.approx(alone.train(batch(2), Step(2), going_on).values["loss"], rel=1e-4)


@pytest.mark.parametrize(("backend", "stage", "nproc"), TWO_RANKS)
def test_a_bfloat16_model_keeps_float32_master_weights_on_every_backend(
    model_directory: Path, tmp_path: Path, backend: str, stage: int, nproc: int
) -> None:
    """At this rate a step moves no bfloat16 weight near one; several steps do, and a checkpoint keeps the fraction."""
    low = msgspec.structs.replace(
        settings(backend, stage, lr=4e-4), model=msgspec.convert({"dtype": "bfloat16"}, type(config().model))
    )
    saved, steps = tmp_path / "saved", list(range(12))
    straight = ranked(low, model_directory, tmp_path / "straight", nproc, steps=steps, save=saved, save_after=5)
    resumed = ranked(low, model_directory, tmp_path / "resumed", nproc, steps=steps[6:], load=saved)
    weights = straight.weights
    assert weights["model.norm.weight"].dtype == np.uint16
    assert all(np.array_equal(resumed.weights[name], array) for name, array in weights.items())
    assert len(np.unique(weights["model.norm.weight"])) > 1


@pytest.mark.parametrize(("backend", "stage", "nproc"), SHARDED)
def test_a_sharded_checkpoint_is_refused_by_another_number_of_ranks(
    model_directory: Path, tmp_path: Path, backend: str, stage: int, nproc: int
) -> None:
    chosen, saved = settings(backend, stage), tmp_path / "saved"
    assert ranked(chosen, model_directory, tmp_path / "two", nproc, steps=[0], save=saved, save_after=0).codes == [0, 0]
    alone = ranked(chosen, model_directory, tmp_path / "one", 1, steps=[1], load=saved)
    wrote = backend if backend == "fsdp" else f"deepspeed-zero{stage}"
    assert alone.codes != [0]
    assert f"{wrote} on 2 ranks" in alone.said[0]
    assert "trainer.check(" in alone.said[0], "before anything is loaded"
