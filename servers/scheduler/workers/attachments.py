"""Attach, detach, loss and return of processes.

A worker that detaches or is replaced loses its leases in the ledger immediately; a silent worker keeps its leases until
they expire.
"""

import re
from collections.abc import Callable, Collection, Iterable
from functools import partial

from staleflow.configs.loading.load import to_json
from staleflow.configs.stages import stages
from staleflow.net.endpoint import Call
from staleflow.net.security import OBSERVER_ROLES
from staleflow.protocols.consistency import events
from staleflow.protocols.consistency.effects import Code, ReleaseWhy
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import Attach, AttachReply, Detach, Done
from staleflow.protocols.wire.stages import CRITIC, REWARD
from staleflow.servers.scheduler.ledger.pending_replies import PendingReplies
from staleflow.servers.scheduler.ledger.rejects import Rejects
from staleflow.servers.scheduler.state import SchedulerState
from staleflow.servers.scheduler.workers import registry
from staleflow.servers.scheduler.workers.registry import ROLES, Process
from staleflow.trace import events as trace_events

MAX_TEXT_BYTES = 1_024
"""Maximum size of the text fields of ``Attach`` without the names: they are stored."""
NAME_TIMEOUT_MS = 15_000
"""Time for which a process retries while a live process has its name: a dead one counts as silent after three
heartbeats, or a little later if the scheduler itself is late."""
MAX_WHY_CHARS = 200
"""Maximum length of the reason of a ``Detach``: it is traced."""
_ROLES: dict[str, tuple[str, ...]] = {
    "rollout": ("rollout",),
    "stage": ("stage",),
    "trainer": ("trainer",),
    "trajectories": ("trajectories",),
    "parameters": ("parameters",),
    "relay": ("relay",),
    "prompts": ("prompts",),
    "scheduler": (),
    "monitor": OBSERVER_ROLES,
    "admin": OBSERVER_ROLES,
}
"""Roles that may use a name, by the first word of the name."""
_FIRST_WORD = re.compile(r"[^-.]*")


class Attachments:
    """Keeps registry, instances, ledger and trace consistent about the attached processes."""

    def __init__(
        self,
        state: SchedulerState,
        replies: PendingReplies,
        rejects: Rejects,
        run_dir: str,
        wanted: Callable[[], tuple[str, ...]],
    ) -> None:
        """``wanted``: returns the names of the rollout workers that should run; empty: all."""
        self._wanted = wanted
        self._config, self._identity, self._phase = state.config, state.identity, state.phase
        self._interpreter, self._registry, self._instances = state.interpreter, state.registry, state.instances
        self._config_json = to_json(state.config)
        self._stages = frozenset(stages(state.config))
        self._run_dir = run_dir
        self._replies = replies
        self._rejects = rejects

    def attach(self, call: Call, body: Attach) -> None:
        no = self._objection(call, body)
        now = self._interpreter.clock.now_ms()
        self._rejects.auth(call.peer, body.role, no[1] if no else "", ok=no is None, now_ms=now)
        if no is not None:
            self._replies.refuse(call, *no, retry_for_ms=NAME_TIMEOUT_MS)
            return
        current = self._registry.get(body.worker)
        if current is None or current.attach != body or not current.alive:
            self._admit(body, call.key)
        self._replies.add(call, self._attached())

    def _admit(self, body: Attach, key: str) -> None:
        older = self._registry.attach(body, key)
        if older is not None:
            self._leave(older, f"replaced by {body.worker}")
        if body.role not in OBSERVER_ROLES:
            self._interpreter.with_commit(lambda txn: registry.save(txn, body))
        self._arrive(body, "")

    def _arrive(self, body: Attach, why: str) -> None:
        self._interpreter.trace.add(trace_events.Attach(worker=body.worker, role=body.role, why=why))
        if body.role == "rollout":
            self._instances.add(body.worker, max(body.capacity, 1))
        self._instances.changed = True

    def _objection(self, call: Call, body: Attach) -> tuple[Code, str] | None:
        """Return why this process may not attach, or None."""
        if call.peer != body.worker:
            return Code.DENIED, f"{call.peer} attaches as {body.worker}; a process attaches over its own connection"
        if body.role not in ROLES:
            return Code.DENIED, f'role is "{body.role}"; it must be one of {", ".join(ROLES)}'
        if not body.name or len(body.name.encode()) > 200:
            return Code.MALFORMED, f'name is "{body.name[:40]}"; it must have 1 to 200 bytes'
        # Names are displayed in terminals, where control characters could forge output.
        if not (body.name + body.worker).isprintable():
            return Code.MALFORMED, f"name {body.name!a} of {body.worker!a} has unprintable characters"
        if len((body.endpoint + body.prompts_sha + body.stage + body.slot).encode()) > MAX_TEXT_BYTES:
            detail = f"endpoint, prompts_sha, stage and slot of {body.name} exceed {MAX_TEXT_BYTES} bytes together"
            return Code.MALFORMED, detail
        if (no := self._name_objection(call, body)) is not None:
            return no
        if body.config_sha and body.config_sha != self._identity.config_sha:
            return Code.CONFLICT, f"{body.name} has other values of keys that all processes of this run share"
        if body.role == "trajectories" and (no := self._shard_objection(body)) is not None:
            return no
        if body.role == "stage" and (no := self._stage_objection(body)) is not None:
            return no
        return self._busy(call, body)

    def _name_objection(self, call: Call, body: Attach) -> tuple[Code, str] | None:
        """Return why the process may not use its name, or None: names belong to roles, some to the supervisor."""
        if (end_reason := self._registry.end_reason(body.worker)) is not None:
            return Code.FENCED, end_reason
        current = self._registry.get(body.worker)
        if current is not None and current.name != body.name:
            return Code.CONFLICT, f"{body.worker} is attached as {current.name}; a process has one name"
        for name in (body.name, body.worker):
            if (no := name_objection(name, body.role, self._stages)) is not None:
                return Code.DENIED, no
        owner = self._registry.named(body.name)
        if owner is None:
            return None
        if owner.role != body.role:
            return Code.DENIED, f"{body.name} is the name of a process of role {owner.role}"
        if owner.contacted and owner.attach.slot and not body.slot:
            return (
                Code.CONFLICT,
                f"{body.name} belongs to the supervisor of this run, which restarts it; use another name",
            )
        return None

    def _busy(self, call: Call, body: Attach) -> tuple[Code, str] | None:
        """Return ``BUSY`` while a live process has the name, or while the key has its maximum of live processes.

        A successor in the same supervisor slot takes the name over. The other process may just have died, so the caller
        retries until it counts as silent.
        """
        owner = self._registry.named(body.name)
        if owner is None or not owner.alive:
            limit = self._config.scheduler.max_workers_per_key
            if self._registry.num_alive(call.key, limit) < limit:
                return None
            return Code.BUSY, f"its key has {limit} live processes already (scheduler.max_workers_per_key)"
        if owner.worker == body.worker:
            return None
        succeeds = body.slot != "" and body.slot == owner.attach.slot and owner.key in ("", call.key)
        if succeeds:
            return None
        return Code.BUSY, f"the live process {owner.worker} has this name; end it, or use another name"

    def _stage_objection(self, body: Attach) -> tuple[Code, str] | None:
        stage = body.stage or REWARD
        if stage not in self._stages:
            names = ", ".join(stages(self._config))
            return Code.CONFLICT, f'there is no stage "{stage}" in this run; it has {names}'
        others = [p for p in self._registry.processes() if p.alive and p.name != body.name]
        critic = next((other for other in others if other.role == "stage" and other.attach.stage == CRITIC), None)
        if stage == CRITIC and critic is not None:
            return Code.CONFLICT, f"{critic.name} is this run's critic; there is only one, since two would learn apart"
        return None

    def _shard_objection(self, body: Attach) -> tuple[Code, str] | None:
        shards = self._config.trajectories.shards
        if not 0 <= body.shard < shards:
            return Code.CONFLICT, f"shard is {body.shard}; it must be 0 to {shards - 1}"
        if body.rows < 1:
            return Code.CONFLICT, f"shard {body.shard} has no prompts"
        prompts = self._interpreter.prompts
        if not prompts.set_source(body.rows, body.prompts_sha):
            source = f"{prompts.rows} rows, sha256 {prompts.prompts_sha[:12]}"
            return (
                Code.CONFLICT,
                f"the prompts of shard {body.shard} differ from those this run started with ({source})",
            )
        return None

    def _attached(self) -> AttachReply:
        machine = self._interpreter.machine
        return AttachReply(
            run=self._identity.run,
            config=self._config_json,
            config_sha=self._identity.config_sha,
            run_dir=self._run_dir,
            shards=list(self._registry.endpoints()),
            parameters=self._registry.parameters(),
            lineage=machine.lineage,
            version=machine.version,
            lease_ms=self._interpreter.limits.lease_ms,
            ending=self._phase.ending,
            leases=machine.lease_hi,
            wanted=self._wanted(),
        )

    def detach(self, call: Call, body: Detach) -> None:
        process = self._registry.remove(body.worker)
        if process is not None:
            self._interpreter.with_commit(lambda txn: registry.forget(txn, process.name))
            self._leave(process, body.why[:MAX_WHY_CHARS] or "goodbye")
        else:  # perhaps a retry after a failed commit, which restored the leases of the process
            self._interpreter.apply(events.Detach(worker=body.worker, why=ReleaseWhy.ABORTED))
        self._replies.add(call, Done())

    def _leave(self, process: Process, why: str) -> None:
        """Release the leases of a process that has left or was replaced."""
        event = trace_events.Detach(worker=process.worker, role=process.role, why=why)
        self._interpreter.trace.add(event)
        if process.role == "rollout":
            self._instances.remove(process.worker)
            self._interpreter.apply(events.Detach(worker=process.worker, why=ReleaseWhy.ABORTED))

    def note_message(self, worker: str, now: int, key: str = "") -> Process | None:
        """Note a message from a process under ``key``; a silent process returns. Return the process, if known."""
        process = self._registry.get(worker)
        if process is not None:
            process.seen_ms = now
            if process.alive:
                process.key = key or process.key
            else:
                self._registry.mark_alive(process, key)
                self._arrive(process.attach, "heard again")
        return process

    def note_heartbeats(self, peers: Iterable[str], now: int) -> None:
        """Note that the transport receives heartbeats of these peers: stage workers send the scheduler nothing else."""
        for peer in peers:
            process = self._registry.get(peer)
            if process is not None and not process.alive:
                self.note_message(peer, now)

    def mark_silent(self, worker: str) -> None:
        """Handle three missed heartbeats: the process gets no new work, and keeps its leases until they expire."""
        process = self._registry.get(worker)
        if process is not None and process.alive:
            self._registry.mark_silent(process)
            trace = self._interpreter.trace
            trace.add(trace_events.Detach(worker=process.worker, role=process.role, why="silent"))
            self._instances.remove(WorkerId(worker))
            if process.role in OBSERVER_ROLES:
                self._registry.remove(process.worker)
            self.discard_silent()

    def discard_silent(self) -> None:
        """Discard silent processes beyond the limits, in memory and in the store, so that neither grows unbounded."""
        machine = self._interpreter.machine

        def needed(process: Process) -> bool:
            return process.worker == machine.trainer or bool(machine.leases_of(process.worker))

        for process in self._registry.discard_silent(needed):
            self._interpreter.with_commit(partial(registry.forget, name=process.name))


def reserved_for(name: str, stages: Collection[str]) -> tuple[str, ...] | None:
    """Return the roles that may use ``name``; None if every role may. ``stages``: the stages of the run.

    A name whose first word is a role ("trainer", "trajectories-0") or a stage ("reward-2") is reserved for that role,
    even while no process uses it: a process of another role with that name would lock its owner out.
    """
    match = _FIRST_WORD.match(name)
    word = match.group() if match else ""
    return ("stage",) if word in stages else _ROLES.get(word)


def name_objection(name: str, role: str, stages: Collection[str]) -> str | None:
    """Return why a process of ``role`` may not use ``name``, or None."""
    roles = reserved_for(name, stages)
    if roles is None or role in roles:
        return None
    owners = f"processes of role {roles[0]}" if roles else "the scheduler itself"
    return f'name is "{name}", which is reserved for {owners}; use a name with another first word'
