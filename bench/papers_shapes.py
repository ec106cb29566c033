"""Workload shapes of the papers: fleets, batches and lengths, at a fraction of the size.

A shape divides engines, groups of a batch and trainer GPUs by the same number, so that the load of an engine and the
duration of a step stay. Lengths are lognormal with the median and spread of the StaleFlow authors' simulator
(psrl-project/DryRun-RL: lognormal(7.2, 0.9), at most 16,384), scaled to the maximum of the shape: no paper publishes
its lengths as numbers. Half of the spread is due to the prompt.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.coordination_world import MU
from bench.papers_gpu import A3B, FOLDER, H20, H800, QWEN_7B, QWEN_32B, Hardware
from staleflow.configs.schema import Config, Prompts, Reward, Rollout
from staleflow.configs.simulation import Simulated
from staleflow.configs.trainer import Trainer
from staleflow.sim.peers.compare import changed

SIGMA = 0.9
MEDIAN_SHARE = math.exp(MU) / 16_384
"""Median of the lengths, as a share of the longest."""
SLOW = 0.6
"""Speed of an A100 beside an H800: their memory bandwidths, 2.04 and 3.35 TB/s."""
REPORT_S = 5.0
"""Seconds between the reports of an engine without events: steps take minutes, and reports cost CPU to simulate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One workload, at the size that is simulated."""

    name: str
    source: str
    """The paper or script, and what was assumed beside it."""
    divided: int
    """Number by which the original's engines, groups and trainer GPUs were divided."""
    hardware: Hardware
    """With the trainer GPUs after the division."""
    engines: int
    batch: int
    group: int
    longest: int
    sigma: float = SIGMA
    median_share: float = MEDIAN_SHARE
    slow: int = 0
    """Engines of speed ``SLOW``, of all."""
    remote: bool = False
    steps: int = 18

    @property
    def cost_file(self) -> Path:
        return FOLDER / f"{self.name}.toml"

    @property
    def row(self) -> tuple[str, ...]:
        """Cells of the table of shapes."""
        hardware = self.hardware
        engines = f"{self.engines} x {hardware.tp} {hardware.engine_gpu.name}"
        engines += f", {self.slow} of them {SLOW:g} x as fast" if self.slow else ""
        return (
            self.name,
            hardware.model.name,
            engines + (", remote" if self.remote else ""),
            f"{hardware.trainer_gpus} {hardware.trainer_gpu.name}",
            f"{self.batch} x {self.group}",
            f"{self.longest:,}",
            f"1/{self.divided}",
            self.source,
        )

    def world(self, *overrides: str, eta: int, seed: int) -> Config:
        """Return the configuration of a run; ``overrides`` come last. Weights are published before the next step
        starts, in every row, since the rules of peers do not overlap it."""
        median = self.median_share * self.longest
        fast = self.engines - self.slow
        fleet = [
            f"{{count = {count}, speed = {speed}, remote = {str(self.remote).lower()}}}"
            for count, speed in ((fast, 1.0), (self.slow, SLOW))
            if count
        ]
        given = (
            f"seed={seed}",
            f"rollout.workers={self.engines}",
            f"rollout.group_size={self.group}",
            f"rollout.max_new_tokens={self.longest}",
            f"rollout.simulated.mean_tokens={median * math.exp(self.sigma**2 / 2)}",
            f"rollout.simulated.sigma={self.sigma}",
            f"trainer.batch_size={self.batch}",
            f"trainer.steps={self.steps}",
            "trainer.overlap_publish=false",
            f"staleness.max_staleness={eta}",
            f"simulation.costs={self.cost_file}",
            f"simulation.model_gib={self.hardware.model.gib}",
            f"simulation.kv_tokens={self.hardware.kv_tokens}",
            "simulation.prompt_tokens=300",
            f"simulation.report_s={REPORT_S}",
            f"simulation.fleet=[{', '.join(fleet)}]",
        )
        return changed(_BASE, [*given, *overrides])


_BASE = Config(
    prompts=Prompts(source="nobody:opens"),
    reward=Reward(run="nobody:calls"),
    rollout=Rollout(engine="simulated", max_inflight=256, filter="none", simulated=Simulated(prompt_share=0.5)),
    trainer=Trainer(backend="simulated", checkpoint_every=10),
)

_ALL = (
    Shape(
        name="staleflow-7b",
        source="Somoku/psrl, stream_megatron_qwen_7b_aime_tis.sh (DAPO-Math-17k); the GPU is assumed",
        divided=4,
        hardware=Hardware(model=QWEN_7B, engine_gpu=H20, tp=4, trainer_gpu=H20, trainer_gpus=8),
        engines=2,
        batch=32,
        group=8,
        longest=8_192,
    ),
    Shape(
        name="staleflow-moe",
        source="Somoku/psrl, qwen3_30b_megatron.sh (DAPO-Math-17k); the GPU is assumed",
        divided=4,
        hardware=Hardware(model=A3B, engine_gpu=H20, tp=1, trainer_gpu=H20, trainer_gpus=10),
        engines=6,
        batch=16,
        group=16,
        longest=20_480,
    ),
    Shape(
        name="streamrl-32b",
        source="StreamRL (arXiv 2504.15930): 20K lengths, generation on H20, training on H800, 80 Gbit/s between them; "
        "batch and fleet are assumed",
        divided=1,
        hardware=Hardware(model=QWEN_32B, engine_gpu=H20, tp=4, trainer_gpu=H800, trainer_gpus=4),
        engines=2,
        batch=16,
        group=16,
        longest=20_480,
        remote=True,
    ),
    Shape(
        name="mixed-7b",
        source="two kinds of engines, in the spirit of StreamRL; all of it is assumed",
        divided=1,
        hardware=Hardware(model=QWEN_7B, engine_gpu=H800, tp=1, trainer_gpu=H800, trainer_gpus=4),
        engines=4,
        slow=2,
        batch=32,
        group=8,
        longest=20_480,
    ),
    Shape(
        name="distflow-7b",
        source="DistFlow (arXiv 2507.13833): a synchronous system; short answers with a small spread, batch and "
        "fleet are assumed",
        divided=1,
        hardware=Hardware(model=QWEN_7B, engine_gpu=H800, tp=1, trainer_gpu=H800, trainer_gpus=4),
        engines=4,
        batch=32,
        group=8,
        longest=4_096,
        sigma=0.5,
        median_share=0.25,
    ),
)

SHAPES = {shape.name: shape for shape in _ALL}


def small(shapes: Sequence[Shape]) -> list[Shape]:
    """Return the shapes at the size that the tests run."""
    return [
        replace(shape, engines=min(shape.engines, 2), slow=min(shape.slow, 1), batch=8, group=2, steps=9)
        for shape in shapes
    ]
