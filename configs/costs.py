"""The cost file of ``staleflow simulate`` (``simulation.costs``): what each part of a run costs, with the source of the
values.

Every table is optional. A table of the file replaces the constants of the configuration that it names; without the
table they stay, and parts without any constant cost nothing.
"""

from typing import Annotated, Literal

from msgspec import Meta, field

from staleflow.configs.section import NonNegative, NonNegativeFloat, Section, Text


class MeasuredCosts(Section, frozen=True, kw_only=True):
    """What every table of the cost file has."""

    source: Text = ""
    """Command, machine and conditions of the measurement."""


class SchedulerCosts(MeasuredCosts, frozen=True, kw_only=True):
    """CPU of the scheduler, one process: messages wait for its core in the order of their arrival. It handles all
    waiting messages, up to 128, in one drain, and replies after the commit at its end.
    """

    drain_s: NonNegativeFloat = 0.0
    """CPU seconds of a drain: commit and trace. Drains that contain nothing but reports commit nothing."""
    message_s: NonNegativeFloat = 0.0
    """CPU seconds of a message and its reply: socket, codec, handler."""
    messages: dict[str, NonNegativeFloat] = field(default_factory=dict[str, float])
    """CPU seconds of messages of a kind instead of ``message_s``, by the name of the kind, such as ``Report``."""
    operation_s: NonNegativeFloat = 0.0
    """CPU seconds of each lease operation in a message of them (push, occupy, release), beyond ``message_s``; the
    group's reservation is part of its push."""
    heartbeat_s: NonNegativeFloat = 0.0
    """CPU seconds of a heartbeat; every connected process sends one a second."""
    engine_s: NonNegativeFloat = 0.0
    """CPU seconds in each second for each attached engine, beyond its messages: decisions of the coordination cycle."""


class ShardCosts(MeasuredCosts, frozen=True, kw_only=True):
    """CPU of a trajectory server, one process each: requests wait for its core in the order of their arrival."""

    push_group_s: NonNegativeFloat = 0.0
    """CPU seconds to take a pushed group: leases, digests, store, reward queue."""
    push_gib_s: NonNegativeFloat = 0.0
    """CPU seconds for each GiB of pushed payload."""
    fetch_group_s: NonNegativeFloat = 0.0
    """CPU seconds to send a group to the trainer, which fetches a batch as soon as it is delivered."""
    fetch_gib_s: NonNegativeFloat = 0.0
    """CPU seconds for each GiB that the trainer fetches."""


class WireCosts(MeasuredCosts, frozen=True, kw_only=True):
    """The connection between a client and a server. Each client has one to each server; the frames of a message occupy
    it, in each direction, and its header takes only ``latency_s``.
    """

    latency_s: NonNegativeFloat = 0.0
    """Seconds of one way."""
    gib_s: NonNegativeFloat = 0.0
    """Seconds for each GiB of frames: the inverse of the bandwidth."""


class PublishCosts(MeasuredCosts, frozen=True, kw_only=True):
    """From the end of a train step until its version is registered. ``trainer.overlap_publish`` decides whether the
    next step trains meanwhile; it waits before its optimizer changes the weights.
    """

    fixed_s: NonNegativeFloat = 0.0
    """Seconds of a version of no size."""
    gib_s: NonNegativeFloat = 0.0
    """Seconds for each GiB of ``simulation.model_gib``."""


class PullCosts(MeasuredCosts, frozen=True, kw_only=True):
    """From the order to load a version until its bytes are at the engine, which continues meanwhile. Replaces
    ``simulation.pull_s``.
    """

    fixed_s: NonNegativeFloat = 0.0
    """Seconds of a version of no size."""
    gib_s: NonNegativeFloat = 0.0
    """Seconds for each GiB, on the host of the parameter server or of a relay: digests are verified."""
    network_gib_s: NonNegativeFloat = 0.0
    """Seconds for each GiB beyond ``gib_s``, for engines of a ``simulation.fleet`` with ``remote``."""


class LoadCosts(MeasuredCosts, frozen=True, kw_only=True):
    """The pause of an engine that loads weights. Replaces ``simulation.load_s``."""

    fixed_s: NonNegativeFloat = 0.0
    """Seconds of a version of no size."""
    gib_s: NonNegativeFloat = 0.0
    """Seconds for each GiB of ``simulation.model_gib``."""


class EngineCosts(MeasuredCosts, frozen=True, kw_only=True):
    """Prefill and decode of an engine of speed 1. Replaces ``simulation.prefill_s`` and the ``k1`` to ``k4`` of
    ``[rollout.simulated]``.

    With a mixture of experts the weights that a step reads grow with the number of distinct experts that its tokens
    choose. ``n`` running samples that choose ``active`` of ``experts`` evenly choose ``experts * (1 - (1 - active /
    experts) ** n)`` distinct ones on average (MoESD, arXiv 2505.19645). A step then takes ``k1 * kv + max(k2 +
    experts_s * share, k3 * n) + k4`` seconds, with the share of the experts that are chosen.
    """

    prefill_s: NonNegativeFloat = 0.0
    """Seconds for each token of prefill."""
    k1: NonNegativeFloat = 0.0
    """Seconds a step for each token in the KV cache."""
    k2: NonNegativeFloat = 0.0
    """Minimum seconds of a step: the weights that every step reads."""
    k3: NonNegativeFloat = 0.0
    """Seconds a step for each running sample."""
    k4: NonNegativeFloat = 0.0
    """Seconds of overhead a step."""
    experts: NonNegative = 0
    """Experts of each layer; 0: a dense model."""
    active: NonNegative = 0
    """Experts that each token chooses in each layer."""
    experts_s: NonNegativeFloat = 0.0
    """Seconds to read the weights of all experts once."""


class RewardCosts(MeasuredCosts, frozen=True, kw_only=True):
    """From the push of a group until it may be trained. Replaces ``simulation.reward_s``."""

    group_s: NonNegativeFloat = 0.0
    """Seconds for which a group occupies a reward worker. Each of the ``reward.workers`` scores one group after
    another; groups wait for a free one, before ``fixed_s``."""
    fixed_s: NonNegativeFloat = 0.0
    """Seconds that every group takes."""
    mean_s: NonNegativeFloat = 0.0
    """Mean of the seconds beyond them."""
    distribution: Literal["exponential", "lognormal"] = "exponential"
    """Distribution of the seconds beyond them."""
    sigma: Annotated[float, Meta(ge=0, le=3)] = 1.0
    """``lognormal``: standard deviation of the logarithm."""


class TrainerCosts(MeasuredCosts, frozen=True, kw_only=True):
    """A train step. Replaces ``trainer.simulated_step_s``. A streaming trainer pays ``fixed_s`` with a step's last
    groups.
    """

    fixed_s: NonNegativeFloat = 0.0
    """Seconds of a step of no size: optimizer, metrics."""
    token_s: NonNegativeFloat = 0.0
    """Seconds of forward and backward for each token of the batch, prompts included, once for each trajectory."""
    trajectory_s: NonNegativeFloat = 0.0
    """Seconds for each trajectory of the batch."""
    between_s: NonNegativeFloat = 0.0
    """Seconds between two steps, in which the trainer is idle: weights are copied to be published, the step is
    recorded."""


class CheckpointCosts(MeasuredCosts, frozen=True, kw_only=True):
    """A checkpoint, every ``trainer.checkpoint_every`` steps and at the end."""

    fixed_s: NonNegativeFloat = 0.0
    """Seconds of a checkpoint of no size."""
    gib_s: NonNegativeFloat = 0.0
    """Seconds for each GiB of ``simulation.model_gib``, with the optimizer's state that belongs to it."""
    asynchronous: bool = False
    """The trainer continues while it is written. Otherwise the next step waits."""


class Costs(Section, frozen=True, kw_only=True):
    """All tables of the file."""

    source: Text = ""
    """Command, machine and conditions of the measurements."""
    scheduler: SchedulerCosts | None = None
    shard: ShardCosts | None = None
    wire: WireCosts | None = None
    publish: PublishCosts | None = None
    pull: PullCosts | None = None
    load: LoadCosts | None = None
    engine: EngineCosts | None = None
    reward: RewardCosts | None = None
    trainer: TrainerCosts | None = None
    checkpoint: CheckpointCosts | None = None
