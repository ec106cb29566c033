"""What a seed stands for: the shape of the run, and which faults it has, how often."""

import random
from dataclasses import dataclass
from typing import Final

import msgspec

from staleflow.configs.loading.load import from_json
from staleflow.configs.schema import Config
from staleflow.sim.faults.payload import LENGTHS, ODD, ROWS

SOURCE: Final = "staleflow.sim.faults.payload:rows"

MAX_NEW_TOKENS: Final = 128
EPOCHS: Final = 8
"""Of a run that ends by itself: more groups than most runs need."""

USERS: Final = (
    {"name": LENGTHS, "run": "nobody:calls", "makes": ["count"], "timeout_s": 1.0},
    {"name": ODD, "run": "nobody:calls", "needs": [f"{LENGTHS}/count", "reward/reward"], "makes": ["odd:token"]},
)
"""Stages of a user's: one beside the reward, one after both."""

NEAR: Final = "near"
"""Where the servers are, and the trainer in most seeds."""

LOST: Final = "lose a shard's disk"
"""Nobody promises that this costs nothing; what was there is made again, and the run goes on."""

SLABS: Final = "lose slab files"
REBOOT: Final = "reboot the servers' host"
"""Every process there ends, and the boot id changes. Slab files may go with it, as those in a tmpfs do."""

KINDS: Final = (
    "kill",
    "kill at a commit",
    "kill at a rename",
    "stop shortly",
    "stop for longer than a lease",
    "terminate",
    "power failure",
    "torn trace",
    "lose messages",
    "double messages",
    "reorder messages",
    "delay messages",
    "slow link",
    "partition",
    "one-way partition",
    "disconnect",
    "full disk",
    "crowded disk",
    "broken disk",
    "slow disk",
    "full disk of the weights",
    "flip a byte of a payload",
    "flip a byte of a column",
    "flip a byte of the weights",
    "two trainers",
    "clock jump",
    "malformed message",
    LOST,
    SLABS,
    REBOOT,
    "a rollout worker fails everything",
    "a stage worker fails everything",
    "unequal contexts",
    "poisoned payload",
    "the same name twice",
    "an older store of a shard",
    "a lost store of the scheduler",
    "an older store of the scheduler",
    "a damaged checkpoint",
)

LOSSES: Final = {LOST: 0.3, SLABS: 0.4, REBOOT: 0.3}
"""Kinds that make a run shallow, each with its share of the runs."""

HARMLESS: Final = frozenset(
    {
        "slow disk",
        "flip a byte of the weights",
        "a rollout worker fails everything",
        "a stage worker fails everything",
        "poisoned payload",
        "the same name twice",
        "a damaged checkpoint",
    }
)
"""Faults that take no worker and no message away."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One seed."""

    seed: int
    config: Config
    engines: int
    stages: int
    kinds: tuple[str, ...]
    """The faults of this run; each kind is left out of some runs, so that the others get deeper."""
    every_s: float
    """Mean time between two faults."""
    relays: int = 0
    mb_per_s: float = 0.0
    """Of what a relay asks for."""

    far_trainer: bool = False
    """The trainer is on a host of its own, and sends its versions in messages."""

    slabs: bool = False
    """Shards lend slabs to the workers on their host; otherwise all payload comes and goes in frames."""

    finite: bool = False
    """The prompts are used up after a few epochs: the run ends by itself."""

    @property
    def loses_workers(self) -> bool:
        """Whether a worker or its messages may be lost: then the only one that is left may be the broken one."""
        return any(kind not in HARMLESS for kind in self.kinds)

    def host_of(self, name: str) -> str:
        """The machine of a process: relays, and every second engine where there are some, are on others than the rest;
        in every second seed no engine has one on its own."""
        role, _, number = name.partition("-")
        if self.far_trainer and role == "trainer":
            return "the trainer's"
        if self.relays and role == "relay":
            return f"far-{int(number) + self.seed % 2 * 2}"
        if self.relays and role == "rollout" and int(number) % 2:
            return f"far-{int(number) // 2 % 2}"
        return NEAR


def plan_of(seed: int) -> Plan:
    """The plan of a seed; the same for ever, as long as this file is."""
    rng = random.Random(f"staleflow faults {seed}")
    shards = rng.choice((1, 1, 2, 3))
    finite = random.Random(f"epochs {seed}").random() < 0.1
    bound = rng.choice(("trajectory", "trajectory", "token"))
    batch_size = rng.choice((2, 6, 12, 24))
    group_size = rng.choice((1, 2, 4))
    streaming = random.Random(f"streaming {seed}").random() < 0.4
    users = random.Random(f"stages {seed}").choice((0, 0, 1, 2))
    table = {
        "name": f"faults-{seed}",
        "seed": seed,
        "model": {"path": "simulated"},
        "prompts": {"source": SOURCE, "options": {"count": ROWS}, "epochs": EPOCHS if finite else 0},
        "reward": {"run": "staleflow.examples.quickstart.task:reward", "timeout_s": 1.0, "retries": 0, "batch": 8},
        "stage": USERS[:users],
        "staleness": {
            "max_staleness": rng.choice((0, 1, 2, 3)),
            "bound": bound,
            "on_overdue": "wait" if bound == "token" else rng.choice(("wait", "truncate", "retry", "drop")),
            "min_trainable": rng.choice((0.0, 0.3)) if bound == "token" else 0.0,
        },
        "rollout": {
            "engine": "simulated",
            "workers": 64,  # as many as any mix of spares and bounds may ask for; the plan starts ``engines``
            "max_inflight": group_size * rng.choice((6, 11)),
            "max_new_tokens": MAX_NEW_TOKENS,
            "group_size": group_size,
            "filter": rng.choice(("none", "zero_spread")),
            "redundancy": {
                "groups": rng.choice((1.0, 1.0, 1.5)),
                "samples": random.Random(f"samples {seed}").choice((1.0, 1.0, 1.5)) if group_size > 1 else 1.0,
            },
        },
        "coordination": {
            "routing": rng.choice(("cost_model", "least_loaded", "round_robin")),
            "sync": rng.choice(("greedy", "idle")),
            "migration": rng.choice(("none", "idle", "throughput")),
            "admission": rng.choice(("fill", "just_in_time")),
            "composition": rng.choice(("iid", "iid", "length_clustered")),
            "ranker": rng.choice(("none", "history")),
        },
        "trainer": {
            "backend": "simulated",
            "batch_size": batch_size,
            "steps": 1_000_000,
            "checkpoint_every": rng.choice((1, 3, 8)),
            "algorithm": {"kl_coef": rng.choice((0.0, 0.0, 0.1))},
            "simulated_step_s": batch_size * rng.choice((0.02, 0.06)),
            "streaming": streaming,
            "stream_groups": random.Random(f"pieces {seed}").choice((1, 2)) if streaming else 1,
        },
        "scheduler": {"bind": "tcp://127.0.0.1:7000", "lease_s": 5.0, "durability": rng.choice(("process", "power"))},
        "trajectories": {
            "shards": shards,
            "bind": [f"tcp://127.0.0.1:{7001 + shard}" for shard in range(shards)],
            "durability": random.Random(f"shards' durability {seed}").choice(("process", "power", "power")),
        },
        "parameters": {"bind": "tcp://127.0.0.1:7100"},
    }
    if table["coordination"]["composition"] == "length_clustered":  # type: ignore[index]
        table["coordination"]["ranker"] = "history"  # type: ignore[index]
    if table["rollout"]["group_size"] == 1:  # type: ignore[index]
        table["rollout"]["filter"] = "none"  # type: ignore[index]
    kinds = tuple(kind for kind in KINDS if kind not in LOSSES and rng.random() < 0.7)
    kinds += _losses(seed)
    engines, stages = rng.choice((2, 3, 5)), rng.choice((1, 2))
    if seed % 10 == 8:  # only among workers that stay can the one that fails be judged
        kinds, engines, stages = tuple(kind for kind in KINDS if kind in HARMLESS), 3, 2
    return Plan(
        seed=seed,
        config=from_json(msgspec.json.encode(table)),
        engines=engines,
        stages=stages,
        kinds=kinds or KINDS,
        every_s=rng.choice((0.7, 1.5, 3.0)),
        relays=random.Random(f"seed {seed}, relays").choice((0, 0, 0, 1, 2, 3)),
        finite=finite,
        slabs=_lends_slabs(seed),
        far_trainer=random.Random(f"trainer's host {seed}").random() < 0.4,
        mb_per_s=random.Random(f"relays' pace {seed}").choice((0.0, 0.001)),
    )


def _losses(seed: int) -> tuple[str, ...]:
    drawn = {LOST: f"lost disks {seed}", SLABS: f"lost slabs {seed}", REBOOT: f"reboots {seed}"}
    kinds = tuple(kind for kind, share in LOSSES.items() if random.Random(drawn[kind]).random() < share)
    return tuple(kind for kind in kinds if kind != SLABS or _lends_slabs(seed))


def _lends_slabs(seed: int) -> bool:
    return random.Random(f"slabs {seed}").random() < 0.7
