"""The plan of a seed: the shape of the run, its faults and their rate."""

import random
from dataclasses import dataclass, replace
from typing import Final

import msgspec
from msgspec import structs

from staleflow.configs.loading.load import from_json
from staleflow.configs.schema import Config, Prompts
from staleflow.sim.faults.payload import LENGTHS, ODD, ROWS

SOURCE: Final = "staleflow.sim.faults.payload:rows"

MAX_NEW_TOKENS: Final = 128
EPOCHS: Final = 8
"""Number of epochs of a run that ends by itself: more groups than most runs need."""

SUBMITTED_SHARE, MAX_PENDING = 0.2, 200
"""Share of the runs whose prompts a client submits, and the maximum number of its rows that wait."""

USERS: Final = (
    {"name": LENGTHS, "run": "nobody:calls", "makes": ["count"], "timeout_s": 1.0},
    {"name": ODD, "run": "nobody:calls", "needs": [f"{LENGTHS}/count", "reward/reward"], "makes": ["odd:token"]},
)
"""Stages of a user: one beside the reward, one after both."""

NEAR: Final = "near"
"""Host of the servers, and of the trainer in most seeds."""

LOST: Final = "lose a shard's disk"
"""This loss may cost work: the lost groups are generated again, and the run continues."""

SLABS: Final = "lose slab files"
REBOOT: Final = "reboot the servers' host"
"""Every process of the host ends, and the boot id changes. Slab files may be lost too, like those in a tmpfs."""

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
"""Kinds that reset a run's progress, each with its share of the runs."""

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
"""Faults that cost neither a worker nor a message."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of one seed."""

    seed: int
    config: Config
    engines: int
    stages: int
    kinds: tuple[str, ...]
    """The faults of this run. Each kind is left out of some runs, so that the others progress further."""
    every_s: float
    """Mean time between two faults."""
    relays: int = 0
    mb_per_s: float = 0.0
    """Rate limit of a relay's requests."""

    far_trainer: bool = False
    """True if the trainer is on a host of its own, and sends its versions in messages."""

    slabs: bool = False
    """True if shards lend slabs to the workers on their host; otherwise all payload travels in frames."""

    finite: bool = False
    """True if the prompts are used up after a few epochs, so that the run ends by itself."""

    untrainable: bool = False
    """True if the trainer's model raises at some groups, which no server can know."""

    false_reports: bool = False
    """True if rollout workers also report versions that they have not loaded."""

    killed_at_end: bool = False
    """True if the scheduler is killed as soon as it has acknowledged the end of the run."""

    drained: bool = False
    """True if the run is ended by a drain, not by its last step."""

    @property
    def submitted(self) -> bool:
        """True if a client submits the prompts."""
        return self.config.prompts.submitted

    @property
    def loses_workers(self) -> bool:
        """True if a worker or its messages may be lost; then the only remaining worker may be the broken one."""
        return any(kind not in HARMLESS for kind in self.kinds)

    def host_of(self, name: str) -> str:
        """Return the host of a process. Relays, and every second engine where relays exist, are on other hosts than the
        rest; in every second seed no engine has a relay on its own host."""
        role, _, number = name.partition("-")
        if self.far_trainer and role == "trainer":
            return "the trainer's"
        if self.relays and role == "relay":
            return f"far-{int(number) + self.seed % 2 * 2}"
        if self.relays and role == "rollout" and int(number) % 2:
            return f"far-{int(number) // 2 % 2}"
        return NEAR


def plan_of(seed: int, *, submitted: bool | None = None) -> Plan:
    """Return the plan of a seed; stable as long as this file does not change.

    ``submitted``: whether a client submits the prompts; None: as the seed draws it.
    """
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
            "workers": 64,  # the maximum that any mix of spares and bounds may need; the plan starts ``engines``
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
        "parameters": {"bind": "tcp://127.0.0.1:7100", "store": "disk"},
    }
    if table["coordination"]["composition"] == "length_clustered":  # type: ignore[index]
        table["coordination"]["ranker"] = "history"  # type: ignore[index]
    if table["rollout"]["group_size"] == 1:  # type: ignore[index]
        table["rollout"]["filter"] = "none"  # type: ignore[index]
    kinds = tuple(kind for kind in KINDS if kind not in LOSSES and rng.random() < 0.7)
    kinds += _losses(seed)
    engines, stages = rng.choice((2, 3, 5)), rng.choice((1, 2))
    if seed % 10 == 8:  # a failing worker can be judged only among workers that survive
        kinds, engines, stages = tuple(kind for kind in KINDS if kind in HARMLESS), 3, 2
    plan = Plan(
        seed=seed,
        config=from_json(msgspec.json.encode(table)),
        engines=engines,
        stages=stages,
        kinds=kinds or KINDS,
        every_s=rng.choice((0.7, 1.5, 3.0)),
        relays=random.Random(f"seed {seed}, relays").choice((0, 0, 0, 1, 2, 3)),
        finite=finite,
        untrainable=random.Random(f"groups that fail {seed}").random() < 0.15,
        false_reports=random.Random(f"pulls {seed}").random() < 0.15,
        drained=random.Random(f"last drain {seed}").random() < 0.15,
        killed_at_end=random.Random(f"end {seed}").random() < 0.15,
        slabs=_lends_slabs(seed),
        far_trainer=random.Random(f"trainer's host {seed}").random() < 0.4,
        mb_per_s=random.Random(f"relays' pace {seed}").choice((0.0, 0.001)),
    )
    drawn = random.Random(f"submitted {seed}").random() < SUBMITTED_SHARE
    if not (drawn if submitted is None else submitted):
        return plan
    prompts = Prompts(submitted=True, max_pending=MAX_PENDING)
    return replace(plan, finite=False, config=structs.replace(plan.config, prompts=prompts))


def _losses(seed: int) -> tuple[str, ...]:
    drawn = {LOST: f"lost disks {seed}", SLABS: f"lost slabs {seed}", REBOOT: f"reboots {seed}"}
    kinds = tuple(kind for kind, share in LOSSES.items() if random.Random(drawn[kind]).random() < share)
    return tuple(kind for kind in kinds if kind != SLABS or _lends_slabs(seed))


def _lends_slabs(seed: int) -> bool:
    return random.Random(f"slabs {seed}").random() < 0.7
