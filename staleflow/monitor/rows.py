"""Build the rows of each panel from the scheduler's status. No IO; missing values are left out or shown empty."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from staleflow.monitor.events import describe
from staleflow.monitor.history import History
from staleflow.monitor.roles import groups_in
from staleflow.monitor.words import worker_name
from staleflow.servers.scheduler.coordination.sentences import Hold, restricted

Status = Mapping[str, Any]


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


def ages(status: Status) -> tuple[AgeRow, ...]:
    """Return a row for each age from 0 to the bound, and beyond it if the token bound admits older groups."""
    spread: Mapping[str, Iterable[tuple[int, int]]] = status.get("staleness") or {}
    by_age = [Counter(dict(spread.get(key, ()))) for key in ("in_flight", "in_queue", "consumed")]
    if not spread:
        return ()
    last = max([int(status.get("max_staleness") or 0), *(age for counts in by_age for age in counts if counts[age])])
    return tuple(
        AgeRow(age=age, in_flight=flight[age], in_queue=queue[age], consumed=consumed[age])
        for flight, queue, consumed in (by_age,)
        for age in range(last + 1)
    )


def window(status: Status) -> tuple[WindowRow, ...]:
    """Return the window's rows: sealed batches first, then deadlines in ascending order."""
    size, version = int(status.get("batch_size") or 1), int(status.get("version", -1))
    step, bound = int(status.get("next_step") or 0), int(status.get("max_staleness") or 0)
    found = [
        WindowRow(deadline=sealed, occupied=size, sealed="trains" if sealed == version else "sealed")
        for sealed in range(max(version, 0), step)
    ]
    token = status.get("bound") == "token"
    pinning = Counter(int(pin["version"]) + bound for pin in _pins(status))
    total = groups_in(status, "claimed")
    for row in status.get("window") or ():
        deadline = int(row.get("deadline") or 0)
        leased, pushed, occupied = (int(row.get(key) or 0) for key in ("leased", "pushed", "occupied"))
        total += leased + pushed + occupied
        last = version + bound if token else deadline
        found.append(
            WindowRow(
                deadline=last,
                leased=leased,
                pushed=pushed,
                occupied=occupied,
                pinning=pinning[deadline],
                total=total,
                room=size * max(last - step + 1, 0),
            )
        )
    return tuple(found)


def instances(status: Status, history: History) -> tuple[InstanceRow, ...]:
    """Return the engines in the order in which they attached."""
    newest = int(status.get("version", -1))
    inflight = int(status.get("max_inflight") or 0)
    found: list[InstanceRow] = []
    for it in status.get("instances") or ():
        worker = str(it.get("worker") or it.get("name"))
        version = int(it.get("version", -1))
        kv = it.get("kv_used")
        found.append(
            InstanceRow(
                worker=worker,
                name=str(it.get("name") or worker),
                version=version,
                behind=max(newest - version, 0) if version >= 0 else 0,
                loading=it.get("loading"),
                running=int(it.get("running") or 0),
                slots=int(it.get("slots") or inflight),
                waiting=int(it.get("waiting") or 0),
                kv_used=None if kv is None else float(kv),
                tokens_per_s=float(it.get("tokens_per_s") or 0.0),
                spark=tuple(history.sparks.get(worker, ())),
                held=int(it.get("held") or 0),
                command=_held(it) or str(it.get("last_command") or ""),
                seen_s=float(it.get("last_seen_s") or 0.0),
            )
        )
    return tuple(found)


def _held(instance: Mapping[str, Any]) -> str:
    """Describe an instance that is on hold or on trial because its groups failed; empty otherwise."""
    failed = instance.get("failed")
    if not failed:
        return ""
    held_s = float(failed["held_s"])
    return f"held {held_s:.0f} s: {failed['groups']} failed" if held_s else f"on trial: {failed['groups']} failed"


def stages(status: Status) -> tuple[StageRow, ...]:
    """Return every stage of the run in configuration order."""
    return tuple(
        StageRow(
            name=str(stage["stage"]),
            after=tuple(stage.get("after") or ()),
            workers=int(stage.get("workers") or 0),
            waiting=int(stage.get("waiting") or 0),
            taken=int(stage.get("taken") or 0),
            under_way=int(stage.get("calls_under_way") or 0),
            calls=int(stage.get("calls") or 0),
            failing=len(stage.get("failing") or ()),
        )
        for stage in status.get("stages") or ()
    )


def versions(status: Status, parameters: Mapping[str, Any]) -> tuple[VersionRow, ...]:
    """Return the versions, newest first: those of the parameter server, and those that only engines still have."""
    engines = Counter(int(it.get("version", -1)) for it in status.get("instances") or ())
    kept: dict[int, VersionRow] = {}
    for it in parameters.get("versions") or ():
        version = int(it["version"])
        note = "damaged" if it.get("corrupt") else "" if it.get("registered") else "being published"
        kept[version] = VersionRow(
            version=version,
            lineage=int(it.get("lineage") or 0),
            nbytes=int(it.get("nbytes") or 0),
            engines=engines[version],
            pinned_by=tuple(worker_name(str(name)) for name in it.get("pinned_by") or ()),
            note=note,
        )
    newest = int(status.get("version", -1))
    for version in {newest, *engines} - {-1, *kept}:
        kept[version] = VersionRow(
            version=version,
            lineage=int(status.get("lineage") or 0),
            nbytes=None,
            engines=engines[version],
            pinned_by=(),
            note="newest" if version == newest else "",
        )
    return tuple(kept[version] for version in sorted(kept, reverse=True))


def pins(status: Status) -> tuple[PinRow, ...]:
    """Return the pinning groups that the status contains."""
    pinned: Status = status.get("pinned") or {}
    step = int(pinned.get("step") or 0)
    return tuple(
        PinRow(
            group=int(pin["group"]),
            step=step,
            version=int(pin["version"]),
            where=str(pin.get("worker") or "") or _stages(pin.get("stages") or ()),
            so_far_s=pin.get("so_far_s"),
            left_s=pin.get("left_s"),
        )
        for pin in _pins(status)
    )


def _stages(names: Sequence[str]) -> str:
    return f"stage {' and '.join(names)}" if names else "its stages"


def events(status: Status, unix_s: float) -> tuple[EventRow, ...]:
    """Return the events, newest first.

    Current conditions precede them: stage workers and engines that fail every group, stages and environments that limit
    the run.
    """
    found: list[EventRow] = []
    for stage in status.get("stages") or ():
        for one in stage.get("failing") or ():
            failed = f"{worker_name(str(one['worker']))} fails every group of the stage {stage['stage']}"
            words = f"{failed}, {one['failures']} in a row, and is held: {one['why']}"
            found.append(EventRow(ago_s=int(one["failing_ms"]) / 1000, words=words, tone="bad"))
        if stage.get("limit"):
            found.append(EventRow(ago_s=None, words=str(stage["limit"]), tone="warn"))
    for instance in status.get("instances") or ():
        if failed := instance.get("failed"):
            hold = Hold(
                worker=instance["name"], left_s=failed["held_s"], failed=failed["groups"], detail=failed["detail"]
            )
            found.append(EventRow(ago_s=None, words=restricted([hold]), tone="bad"))
        if instance.get("limit"):
            found.append(EventRow(ago_s=None, words=str(instance["limit"]), tone="warn"))
    for line in reversed(status.get("recent") or ()):
        words, tone = describe(line)
        ago_s = max(unix_s - line["t"] / 1e9, 0.0) if unix_s else None
        found.append(EventRow(ago_s=ago_s, words=words, tone=tone))
    return tuple(found)


def _pins(status: Status) -> Iterable[Mapping[str, Any]]:
    pinned: Status = status.get("pinned") or {}
    return pinned.get("groups") or ()
