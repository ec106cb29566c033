"""Describe the activity of each process in a few words. No IO."""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from staleflow.monitor.words import plural, worker_name
from staleflow.store.base import FULL_SHARE
from staleflow.store.disk_errors import trouble
from staleflow.supervisor.view import ProcessState, Snapshot

Engines = Mapping[str, Mapping[str, Any]]
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
    attached = {str(worker.get("name")) for worker in snapshot.status.get("workers") or ()}
    engines = {str(engine.get("name")): engine for engine in snapshot.status.get("instances") or ()}
    rows = [_process_row(process, snapshot, attached, engines) for process in snapshot.processes]
    supervised = {process.name for process in snapshot.processes}
    for worker in snapshot.status.get("workers") or ():
        if worker.get("name") in supervised or worker.get("role") in ("admin", "monitor"):
            continue
        seen = float(worker.get("last_seen_s") or 0.0)
        name = str(worker.get("name"))
        good = seen < SILENCE_TIMEOUT_S
        doing = _doing(name, str(worker.get("role")), snapshot, engines) if good else f"silent for {seen:.0f} s"
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
        doing = "done" if snapshot.status.get("finished") else "loading"
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
            version = int(status.get("version", -1))
            return f"serves version {version}" if version >= 0 else "waits for version 0"
        case "relay":
            return _relay(name, snapshot.parameters)
        case _:
            return "running"


def _relay(name: str, parameters: Mapping[str, Any]) -> str:
    """Describe a relay by its number of readers, if the parameter server's status contains it."""
    places = [it for it in parameters.get("relays") or () if worker_name(str(it.get("relay"))) == name]
    below = int(places[-1].get("num_below") or 0) if places else 0
    return f"serves weights to {plural(below, 'reader')}" if below else "serves weights"


def _trajectories(name: str, status: Mapping[str, Any]) -> str:
    number, every = name.partition("-")[2], status.get("shards") or ()
    shards = [shard for shard in every if str(shard.get("shard")) == number]
    stored = plural(sum(groups_in(status, state) for state in GROUP_STATES[1:4]), "group")
    kept = (
        f"stores {stored} to train" if len(every) < 2 else "stores its part of the groups"
    )  # the ledger has no counts per shard
    share = next((float(shard["used_share"]) for shard in shards if shard.get("used_share") is not None), 0.0)
    if unwritable := [str(shard["full"]) for shard in shards if shard.get("full") not in (None, "", "map")]:
        return f"its {trouble(unwritable[0])}: pushes wait; {kept}"
    if share >= FULL_SHARE or any(shard.get("full") for shard in shards):
        return f"full: pushes wait until a checkpoint frees space; {kept}"
    return f"{kept}, {100 * share:.0f} % full" if share >= MIN_SHOWN_SHARE else kept


def _staged(name: str, status: Mapping[str, Any]) -> int:
    """Return the number of groups that wait for the stage of this worker or are being processed by it."""
    stem = name.partition("-")[0]
    found = [stage for stage in status.get("stages") or () if stage.get("stage") == stem]
    return sum(int(stage.get("waiting", 0)) + int(stage.get("taken", 0)) for stage in found)


def _rollout(it: Mapping[str, Any] | None) -> str:
    if it is None:
        return "waits for the first command"
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
    sealed = groups_in(status, "sealed") and not status.get("trainer_waits")
    return f"trains step {version}" if sealed else f"waits for the batch of step {version}"


def _scheduler(status: Mapping[str, Any]) -> str:
    if not status:
        return "starting"
    leased = groups_in(status, "leased")
    return f"{plural(leased, 'lease')} out, {plural(len(status.get('instances') or ()), 'engine')}"


def groups_in(status: Mapping[str, Any], state: str) -> int:
    """Return the number of groups in a state of the ledger; 0 without a ledger."""
    ledger: Mapping[str, int] = status.get("ledger") or {}
    return int(ledger.get(state) or 0)
