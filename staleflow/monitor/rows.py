"""Build the rows of each panel from the scheduler's status. No IO; missing values are left out or shown empty."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from staleflow.monitor.events import describe
from staleflow.monitor.history import History
from staleflow.monitor.roles import groups_in
from staleflow.monitor.words import worker_name
from staleflow.protocols.wire.messages import ParametersStatus, SchedulerStatus
from staleflow.protocols.wire.messages.status import Hold
from staleflow.servers.scheduler.status.sentences import restricted


@dataclass(frozen=True, slots=True, kw_only=True)
class AgeRow:
    """Groups that are ``age`` versions behind."""

    age: int
    in_flight: int
    in_queue: int
    consumed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRow:
    """The groups with one deadline, or the sealed batch of one step."""

    deadline: int
    leased: int = 0
    pushed: int = 0
    occupied: int = 0
    pinning: int = 0
    """Number of these groups that keep the next step from being sealed."""
    total: int = 0
    """Number of groups with this deadline or an earlier one."""
    room: int = 0
    """Number of groups that the bound admits up to this deadline."""
    sealed: str = ""
    """State of the batch: trains or sealed; empty if it is not sealed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceRow:
    """One engine."""

    worker: str
    name: str
    version: int
    behind: int
    """Number of versions behind the newest one."""
    loading: int | None
    running: int
    slots: int
    waiting: int
    kv_used: float | None
    tokens_per_s: float
    spark: tuple[float, ...]
    held: int
    command: str
    seen_s: float

    @property
    def text(self) -> str:
        """Text that a filter searches."""
        return f"{self.name} {self.command}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """One stage with its waiting groups and its groups in progress."""

    name: str
    after: tuple[str, ...]
    workers: int
    waiting: int
    taken: int
    under_way: int = 0
    calls: int = 0
    """Concurrent calls of user code, and their maximum; 0 if unknown."""
    failing: int = 0
    """Number of workers that fail every group."""

    @property
    def full(self) -> bool:
        """True if the maximum of concurrent calls is reached."""
        return 0 < self.calls <= self.under_way

    @property
    def text(self) -> str:
        """Text that a filter searches."""
        return self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRow:
    """One version that the parameter server stores or that an engine has loaded."""

    version: int
    lineage: int
    nbytes: int | None
    engines: int
    """Number of engines that have it loaded."""
    pinned_by: tuple[str, ...]
    note: str = ""

    @property
    def text(self) -> str:
        """Text that a filter searches."""
        return f"{self.version} {' '.join(self.pinned_by)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PinRow:
    """One group that keeps the next step from being sealed."""

    group: int
    step: int
    version: int
    where: str
    so_far_s: float | None
    left_s: float | None

    @property
    def text(self) -> str:
        """Text that a filter searches."""
        return f"{self.group} {self.where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRow:
    """One event in the list."""

    ago_s: float | None
    words: str
    tone: str

    @property
    def text(self) -> str:
        """Text that a filter searches."""
        return self.words


def ages(status: SchedulerStatus) -> tuple[AgeRow, ...]:
    """Return a row for each age from 0 to the bound, and beyond it if the token bound admits older groups."""
    spread = status.staleness
    flight, queue, consumed = (Counter(dict(groups)) for groups in (spread.in_flight, spread.in_queue, spread.consumed))
    if not status.answered:
        return ()
    last = max([status.max_staleness, *(age for counts in (flight, queue, consumed) for age in counts if counts[age])])
    return tuple(
        AgeRow(age=age, in_flight=flight[age], in_queue=queue[age], consumed=consumed[age]) for age in range(last + 1)
    )


def window(status: SchedulerStatus) -> tuple[WindowRow, ...]:
    """Return the window's rows: sealed batches first, then deadlines in ascending order."""
    size, version, step, bound = status.batch_size, status.version, status.next_step, status.max_staleness
    result = [
        WindowRow(deadline=sealed, occupied=size, sealed="trains" if sealed == version else "sealed")
        for sealed in range(max(version, 0), step)
    ]
    pinning = Counter(pin.version + bound for pin in status.pinned.groups)
    total = groups_in(status, "claimed")
    for row in status.window:
        total += row.leased + row.pushed + row.occupied
        last = version + bound if status.bound == "token" else row.deadline
        result.append(
            WindowRow(
                deadline=last,
                leased=row.leased,
                pushed=row.pushed,
                occupied=row.occupied,
                pinning=pinning[row.deadline],
                total=total,
                room=size * max(last - step + 1, 0),
            )
        )
    return tuple(result)


def instances(status: SchedulerStatus, history: History) -> tuple[InstanceRow, ...]:
    """Return the engines in the order in which they attached."""
    return tuple(
        InstanceRow(
            worker=it.worker,
            name=it.name or it.worker,
            version=it.version,
            behind=max(status.version - it.version, 0) if it.version >= 0 else 0,
            loading=it.loading,
            running=it.running,
            slots=it.slots,
            waiting=it.waiting,
            kv_used=it.kv_used,
            tokens_per_s=it.tokens_per_s,
            spark=tuple(history.sparks.get(it.worker, ())),
            held=it.held,
            command=_held(it.failed) or (f"plays {it.evaluation}" if it.evaluation else it.last_command),
            seen_s=it.last_seen_s,
        )
        for it in status.instances
    )


def _held(hold: Hold | None) -> str:
    """Describe an instance that is on hold or on trial because its groups failed; empty otherwise."""
    if hold is None:
        return ""
    state = f"held {hold.held_s:.0f} s" if hold.held_s else "on trial"
    return f"{state}: {hold.groups} failed"


def stages(status: SchedulerStatus) -> tuple[StageRow, ...]:
    """Return every stage of the run in configuration order."""
    return tuple(
        StageRow(
            name=stage.stage,
            after=stage.after,
            workers=stage.workers,
            waiting=stage.waiting,
            taken=stage.taken,
            under_way=stage.calls_under_way,
            calls=stage.calls,
            failing=len(stage.failing),
        )
        for stage in status.stages
    )


def versions(status: SchedulerStatus, parameters: ParametersStatus) -> tuple[VersionRow, ...]:
    """Return the versions, newest first: those of the parameter server, and those that only engines still have."""
    engines, newest = Counter(instance.version for instance in status.instances), status.version
    kept = {
        stored.version: VersionRow(
            version=stored.version,
            lineage=stored.lineage,
            nbytes=stored.nbytes,
            engines=engines[stored.version],
            pinned_by=tuple(map(worker_name, stored.pinned_by)),
            note="damaged" if stored.corrupt else "" if stored.registered else "being published",
        )
        for stored in parameters.versions
    }
    for version in {newest, *engines} - {-1, *kept}:
        kept[version] = VersionRow(
            version=version,
            lineage=status.lineage,
            nbytes=None,
            engines=engines[version],
            pinned_by=(),
            note="newest" if version == newest else "",
        )
    return tuple(kept[version] for version in sorted(kept, reverse=True))


def pins(status: SchedulerStatus) -> tuple[PinRow, ...]:
    """Return the pinning groups that the status contains."""
    return tuple(
        PinRow(
            group=pin.group,
            step=status.pinned.step,
            version=pin.version,
            where=pin.worker or _stages(pin.stages),
            so_far_s=pin.so_far_s,
            left_s=pin.left_s,
        )
        for pin in status.pinned.groups
    )


def _stages(names: Sequence[str]) -> str:
    return f"stage {' and '.join(names)}" if names else "its stages"


def events(status: SchedulerStatus, unix_s: float) -> tuple[EventRow, ...]:
    """Return the events, newest first.

    Current conditions precede them: stage workers and engines that fail every group, stages and environments that limit
    the run.
    """
    result: list[EventRow] = []
    for stage in status.stages:
        for one in stage.failing:
            failed = f"{worker_name(one.worker)} fails every group of the stage {stage.stage}"
            words = f"{failed}, {one.failures} in a row, and is held: {one.why}"
            result.append(EventRow(ago_s=one.failing_ms / 1000, words=words, tone="bad"))
        if stage.limit:
            result.append(EventRow(ago_s=None, words=stage.limit, tone="warn"))
    for instance in status.instances:
        if instance.failed is not None:
            words = restricted({instance.name: instance.failed})
            result.append(EventRow(ago_s=None, words=words, tone="bad"))
        if instance.limit:
            result.append(EventRow(ago_s=None, words=instance.limit, tone="warn"))
    for line in reversed(status.recent):
        words, tone = describe(line)
        ago_s = max(unix_s - line["t"] / 1e9, 0.0) if unix_s else None
        result.append(EventRow(ago_s=ago_s, words=words, tone=tone))
    return tuple(result)
