"""Turn snapshots into the model of the screen. No IO.

``History`` keeps state across snapshots; ``Board`` is the complete input of the panels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from staleflow.monitor import rows
from staleflow.monitor.history import History
from staleflow.monitor.roles import GROUP_STATES, SILENCE_TIMEOUT_S, RoleRow, groups_in, roles
from staleflow.monitor.rows import AgeRow, EventRow, InstanceRow, PinRow, StageRow, VersionRow, WindowRow
from staleflow.process.sanitize import printable
from staleflow.protocols.wire.messages import SchedulerStatus
from staleflow.supervisor.view import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A resource with a limit, and its use."""

    name: str
    used: float
    full: float
    unit: str

    @property
    def share(self) -> float:
        return self.used / self.full if self.full else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """Everything on the screen. ``staleflow top --json`` prints these fields."""

    name: str
    phase: str
    elapsed_s: float
    step: int
    steps: int
    left_s: float | None
    reward: float | None
    rewards: tuple[float, ...]
    """Rewards of the last steps, for a curve."""
    loss: float | None
    losses: tuple[float, ...]
    held_out: tuple[float, float] | None
    """First and last held-out reward."""
    staleness_mean: float | None
    staleness_max: int | None
    bound: int | None
    bound_of: str
    policy: str
    masked: float | None
    """Token bound: share of the last step's tokens that were context only."""
    violations: int
    ages: tuple[AgeRow, ...]
    trained_per_s: float
    generated_per_s: float
    generated: tuple[float, ...]
    """Tokens per second of all engines, for a curve."""
    groups: tuple[tuple[str, int], ...]
    window: tuple[WindowRow, ...]
    batch_size: int
    roles: tuple[RoleRow, ...]
    instances: tuple[InstanceRow, ...]
    stages: tuple[StageRow, ...]
    versions: tuple[VersionRow, ...]
    pins: tuple[PinRow, ...]
    events: tuple[EventRow, ...]
    """Newest first."""
    trainer: str
    """Current activity of the trainer."""
    trainer_time: tuple[tuple[str, float], ...]
    """Shares of the trainer's last minute: ``trains``, the cause of a wait as in ``trainer_waits`` of the status, or a
    stall with a batch: ``publish``, ``checkpoint``, ``eval``."""
    step_times: tuple[tuple[str, float], ...]
    """Seconds of the last step and of its parts, from the trainer's metrics."""
    limits: tuple[Limit, ...]
    why: str
    advice: str
    """Recommended change of the engines; empty if there is none."""
    waits: bool
    """True if the trainer waits or the scheduler is silent."""
    insecure: bool = False
    heard: bool = True
    """True once the scheduler has answered."""


def board(name: str, snapshot: Snapshot, history: History) -> Board:
    """Return the board for a snapshot, which must have been added to ``history`` before."""
    status = snapshot.status
    instances = rows.instances(status, history)
    steps = status.steps
    return Board(
        name=printable(name),
        phase=_phase(snapshot),
        elapsed_s=snapshot.elapsed_s,
        step=max(status.version, 0),
        steps=steps,
        left_s=history.left_s(steps),
        reward=_newest(history.rewards),
        rewards=history.curve(history.rewards),
        loss=_newest(history.losses),
        losses=history.curve(history.losses),
        held_out=_first_and_last(history.held_out),
        staleness_mean=history.staleness_mean,
        staleness_max=history.staleness_max,
        bound=status.max_staleness if status.answered else None,
        bound_of=status.bound,
        policy=status.on_overdue,
        masked=history.masked,
        violations=status.violations,
        ages=rows.ages(status),
        trained_per_s=history.trained_per_s,
        generated_per_s=sum(instance.tokens_per_s for instance in instances),
        generated=tuple(history.generated),
        groups=tuple((state, groups_in(status, state)) for state in GROUP_STATES),
        window=rows.window(status),
        batch_size=status.batch_size,
        roles=roles(snapshot),
        instances=instances,
        stages=rows.stages(status),
        versions=rows.versions(status, snapshot.parameters),
        pins=rows.pins(status),
        events=rows.events(status, snapshot.unix_s),
        trainer=_trainer(status),
        trainer_time=history.trainer_time(),
        step_times=history.step_times,
        limits=_limits(status, instances, history),
        why=_why(snapshot),
        advice=_advice(snapshot),
        waits=bool(status.trainer_waits) or _silent(snapshot),
        insecure=status.security == "insecure",
        heard=status.answered,
    )


def _limits(status: SchedulerStatus, instances: Sequence[InstanceRow], history: History) -> tuple[Limit, ...]:
    """Return the use of engine slots, of the admission window, of the trainer's time, and of generated tokens."""
    limits: list[Limit] = []
    if slots := sum(instance.slots for instance in instances):
        running = sum(instance.running for instance in instances)
        limits.append(Limit(name="engines", used=running, full=slots, unit="samples decode"))
    if window := rows.window(status):
        live = sum(row.leased + row.pushed + row.occupied for row in window if not row.sealed)
        limits.append(Limit(name="window", used=live, full=max(row.room for row in window), unit="groups admitted"))
    if time := dict(history.trainer_time()):
        limits.append(Limit(name="trainer", used=time.get("trains", 0.0), full=1.0, unit=""))
    totals = status.totals
    if (generated := totals.tokens_generated or totals.tokens_pushed) > 0:
        limits.append(Limit(name="tokens", used=totals.tokens_trained, full=generated, unit="trained"))
    return tuple(limits)


def _trainer(status: SchedulerStatus) -> str:
    if status.finished or status.trained:
        return "done"
    if not status.trainer_term:
        return "not attached"
    if status.version < 0:
        return "publishes version 0"
    return f"step {status.version} {'waits' if status.trainer_waits else 'trains'}"


def _phase(snapshot: Snapshot) -> str:
    over = snapshot.status.finished and snapshot.phase in ("training", "running")
    return "finished" if over else snapshot.phase


def _newest(values: Mapping[int, float]) -> float | None:
    return values[max(values)] if values else None


def _first_and_last(values: Mapping[int, float]) -> tuple[float, float] | None:
    return (values[min(values)], values[max(values)]) if values else None


def _silent(snapshot: Snapshot) -> bool:
    return snapshot.status.answered and snapshot.status_age_s > SILENCE_TIMEOUT_S


def _advice(snapshot: Snapshot) -> str:
    recommendation = snapshot.status.recommendation
    return "" if snapshot.ended or snapshot.status.finished or not recommendation.count else recommendation.sentence


def _why(snapshot: Snapshot) -> str:
    if snapshot.ended:
        return snapshot.ended
    if _silent(snapshot):
        return f"the scheduler has not answered for {snapshot.status_age_s:.0f} s"
    return snapshot.status.error or snapshot.status.why
