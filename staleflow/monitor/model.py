"""From the supervisor's snapshot to what stands on the screen. Pure: values in, words and numbers out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from staleflow.supervisor.view import ProcessState, Snapshot

SILENT_S = 3.0
NOT_STAGES = ("rollout", "trainer", "scheduler", "trajectories", "parameters", "relay", "model")
"""Names of processes that are no worker of a stage: a stage may have any other."""
"""A scheduler or worker not heard from for this long is said to be silent."""
GROUP_STATES = ("leased", "pushed", "occupied", "sealed", "consumed")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRow:
    """One process: what it does, in a few words."""

    name: str
    doing: str
    good: bool = True
    restarts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRow:
    """The groups that may train up to one step."""

    deadline: int
    leased: int
    pushed: int
    occupied: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """Everything on the screen."""

    name: str
    phase: str
    elapsed_s: float
    step: int
    steps: int
    left_s: float | None
    reward: float | None
    rewards: tuple[float, ...]
    """Of the last steps, for a curve."""
    held_out: tuple[float, float] | None
    """First and last."""
    staleness_mean: float | None
    staleness_max: int | None
    bound: int | None
    bound_of: str
    violations: int
    trained_per_s: float
    generated_per_s: float
    groups: tuple[tuple[str, int], ...]
    window: tuple[WindowRow, ...]
    batch_size: int
    roles: tuple[RoleRow, ...]
    why: str
    insecure: bool = False


@dataclass(slots=True)
class History:
    """What one look cannot tell: curves and rates. Fed with every snapshot."""

    rewards: dict[int, float] = field(default_factory=dict[int, float])
    first_eval: float | None = None
    last_eval: float | None = None
    steps: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """(elapsed seconds, version), once a version."""
    staleness_mean: float | None = None
    """Of the last step."""
    staleness_max: int | None = None
    """Of all steps seen."""
    trained_per_s: float = 0.0

    def see(self, snapshot: Snapshot) -> None:
        """Takes in one snapshot."""
        newest: Mapping[str, Any] = snapshot.status.get("metrics") or {}
        for line in (*snapshot.lines, newest):
            self.line(line)
        version = int(snapshot.status.get("version", -1))
        if version >= 0 and (not self.steps or version > self.steps[-1][1]):
            self.steps.append((snapshot.elapsed_s, version))

    def line(self, line: Mapping[str, Any]) -> None:
        """Takes in one line of ``metrics.jsonl``."""
        if (reward := line.get("reward/mean")) is not None:
            self.rewards[int(line.get("step", 0))] = float(reward)
        if (held_out := line.get("reward/eval")) is not None:
            self.last_eval = float(held_out)
            self.first_eval = self.last_eval if self.first_eval is None else self.first_eval
        if (most := line.get("off_policy/max")) is not None:
            self.staleness_mean = line.get("off_policy/mean")
            self.staleness_max = max(int(most), self.staleness_max or 0)
            self.trained_per_s = float(line.get("perf/tokens_per_second") or 0.0)

    def left_s(self, steps: int, window: int = 20) -> float | None:
        """Seconds until the last step at the pace of the last ones; None before there is a pace."""
        seen = self.steps[-window - 1 :]
        if len(seen) < 3:
            return None
        (began, first), (now, last) = seen[0], seen[-1]
        return (steps - last) * (now - began) / (last - first)


def board(name: str, snapshot: Snapshot, history: History) -> Board:
    """What to show now. ``history`` has seen the snapshot."""
    status = snapshot.status
    instances: Sequence[Mapping[str, Any]] = status.get("instances") or ()
    steps = int(status.get("steps", 0))
    newest = max(history.rewards, default=None)
    return Board(
        name=name,
        phase=_phase(snapshot),
        elapsed_s=snapshot.elapsed_s,
        step=max(int(status.get("version", 0)), 0),
        steps=steps,
        left_s=history.left_s(steps),
        reward=None if newest is None else history.rewards[newest],
        rewards=tuple(history.rewards[step] for step in sorted(history.rewards)[-40:]),
        held_out=_pair(history.first_eval, history.last_eval),
        staleness_mean=history.staleness_mean,
        staleness_max=history.staleness_max,
        bound=status.get("max_staleness"),
        bound_of=str(status.get("bound", "")),
        violations=_count(status.get("violations")),
        trained_per_s=history.trained_per_s,
        generated_per_s=sum(float(instance.get("tokens_per_s") or 0.0) for instance in instances),
        groups=tuple((state, _groups(status, state)) for state in GROUP_STATES),
        window=tuple(_window_row(row) for row in status.get("window") or ()),
        batch_size=int(status.get("batch_size") or 1),
        roles=roles(snapshot),
        why=_why(snapshot),
        insecure=status.get("security") == "insecure",
    )


def _groups(status: Mapping[str, Any], state: str) -> int:
    ledger: Mapping[str, int] = status.get("ledger") or {}
    return int(ledger.get(state) or 0)


def _phase(snapshot: Snapshot) -> str:
    return "finished" if snapshot.status.get("finished") and snapshot.phase == "training" else snapshot.phase


def _pair(first: float | None, last: float | None) -> tuple[float, float] | None:
    return None if first is None or last is None else (first, last)


def _count(value: object) -> int:
    return len(value) if isinstance(value, list) else int(str(value or 0))  # pyright: ignore[reportUnknownArgumentType]


def _window_row(row: Mapping[str, Any]) -> WindowRow:
    leased, pushed, occupied = (int(row.get(key) or 0) for key in ("leased", "pushed", "occupied"))
    return WindowRow(deadline=int(row.get("deadline") or 0), leased=leased, pushed=pushed, occupied=occupied)


def _why(snapshot: Snapshot) -> str:
    if snapshot.status and snapshot.status_age_s > SILENT_S:
        return f"the scheduler has not answered for {snapshot.status_age_s:.0f} s"
    return str(snapshot.status.get("error") or snapshot.status.get("why") or "")


def roles(snapshot: Snapshot) -> tuple[RoleRow, ...]:
    """One row a process; those that only the scheduler knows (attached by hand) come last."""
    rows = [_process_row(process, snapshot) for process in snapshot.processes]
    known = {process.name for process in snapshot.processes}
    for worker in snapshot.status.get("workers") or ():
        if worker.get("name") in known or worker.get("role") in ("admin", "monitor"):
            continue
        seen = float(worker.get("last_seen_s") or 0.0)
        name = str(worker.get("name"))
        good = seen < SILENT_S
        doing = _doing(name, str(worker.get("role")), snapshot.status) if good else f"silent for {seen:.0f} s"
        rows.append(RoleRow(name=name, doing=doing, good=good))
    return tuple(rows)


def _process_row(process: ProcessState, snapshot: Snapshot) -> RoleRow:
    if process.state != "running":
        good = process.state == "ended" and snapshot.phase in ("draining", "finishing")
        return RoleRow(name=process.name, doing=process.state, good=good, restarts=process.restarts)
    role = role_of(process.name)
    if role == "model":
        doing = snapshot.detail or "loading"
    elif role in ("rollout", "stage") and not _attached(process.name, snapshot.status):
        doing = "done" if snapshot.status.get("finished") else "loading"
    else:
        doing = _doing(process.name, role, snapshot.status)
    return RoleRow(name=process.name, doing=doing, restarts=process.restarts)


def _attached(name: str, status: Mapping[str, Any]) -> bool:
    return any(worker.get("name") == name for worker in status.get("workers") or ())


def role_of(name: str) -> str:
    """The role behind a name that the supervisor gave."""
    stem = name.partition("-")[0]
    return stem if stem in NOT_STAGES else "stage"


def _doing(name: str, role: str, status: Mapping[str, Any]) -> str:
    match role:
        case "rollout":
            return _rollout(name, status)
        case "stage":
            waiting = _staged(name, status)
            return f"judging, {_plural(waiting, 'group')} to go" if waiting else "waits for groups"
        case "trainer":
            return _trainer(status)
        case "scheduler":
            return _scheduler(status)
        case "trajectories":
            return f"keeps {_plural(sum(_groups(status, state) for state in GROUP_STATES[1:4]), 'group')} to train"
        case "parameters":
            version = int(status.get("version", -1))
            return f"serves version {version}" if version >= 0 else "waits for version 0"
        case _:
            return "running"


def _staged(name: str, status: Mapping[str, Any]) -> int:
    """Groups that wait for the stage of this worker or are in it."""
    stem = name.partition("-")[0]
    found = [stage for stage in status.get("stages") or () if stage.get("stage") == stem]
    return sum(int(stage.get("waiting", 0)) + int(stage.get("taken", 0)) for stage in found)


def _rollout(name: str, status: Mapping[str, Any]) -> str:
    found = [instance for instance in status.get("instances") or () if instance.get("name") == name]
    if not found:
        return "waits for the first command"
    it = found[0]
    if int(it.get("version", -1)) < 0:
        return "waits for weights"
    running, waiting = int(it.get("running") or 0), int(it.get("waiting") or 0)
    load = f"{running} decoding" + (f", {waiting} queued" if waiting else "") if running or waiting else "idle"
    return f"version {it['version']}, {load}, {float(it.get('tokens_per_s') or 0):,.0f} tokens/s"


def _trainer(status: Mapping[str, Any]) -> str:
    if status.get("finished"):
        return "done"
    if not status.get("trainer_term"):
        return "loading"
    version = int(status.get("version", -1))
    if version < 0:
        return "publishing version 0"
    if version >= int(status.get("steps") or 0) > 0:
        return "judging held-out prompts"
    sealed = _groups(status, "sealed")
    return f"trains step {version}" if sealed else f"waits for the batch of step {version}"


def _scheduler(status: Mapping[str, Any]) -> str:
    if not status:
        return "starting"
    leased = _groups(status, "leased")
    return f"{_plural(leased, 'lease')} out, {_plural(len(status.get('instances') or ()), 'engine')}"


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
