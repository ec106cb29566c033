"""The world of ``bench.prices`` and ``bench.preemptible``: a model of 7 billion parameters on data-centre GPUs, with
durations from the figures of the hardware.

- Model: Qwen2.5-7B (its config.json): 7.62e9 parameters, 28 layers, 4 heads of 128 for keys and values, bfloat16.
- Peak rates: data sheets of NVIDIA. H800 (as H100 SXM): 989 TFLOP/s dense in bfloat16, 3.35 TB/s, 80 GB. H20: 148
  TFLOP/s, 4.0 TB/s, 96 GB.
- Assumed: decoding reaches 75 % of the memory's rate and 60 % of that of the arithmetic, training 40 %; 1 ms of
  overhead a decode step; 90 % of the memory is used.
- Training costs 8 FLOP a parameter and token: forward, backward, and the forward of the old log-probabilities.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from staleflow.configs.costs import Costs, EngineCosts, LoadCosts, PublishCosts, PullCosts, RewardCosts, TrainerCosts
from staleflow.configs.loading.toml import dumps
from staleflow.configs.schema import Config, Coordination, Prompts, Reward, Rollout, Scheduler, Staleness
from staleflow.configs.simulation import Fleet, Preemption, Simulated, Simulation
from staleflow.configs.trainer import Trainer

PARAMETERS = 7.62e9
WEIGHT_BYTES = 2 * PARAMETERS
KV_BYTES = 2 * 28 * 4 * 128 * 2
"""Bytes of a token in the KV cache."""
DECODE_MEMORY, DECODE_COMPUTE, TRAIN_COMPUTE, MEMORY_USED = 0.75, 0.6, 0.4, 0.9
"""Assumed shares of the peaks."""
TRAINER_GPUS = 4
MAX_STALENESS = 4
SLOTS = 64
"""Samples that an engine decodes at once. More make each of them slower, and the longest ones set the pace."""
GIB = 2**30
MODEL_GIB = WEIGHT_BYTES / GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A kind of GPU; one engine uses one of them."""

    name: str
    flop_s: float
    bytes_s: float
    memory: float

    def fleet(
        self, count: int, price: float, *, slots: int = SLOTS, remote: bool = False, preemptible: bool = False
    ) -> Fleet:
        """Return engines of this kind, relative to those of the H800."""
        return Fleet(
            count=count,
            kind=self.name,
            price=price,
            speed=self.bytes_s / H800.bytes_s,
            compute=self.flop_s / H800.flop_s,
            slots=slots,
            kv_tokens=round((MEMORY_USED * self.memory - WEIGHT_BYTES) / KV_BYTES),
            remote=remote,
            preemptible=preemptible,
        )


H800 = Gpu(name="h800", flop_s=989e12, bytes_s=3.35e12, memory=80e9)
H20 = Gpu(name="h20", flop_s=148e12, bytes_s=4.0e12, memory=96e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A way to send a version to a far data centre, where a relay passes it on: it crosses the link once."""

    name: str
    gib: float
    """Size on the link."""
    loaded_gib: float = MODEL_GIB
    """Size that the trainer publishes and an engine loads."""
    fixed_s: float = 0.0
    """Seconds to encode and decode it."""


FULL = Transfer(name="full versions", gib=MODEL_GIB)
DELTA = Transfer(name="deltas", gib=MODEL_GIB / 68, fixed_s=1.2 * WEIGHT_BYTES / 1e9)
"""The smallest ratio and the slowest encoding of ``bench.delta``: 68 times smaller, 1.2 s a GB."""
LORA = Transfer(name="LoRA", gib=2 * 80.7e6 / GIB, loaded_gib=2 * 80.7e6 / GIB)
"""An adapter of rank 32 on all linear layers: 80.7 million parameters in bfloat16."""


def costs(transfer: Transfer, gbit_s: float, gpus: int = TRAINER_GPUS) -> Costs:
    """Return the costs of engines on H800, of ``gpus`` H800 that train, and of a link."""
    memory_s, compute_s = 1 / (DECODE_MEMORY * H800.bytes_s), 1 / (DECODE_COMPUTE * H800.flop_s)
    token_s = 2 * PARAMETERS * compute_s
    size, link = transfer.loaded_gib / MODEL_GIB, transfer.gib / MODEL_GIB
    return Costs(
        source="bench/prices_world.py: data sheets and assumed shares of the peaks",
        engine=EngineCosts(k1=KV_BYTES * memory_s, k2=WEIGHT_BYTES * memory_s, k3=token_s, k4=1e-3, prefill_s=token_s),
        trainer=TrainerCosts(fixed_s=1.0, token_s=8 * PARAMETERS / (gpus * TRAIN_COMPUTE * H800.flop_s)),
        publish=PublishCosts(fixed_s=0.1, gib_s=0.1 * size),  # about 10 GB/s: bench.weights
        # Beside the trainer 0.26 s for 512 MiB and four readers (bench.weights); the link carries a version once.
        pull=PullCosts(fixed_s=transfer.fixed_s, gib_s=0.13 * size, network_gib_s=link * GIB * 8 / (gbit_s * 1e9)),
        load=LoadCosts(gib_s=0.05 * size),  # about 20 GB/s to the GPU
        reward=RewardCosts(fixed_s=0.5),
    )


@contextmanager
def costs_file(of: Costs) -> Generator[Path]:
    """Write a cost file that exists within the context."""
    with TemporaryDirectory(prefix="staleflow-prices-") as place:
        path = Path(place) / "costs.toml"
        path.write_text(dumps({name: table for name, table in msgspec.to_builtins(of).items() if table is not None}))
        yield path


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Dimensions of the runs."""

    batch: int = 32
    group: int = 8
    steps: int = 20
    longest: int = 16_384
    mean_tokens: float = 5_000.0


FULL_SIZE = Size()
SMALL_SIZE = Size(batch=4, group=2, steps=6, longest=512, mean_tokens=100.0)
"""The size that the tests run."""


def config(
    size: Size,
    fleet: list[Fleet],
    file: Path,
    *,
    trainer_price: float,
    seed: int = 0,
    max_staleness: int = MAX_STALENESS,
    handover_s: float = 0.0,
    preemption: Preemption | None = None,
) -> Config:
    """Return a run with lognormal lengths, prompts of 512 tokens, and checkpoints that cost nothing."""
    return Config(
        name="prices",
        seed=seed,
        prompts=Prompts(source="nobody:opens"),
        reward=Reward(run="nobody:calls"),
        staleness=Staleness(max_staleness=max_staleness),
        rollout=Rollout(
            engine="simulated",
            group_size=size.group,
            max_inflight=SLOTS,
            max_new_tokens=size.longest,
            filter="none",
            handover_s=handover_s,
            simulated=Simulated(mean_tokens=size.mean_tokens, sigma=0.6),
        ),
        trainer=Trainer(backend="simulated", batch_size=size.batch, steps=size.steps),
        scheduler=Scheduler(lease_s=10.0),
        coordination=Coordination(routing="cost_model", admission="just_in_time"),
        simulation=Simulation(
            costs=str(file),
            model_gib=MODEL_GIB,
            prompt_tokens=512,
            fleet=fleet,
            trainer_price=trainer_price,
            preemption=preemption or Preemption(),
        ),
    )
