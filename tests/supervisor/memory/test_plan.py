"""The memory plan counts every process once, on its device, and names the key to change."""

from typing import Any

import msgspec
import pytest

from staleflow.clients.memory.question import Measured
from staleflow.configs.placement import place
from staleflow.configs.schema import Config
from staleflow.supervisor.memory.plan import RUNTIME_BYTES, Device, Plan, Use, plan
from staleflow.supervisor.memory.text import lines

GIB = 1 << 30
MODEL = Measured(
    parameters=1000,
    trained=1000,
    narrow=1000,
    weights=2000,
    trained_weights=2000,
    layer=100,
    outside=400,
    kv_token=10,
    kv_capacity=128,
    prefill=70,
    vocabulary=50,
    context=256,
    pass_tokens=100,
    complete=True,
    activations=3000,
    logits=500,
    reference_parameters=1000,
    reference_pass=900,
    critic_parameters=1000,
    critic_pass=800,
)
"""A model in bfloat16, with few enough parameters to count by hand."""


def config(trainer: dict[str, Any] | None = None, **sections: Any) -> Config:
    table: dict[str, Any] = {"prompts": {"source": "a:b"}, "reward": {"run": "a:b"}, "model": {"dtype": "bfloat16"}}
    table |= {"trainer": {"eval_prompts": 0, **(trainer or {})}, "rollout": {"max_inflight": 4, "max_new_tokens": 32}}
    table |= {"parameters": {"store": "disk"}}
    return msgspec.convert(table | sections, Config)


def planned(config: Config, gpus: int = 0, measured: Measured = MODEL, size: int = GIB) -> Plan:
    free: dict[int | None, int] = {None: size} | dict.fromkeys(range(gpus), size)
    totals = dict.fromkeys(range(gpus), size)
    return plan(config, measured, place(config, gpus), prompt_tokens=64, free=free, totals=totals)


def use(plan: Plan, process: str) -> Use:
    (found,) = [use for device in plan.devices for use in device.uses if use.process == process]
    return found


@pytest.mark.parametrize(
    ("trainer", "weights", "gradients", "optimizer", "buffers"),
    [
        ({"backend": "torch"}, 6000, 4000, 8000, 0),
        ({"backend": "ddp", "nproc": 2}, 6000, 4000, 8000, 2000),
        ({"backend": "fsdp", "nproc": 2}, 2000, 2000, 4000, 400 * 8 + 100 * 10),
        ({"backend": "deepspeed", "zero_stage": 2, "nproc": 2}, 4000, 2000, 4000, 4000),
        ({"backend": "deepspeed", "zero_stage": 3, "nproc": 2}, 3000, 2000, 4000, 4000 + 400 * 4 + 100 * 4),
    ],
)
def test_a_rank_has_its_share_of_weights_gradients_and_moments(
    trainer: dict[str, Any], weights: int, gradients: int, optimizer: int, buffers: int
) -> None:
    name = "trainer" if trainer["backend"] == "torch" else "trainer rank 1"
    assert use(planned(config(trainer)), name) == Use(
        process=name,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=3000,
        logits=500,
        buffers=buffers + RUNTIME_BYTES,
    )


def test_a_pass_that_holds_less_than_a_step_is_counted_full() -> None:
    partial = msgspec.structs.replace(MODEL, complete=False)
    settings = config({"micro_tokens": 150})
    assert use(planned(settings, measured=partial), "trainer").activations == 4500
    assert use(planned(settings), "trainer").activations == 3000


def test_the_engine_of_transformers_keeps_keys_and_values_of_all_samples_at_its_largest_capacity() -> None:
    """The cache starts with 64 places for prompts of 64 tokens; the 65th token grows it to 128."""
    found = use(planned(config()), "rollout-0")
    assert (found.weights, found.kv_cache, found.activations) == (2000, 4 * 128 * 10, 70)


def test_an_evaluation_larger_than_a_pass_is_the_peak_of_the_trainer() -> None:
    found = use(planned(config({"eval_prompts": 8})), "trainer")
    assert (found.activations, found.logits, found.kv_cache) == (0, 0, 4 * 128 * 10)


def test_vllm_takes_its_share_of_a_gpu_and_the_cache_what_weights_leave() -> None:
    rollout = {"engine": "vllm", "workers": 1, "vllm": {"gpu_memory_utilization": 0.5}}
    found = planned(config(rollout=rollout), gpus=1)
    assert use(found, "rollout-0") == Use(process="rollout-0", gpu=0, weights=2000, kv_cache=GIB // 2 - 2000)
    assert [device.gpu for device in found.devices] == [0]
    on_cpu = planned(config(rollout=rollout))
    assert use(on_cpu, "rollout-0").kv_cache == 512 << 20


def test_reference_critic_and_copies_are_counted() -> None:
    algorithm = {"advantage": "gae", "kl_coef": 0.1}
    several = {"epochs": 2, "algorithm": algorithm}
    found = planned(config(several, parameters={"transport": "direct"}), gpus=2)
    assert use(found, "reference-0").weights == 2000
    critic = use(found, "critic-0")
    assert (critic.weights, critic.gradients, critic.optimizer, critic.activations) == (4000, 4000, 8000, 800)
    assert use(found, "trainer, copies") == Use(process="trainer, copies", buffers=6000 + 8000 + 2000)
    assert {device.gpu for device in found.devices} == {0, 1, None}


BIG = {"weights": 6, "gradients": 4, "optimizer": 8, "activations": 30, "logits": 4}


def test_the_text_names_each_process_its_parts_and_the_key_to_change() -> None:
    trainer = Use(process="trainer", gpu=0, **{part: size * GIB for part, size in BIG.items()})
    engine = Use(process="rollout-0", gpu=0, weights=2 * GIB, kv_cache=3 * GIB)
    small = Device(gpu=0, free=40 * GIB, uses=[trainer, engine])
    unknown = ["the trainer's passes: KeyError: 'x': not estimated"]
    found = Plan(prompt_tokens=64, measured=MODEL, devices=[small], unknown=unknown)
    assert list(lines(config(), found)) == [
        "GPU 0: about 57.0 of 40.0 GiB free: does not fit; lower trainer.micro_tokens (16384), or set "
        "trainer.gradient_checkpointing",
        "  trainer 52.0 GiB: weights 6.0, gradients 4.0, optimizer 8.0, activations 30.0, logits 4.0",
        "  rollout-0 5.0 GiB: weights 2.0, kv cache 3.0",
        "estimated for prompts of 64 tokens and completions of the maximum length, passes of 100 tokens",
        *unknown,
    ]


@pytest.mark.parametrize(
    ("process", "part", "settings", "key"),
    [
        ("trainer", "activations", config({"gradient_checkpointing": True}), "lower trainer.micro_tokens (16384)"),
        ("trainer", "logits", config(), "trainer.logit_chunk (8192)"),
        ("trainer", "optimizer", config(), "train an adapter (model.lora.rank)"),
        ("rollout-0", "kv_cache", config(), "lower rollout.max_inflight"),
        ("rollout-0", "kv_cache", config(rollout={"engine": "vllm"}), "lower rollout.vllm.gpu_memory_utilization"),
        ("critic-0", "optimizer", config(), "critic.path"),
    ],
)
def test_a_device_that_is_too_small_names_the_key_of_its_largest_part(
    process: str, part: str, settings: Config, key: str
) -> None:
    device = Device(gpu=0, free=GIB, uses=[Use(process=process, gpu=0, **{part: 2 * GIB})])
    (first, *_) = lines(settings, Plan(prompt_tokens=64, measured=MODEL, devices=[device], unknown=[]))
    assert "does not fit; " in first
    assert key in first


def test_without_a_known_size_nothing_is_said_to_fit() -> None:
    device = Device(gpu=0, free=0, uses=[Use(process="trainer", gpu=0, weights=GIB)])
    (first, *_) = lines(config(), Plan(prompt_tokens=64, measured=MODEL, devices=[device], unknown=[]))
    assert first == "GPU 0: about 1.0 GiB; free memory unknown"


def test_custom_engines_and_trainers_are_named_as_unknown() -> None:
    found = planned(config({"run": "my.py:train"}, rollout={"engine": "my.py:Engine"}))
    assert found.unknown == [
        "the trainer: its code is that of trainer.run",
        "rollout-0: engine my.py:Engine has memory of its own",
    ]
    assert found.devices == []


def test_moments_in_8_bits_take_a_quarter() -> None:
    assert use(planned(config({"optimizer": "adamw_8bit"})), "trainer").optimizer == 2000


@pytest.mark.parametrize(
    ("trainer", "on_gpu", "weights"),
    [
        # of bfloat16 weights, the float32 copies leave the GPU
        ({"offload": "optimizer"}, (2000, 2000, 0), 4000),
        ({"backend": "fsdp", "offload": "parameters"}, (0, 0, 0), 4000),
    ],
)
def test_offloaded_state_is_in_main_memory(trainer: dict[str, Any], on_gpu: tuple[int, ...], weights: int) -> None:
    kept, moved = (use(planned(config(trainer), gpus=1), name) for name in ("trainer", "trainer, offloaded"))
    assert (kept.weights, kept.gradients, kept.optimizer) == on_gpu
    assert (kept.gpu, moved.gpu) == (0, None)
    assert (moved.weights, moved.gradients, moved.optimizer) == (weights, 4000, 8000)
    without = planned(config(trainer))
    assert use(without, "trainer").optimizer == 8000, "a trainer without a GPU has nothing to offload"


def test_a_reference_of_another_dtype_is_counted_in_it() -> None:
    chosen = config({"algorithm": {"kl_coef": 0.1}}, reference={"dtype": "float32"})
    assert use(planned(chosen, gpus=1), "reference-0").weights == 4000


@pytest.mark.parametrize(
    ("parameters", "size", "stored"),
    [
        ({}, 2 * 5 * MODEL.trained_weights, 5),
        ({}, 2 * 5 * MODEL.trained_weights - 1, 0),
        ({"keep_versions": 3}, GIB, 6),
        ({"store": "memory"}, 1, 5),
        ({"store": "disk"}, GIB, 0),
        ({"durability": "power"}, GIB, 0),
    ],
)
def test_versions_in_memory_are_counted(parameters: dict[str, Any], size: int, stored: int) -> None:
    found = planned(config(parameters=parameters), size=size)
    in_memory = [use.weights for device in found.devices for use in device.uses if use.process == "parameters"]
    assert in_memory == [stored * MODEL.trained_weights] * bool(stored)


def test_versions_that_do_not_fit_are_to_go_to_the_disk() -> None:
    large = msgspec.structs.replace(MODEL, trained_weights=GIB)
    found = planned(config(parameters={"store": "memory"}), measured=large)
    assert any('does not fit; set parameters.store to "disk"' in line for line in lines(config(), found))
