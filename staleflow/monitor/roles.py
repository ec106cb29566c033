"""Describe the activity of each process in a few words. No IO."""

from collections.abc import Mapping, Set
from dataclasses import dataclass

from staleflow.monitor.words import plural, worker_name
from staleflow.protocols.wire.messages import ParametersStatus, SchedulerStatus
from staleflow.protocols.wire.messages.status import InstanceStatus
from staleflow.store.base import FULL_SHARE
from staleflow.store.disk_errors import trouble
from staleflow.supervisor.view import ProcessState, Snapshot

Engines = Mapping[str, InstanceStatus]
"""Engines of the status by name."""

SILENCE_TIMEOUT_S = 3.0
"""Seconds without a message after which a scheduler or worker is shown as silent."""
NOT_STAGES = ("rollout", "trainer", "scheduler", "trajectories", "parameters", "relay", "model")
"""Name prefixes of processes that are not stage workers; a stage may have any other name."""
WORKERS = ("rollout", "stage", "trainer")
MIN_SHOWN_SHARE = 0.1
"""Used share of a trajectory server's map from which it is shown."""
GROUP_STATES = ("leased", "pushed", "occupied", "sealed", "consumed")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRow:
    """One process and its activity."""

    name: str
    doing: str
    good: bool = True
    restarts: int = 0

    @property
    def text(self) -> str:
        """Text that a filter searches."""
        return f"{self.name} {self.doing}"


def roles(snapshot: Snapshot) -> tuple[RoleRow, ...]:
    """One row a process; those that only the scheduler knows (attached by hand) come last."""
    attached = {worker.name for worker in snapshot.status.workers}
    engines = {engine.name: engine for engine in snapshot.status.instances}
    rows = [_process_row(process, snapshot, attached, engines) for process in snapshot.processes]
    supervised = {process.name for process in snapshot.processes}
    for worker in snapshot.status.workers:
        if worker.name in supervised or worker.role in ("admin", "monitor"):
            continue
        name, seen_s = worker.name, worker.last_seen_s
        good = seen_s < SILENCE_TIMEOUT_S
        doing = _doing(name, worker.role, snapshot, engines) if good else f"silent for {seen_s:.0f} s"
        rows.append(RoleRow(name=name, doing=doing, good=good))
    return tuple(rows)


def _process_row(process: ProcessState, snapshot: Snapshot, attached: Set[str], engines: Engines) -> RoleRow:
    if process.state != "running":
        good = process.state == "ended" and snapshot.phase in ("draining", "finishing")
        return RoleRow(name=process.name, doing=process.state, good=good, restarts=process.restarts)
    role = role_of(process.name)
    if role == "model":
        doing = snapshot.detail or "loading"
    elif role in WORKERS and not process.attaches:
        doing = "running"
    elif role in ("rollout", "stage") and process.name not in attached:
        doing = "done" if snapshot.status.finished else "loading"
    else:
        doing = _doing(process.name, role, snapshot, engines)
    if doing == "loading" and process.doing:
        doing = f"loading: {process.doing}"
    return RoleRow(name=process.name, doing=doing, restarts=process.restarts)


def role_of(name: str) -> str:
    """Return the role of a process from the name that the supervisor gave it."""
    stem = name.partition("-")[0]
    return stem if stem in NOT_STAGES else "stage"


def _doing(name: str, role: str, snapshot: Snapshot, engines: Engines) -> str:
    status = snapshot.status
    match role:
        case "rollout":
            return _rollout(engines.get(name))
        case "stage":
            waiting = _staged(name, status)
            return f"judging, {plural(waiting, 'group')} to go" if waiting else "waits for groups"
        case "trainer":
            return _trainer(status)
        case "scheduler":
            return _scheduler(status)
        case "trajectories":
            return _trajectories(name, status)
        case "parameters":
            return _parameters(status, snapshot.parameters)
        case "relay":
            return _relay(name, snapshot.parameters)
        case _:
            return "running"


def _parameters(status: SchedulerStatus, parameters: ParametersStatus) -> str:
    serves = f"serves version {status.version}" if status.version >= 0 else "waits for version 0"
    return f"{serves}; the mirror is behind: {parameters.mirror}" if parameters.mirror else serves


def _relay(name: str, parameters: ParametersStatus) -> str:
    """Describe a relay by its number of readers, if the parameter server's status contains it."""
    places = [place for place in parameters.relays if worker_name(place.relay) == name]
    below = places[-1].num_below if places else 0
    return f"serves weights to {plural(below, 'reader')}" if below else "serves weights"


def _trajectories(name: str, status: SchedulerStatus) -> str:
    number, every = name.partition("-")[2], status.shards
    shards = [shard for shard in every if str(shard.shard) == number]
    stored = plural(sum(groups_in(status, state) for state in GROUP_STATES[1:4]), "group")
    kept = (
        f"stores {stored} to train" if len(every) < 2 else "stores its part of the groups"
    )  # the ledger has no counts per shard
    share = next((shard.used_share or 0.0 for shard in shards), 0.0)
    if unwritable := [shard.full for shard in shards if shard.full not in ("", "map")]:
        return f"its {trouble(unwritable[0])}: pushes wait; {kept}"
    if share >= FULL_SHARE or any(shard.full for shard in shards):
        return f"full: pushes wait until a checkpoint frees space; {kept}"
    return f"{kept}, {100 * share:.0f} % full" if share >= MIN_SHOWN_SHARE else kept


def _staged(name: str, status: SchedulerStatus) -> int:
    """Return the number of groups that wait for the stage of this worker or are being processed by it."""
    stem = name.partition("-")[0]
    return sum(stage.waiting + stage.taken for stage in status.stages if stage.stage == stem)


def _rollout(it: InstanceStatus | None) -> str:
    if it is None:
        return "waits for the first command"
    if it.version < 0:
        return "waits for weights"
    queued = f", {it.waiting} queued" if it.waiting else ""
    load = f"{it.running} decoding{queued}" if it.running or it.waiting else "idle"
    return f"version {it.version}, {load}, {it.tokens_per_s:,.0f} tokens/s"


def _trainer(status: SchedulerStatus) -> str:
    if status.finished or status.trained:
        return "done"
    if not status.trainer_term:
        return "loading"
    if status.version < 0:
        return "publishing version 0"
    if status.version >= status.steps > 0:
        return "judging held-out prompts"
    sealed = groups_in(status, "sealed") and not status.trainer_waits
    return f"trains step {status.version}" if sealed else f"waits for the batch of step {status.version}"


def _scheduler(status: SchedulerStatus) -> str:
    if not status.answered:
        return "starting"
    return f"{plural(groups_in(status, 'leased'), 'lease')} out, {plural(len(status.instances), 'engine')}"


def groups_in(status: SchedulerStatus, state: str) -> int:
    """Return the number of groups in a state of the ledger; 0 without a ledger."""
    return status.ledger.get(state, 0)
