"""The runs that the coordination benchmark compares, and their execution: each once, with the requested parallelism.

The world is the one in which the targets were measured: engines of 12.4 ms a token for any number of running samples,
lognormal lengths (mu 7.2, sigma 0.9, at most 16,384 tokens), a batch of 64 groups, a trainer of 20 s a step. A prompt
determines its length completely (``prompt_share`` 1), so that every strategy and every peer meets the same lengths in
the same order.
"""

import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Literal

import msgspec

from staleflow.configs.schema import Config, Prompts, Reward, Rollout
from staleflow.configs.simulation import Simulated
from staleflow.configs.trainer import Trainer
from staleflow.sim.peers.compare import changed
from staleflow.sim.peers.run import simulate_peer
from staleflow.sim.result import Result
from staleflow.sim.simulate import simulate

Publish = Literal["start", "end"]
MU = 7.2
DISPATCH = ("coordination.routing=cost_model", "coordination.admission=just_in_time")
"""Dispatch of staleflow that is compared with peers."""
FILL = ("coordination.routing=least_loaded", "coordination.admission=fill")
"""Dispatch that fills the window."""
LEARNED = ("coordination.composition=length_clustered", "coordination.ranker=learned")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Dimensions of the world."""

    engines: int
    batch: int
    scale: float
    """Factor on the full lengths."""
    train_s: float
    seeds: int
    steps: int
    lookahead: int
    """Number of batches that are ordered together."""
    big: tuple[int, int, int, int, int]
    """Asynchronous beside synchronous: engines, groups a batch, samples a group, steps, synchronous steps."""
    fleets: tuple[int, ...]
    """Numbers of engines at a fixed work for each."""
    events: int
    """Number of events for the ledger and the paper's buffers."""

    @property
    def full(self) -> bool:
        """True for the world that the targets were set for."""
        return self.scale == 1.0


FULL = Size(
    engines=8,
    batch=64,
    scale=1.0,
    train_s=20.0,
    seeds=5,
    steps=104,
    lookahead=20,
    big=(64, 512, 8, 24, 4),
    fleets=(8, 64, 256, 1024),
    events=1_000_000,
)
SMALL = Size(
    engines=4,
    batch=24,
    scale=0.25,
    train_s=5.0,
    seeds=1,
    steps=34,
    lookahead=10,
    big=(4, 16, 4, 24, 6),
    fleets=(4, 16),
    events=3_000,
)
"""The size that the tests run."""

COSTS: dict[str, tuple[str, ...]] = {
    "flat": ("k1=0.0", "k2=0.0124", "k3=0.0", "k4=0.0"),
    "moe": ("k1=7.28e-8", "k2=0.0115108", "k3=1.249e-4", "k4=8.671926e-4"),
}
"""Seconds of a decode step. The targets were measured with ``flat``; ``moe`` is the fit of StaleFlow's authors to a
Qwen3-30B-A3B (Somoku/psrl, cost_model/qwen_moe_30b): a crowded engine is slower."""


def lengths(size: Size) -> dict[str, tuple[str, ...]]:
    """Distributions with a mean of about 2,000 tokens at full size, as overrides; ``even`` has no tail at all."""
    scale = size.scale
    matches = {
        "lognormal": ("lengths=lognormal", f"mean_tokens={scale * math.exp(MU + 0.405)}", "sigma=0.9"),
        "power law": ("lengths=power_law", f"min_tokens={round(scale * 700)}", "tail=1.5"),
        "bimodal": (
            "lengths=bimodal",
            f"mean_tokens={scale * 1200.0}",
            f"long_tokens={scale * 9000.0}",
            "sigma=0.3",
            "long_share=0.1",
        ),
        "even": ("lengths=uniform", f"min_tokens={round(scale * 400)}", f"max_tokens={round(scale * 2400)}"),
    }
    return {name: tuple(f"rollout.simulated.{one}" for one in ones) for name, ones in matches.items()}


def world(size: Size, cost: str, publish: Publish, *overrides: str, eta: int, seed: int = 0) -> Config:
    """Configuration of a run; ``overrides`` are applied last."""
    first = Config(
        prompts=Prompts(source="nobody:opens"),
        reward=Reward(run="nobody:calls"),
        rollout=Rollout(
            engine="simulated", group_size=1, max_inflight=256, filter="none", simulated=Simulated(prompt_share=1.0)
        ),
        trainer=Trainer(backend="simulated", checkpoint_every=10),
    )
    given = (
        f"seed={seed}",
        f"rollout.workers={size.engines}",
        f"rollout.max_new_tokens={round(size.scale * 16_384)}",
        f"trainer.batch_size={size.batch}",
        f"trainer.steps={size.steps}",
        f"trainer.simulated_step_s={size.train_s}",
        f"staleness.max_staleness={eta}",
        f"simulation.publish={publish}",
        *(f"rollout.simulated.{one}" for one in COSTS[cost]),
        *lengths(size)["lognormal"],
    )
    return changed(first, [*given, *overrides])


@dataclass(frozen=True, slots=True)
class Job:
    """One simulation: of the service, or under the rule of a peer."""

    config: Config
    peer: str = ""

    @property
    def key(self) -> bytes:
        return msgspec.json.encode([self.peer, self.config])


class Runs:
    """Simulates jobs, each one only once for any number of requests."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._done: dict[bytes, Result] = {}

    def of(self, jobs: Sequence[Job]) -> list[Result]:
        """Their results in order, without the long fields."""
        todo = {job.key: job for job in jobs if job.key not in self._done}
        if self._workers == 1 or len(todo) <= 1:
            self._done |= {key: run(job) for key, job in todo.items()}
        else:
            with ProcessPoolExecutor(self._workers, mp_context=get_context("spawn")) as pool:
                self._done |= dict(zip(todo, pool.map(run, todo.values()), strict=True))
        return [self._done[job.key] for job in jobs]


def run(job: Job) -> Result:
    """Simulate; engines' timelines and single lengths are left out."""
    result = simulate_peer(job.peer, job.config) if job.peer else simulate(job.config)
    return replace(result, engines=[], drawn=[], trained=[])
