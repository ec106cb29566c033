"""Derive cost files at the scale of GPUs from data sheets and model sizes; nothing in them but the servers is measured.

    python -m bench.papers_gpu            writes bench/gpu_costs/*.toml

Scheduler, trajectory servers, wire and reward keep the values that ``bench.costs`` measured on two cores. Engine,
trainer and weights are roofline estimates: bytes over bandwidth and FLOPs over peak, each with a constant utilization
(``BANDWIDTH_USE`` and so on). Attention's FLOPs are left out; at 20,000 tokens they add about a tenth to the training
of a 7B model. As a check, the StaleFlow authors' fit of Qwen3-30B-A3B on one GPU (Somoku/psrl, cost_model/qwen_moe_30b)
has 11.5 ms for the weights of a step and 0.125 ms for each running sample; ``A3B`` on an H20 gives 14.4 ms at sixteen
samples, and 0.089 ms.
"""

from dataclasses import dataclass
from pathlib import Path

import click

from bench.costs import text
from staleflow.configs.costs import (
    CheckpointCosts,
    Costs,
    EngineCosts,
    LoadCosts,
    PublishCosts,
    PullCosts,
    TrainerCosts,
)
from staleflow.configs.loading.cost_file import read_costs

FOLDER = Path(__file__).parent / "gpu_costs"
MEASURED = Path(__file__).parent / "results" / "2026-11-2-cores-costs.toml"
GIB = 1 << 30
BANDWIDTH_USE = 0.7
"""Share of the memory bandwidth that decoding reaches."""
DECODE_USE = 0.5
"""Share of the peak FLOPS that the matrix products of decoding and prefill reach."""
TRAIN_USE = 0.4
MOE_TRAIN_USE = 0.2
"""Share of the peak FLOPS that training reaches, dense and with a mixture of experts."""
PASSES = 10
"""FLOPs of a trained token for each active parameter: 6 for forward and backward, 2 for recomputed activations, 2 for
the trainer's own log-probabilities."""
STEP_OVERHEAD_S = 0.001
"""Launches and sampling of a decode step; with tensor parallelism, twice that."""
PCIE_BYTES_S = 50e9
"""A GPU's link to main memory (PCIe 5.0 x16), and a network card of 400 Gbit/s."""
SLOW_BYTES_S = 10e9
"""The 80 Gbit/s between data centres in StreamRL's evaluation."""
MEMORY_USE = 0.9
ACTIVATIONS_BYTES = 4e9


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by its data sheet: dense bfloat16."""

    name: str
    flops: float
    bytes_s: float
    memory: float


@dataclass(frozen=True, slots=True)
class Model:
    """A model by its published configuration; parameters in number, weights and KV cache in bfloat16."""

    name: str
    params: float
    active: float
    expert_params: float
    layers: int
    kv_heads: int
    head_dim: int
    experts: int = 0
    experts_active: int = 0

    @property
    def gib(self) -> float:
        return 2 * self.params / GIB

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token in the KV cache."""
        return 4 * self.layers * self.kv_heads * self.head_dim


H20 = Gpu("H20", 148e12, 4.0e12, 96e9)
H800 = Gpu("H800", 989e12, 3.35e12, 80e9)
QWEN_7B = Model("Qwen2.5-7B", 7.6e9, 7.6e9, 0.0, 28, 4, 128)
QWEN_32B = Model("Qwen2.5-32B", 32.8e9, 32.8e9, 0.0, 64, 8, 128)
A3B = Model("Qwen3-30B-A3B", 30.5e9, 3.3e9, 29.0e9, 48, 4, 128, experts=128, experts_active=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Hardware of a run: engines of ``tp`` GPUs each, and a trainer."""

    model: Model
    engine_gpu: Gpu
    tp: int
    trainer_gpu: Gpu
    trainer_gpus: int

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit into an engine beside the weights."""
        room = self.tp * (MEMORY_USE * self.engine_gpu.memory - ACTIVATIONS_BYTES) - 2 * self.model.params
        return int(room / self.model.kv_bytes)

    def costs(self) -> Costs:
        """Return the derived costs, with the measured ones of the servers."""
        measured = read_costs(MEASURED)
        return Costs(
            source="python -m bench.papers_gpu: engine, trainer and weights are derived from data sheets, not "
            f"measured; scheduler, shard, wire and reward are those of bench/results/{MEASURED.name}",
            scheduler=measured.scheduler,
            shard=measured.shard,
            wire=measured.wire,
            publish=PublishCosts(
                source=f"derived: {self.trainer_gpus} GPUs copy their parts at once over {_rate(PCIE_BYTES_S)}, then "
                "one network card of that rate sends the whole",
                gib_s=GIB / PCIE_BYTES_S * (1 + 1 / self.trainer_gpus),
            ),
            pull=PullCosts(
                source=f"derived: one network card of {_rate(PCIE_BYTES_S)}; remote engines over {_rate(SLOW_BYTES_S)}",
                gib_s=GIB / PCIE_BYTES_S,
                network_gib_s=GIB / SLOW_BYTES_S,
            ),
            load=LoadCosts(
                source=f"derived: {self.tp} GPUs load their parts at once over {_rate(PCIE_BYTES_S)}",
                gib_s=GIB / PCIE_BYTES_S / self.tp,
            ),
            engine=self._engine(),
            reward=measured.reward,
            trainer=self._trainer(),
            checkpoint=CheckpointCosts(source="not charged: written while training continues", asynchronous=True),
        )

    def _engine(self) -> EngineCosts:
        model, gpu = self.model, self.engine_gpu
        bytes_s, flops = self.tp * gpu.bytes_s * BANDWIDTH_USE, self.tp * gpu.flops * DECODE_USE
        token_s = 2 * model.active / flops
        return EngineCosts(
            source=f"derived: {model.name} in bfloat16 on {self.tp} {gpu.name} ({gpu.bytes_s / 1e12:g} TB/s, "
            f"{gpu.flops / 1e12:g} TFLOPS); k1 = {model.kv_bytes} B / ({BANDWIDTH_USE:g} x bandwidth), k2 and "
            f"experts_s = 2 B x parameters / the same, k3 and prefill_s = 2 x active parameters / ({DECODE_USE:g} x "
            "FLOPS)",
            prefill_s=token_s,
            k1=model.kv_bytes / bytes_s,
            k2=2 * (model.params - model.expert_params) / bytes_s,
            k3=token_s,
            k4=STEP_OVERHEAD_S * (1 + (self.tp > 1)),
            experts=model.experts,
            active=model.experts_active,
            experts_s=2 * model.expert_params / bytes_s,
        )

    def _trainer(self) -> TrainerCosts:
        model, gpu = self.model, self.trainer_gpu
        use = MOE_TRAIN_USE if model.experts else TRAIN_USE
        return TrainerCosts(
            source=f"derived: {self.trainer_gpus} {gpu.name}; token_s = {PASSES} x active parameters / (GPUs x {use:g} "
            "x FLOPS); fixed_s = 32 B x parameters / (GPUs x bandwidth), the optimizer's state read and written",
            fixed_s=32 * model.params / (self.trainer_gpus * gpu.bytes_s * BANDWIDTH_USE),
            token_s=PASSES * model.active / (self.trainer_gpus * use * gpu.flops),
        )


def _rate(bytes_s: float) -> str:
    return f"{bytes_s / 1e9:g} GB/s"


@click.command(help=__doc__)
def main() -> None:
    from bench.papers_shapes import SHAPES

    for shape in SHAPES.values():
        shape.cost_file.write_text(text(shape.hardware.costs()), encoding="utf-8")


if __name__ == "__main__":
    main()
