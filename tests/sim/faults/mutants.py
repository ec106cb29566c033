"""Plausible future bugs, each planted into the shipped code for the duration of a ``with`` block."""

# pyright: reportPrivateUsage=false, reportUnknownLambdaType=false, reportUnknownMemberType=false

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from msgspec import structs

from staleflow.clients.rollout import groups, pulls
from staleflow.clients.rollout.groups import Recipe
from staleflow.clients.rollout.pushes import Pusher
from staleflow.clients.stage import worker as stage_worker
from staleflow.clients.trainer import checkpoint as checkpoints
from staleflow.clients.trainer.checkpoint import Checkpoints
from staleflow.clients.trainer.client import TrainerClient
from staleflow.clients.trainer.data import batch as batches
from staleflow.clients.trainer.data import fetch as fetching
from staleflow.clients.trainer.data import micro_batches as pieces
from staleflow.clients.trainer.data.fetch import Fetcher
from staleflow.clients.trainer.loop import TrainingLoop
from staleflow.clients.weights.remote import Remote
from staleflow.process.clock import RunningClock
from staleflow.protocols.consistency import production, rollback, settle, snapshot, training
from staleflow.protocols.consistency.effects import Published, Pushed
from staleflow.protocols.consistency.events import Push
from staleflow.protocols.consistency.groups import LEASED, Group
from staleflow.protocols.consistency.ids import LeaseId
from staleflow.protocols.consistency.leases import Leases
from staleflow.protocols.consistency.ledger import Ledger, Lineages
from staleflow.protocols.consistency.machine import Machine
from staleflow.protocols.consistency.window import Window
from staleflow.protocols.wire.delta import comparable
from staleflow.protocols.wire.messages import RegisterVersionReply, Result
from staleflow.protocols.wire.payload_limits import PayloadLimits
from staleflow.protocols.wire.tensors import unpack
from staleflow.servers.parameters import versions
from staleflow.servers.parameters.catalog import Catalog
from staleflow.servers.scheduler import main as scheduler_main
from staleflow.servers.scheduler.coordination.backoff import MAX_PROMPTS, Backoff
from staleflow.servers.scheduler.ledger.interpreter import Interpreter
from staleflow.servers.scheduler.ledger.pending_replies import PendingReplies
from staleflow.servers.scheduler.ledger.phase import Phase
from staleflow.servers.scheduler.ledger.training import Training
from staleflow.servers.scheduler.prompts.outcomes import RowOutcomes
from staleflow.servers.scheduler.prompts.submissions import Submissions
from staleflow.servers.scheduler.prompts.tries import GroupTries
from staleflow.servers.scheduler.status.deadlock import Deadlock
from staleflow.servers.scheduler.workers.attachments import Attachments
from staleflow.servers.scheduler.workers.pull_reports import PullReports
from staleflow.servers.trajectories import service as trajectory_service
from staleflow.servers.trajectories.shard import Shard
from staleflow.servers.trajectories.slabs import Slabs
from staleflow.servers.trajectories.stage_queue import StageQueue
from staleflow.sim.faults.plan import Plan, plan_of
from staleflow.trace import writer as trace_writer

Change = Callable[[Any], Any]
"""Maps the real function to the wrong one."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One bug: the function it replaces, the replacement, the faults that expose it, the rules that may report it."""

    name: str
    where: Any
    function: str
    change: Change
    rules: frozenset[str]
    kinds: tuple[str, ...] = ()
    """Faults of its run; if empty, the faults that the seed plans."""
    every_s: float = 0.7
    seed: int = 1
    """The first seed to try. Most bugs are named in the first run."""
    events: int = 300
    epochs: int = 0
    """If above 0, epochs of the prompts of its run, which ends when they are used up."""
    submitted: bool = False
    """True if a client submits the prompts of its run."""
    long: bool = False
    """True if its run is long, and cheaper bugs show that its rules work: ``make test`` leaves it out."""

    @property
    def run(self) -> tuple[tuple[str, ...], float, int, int]:
        """Everything but the seed that decides what its run would be without the bug."""
        return self.kinds, self.every_s, self.epochs, self.events

    def plan(self, seed: int) -> Plan:
        """Return the plan of its run: that of the seed, with its faults and epochs."""
        plan = plan_of(seed, submitted=self.submitted)
        if self.kinds:
            plan = replace(plan, kinds=self.kinds, every_s=self.every_s)
        if self.epochs:
            prompts = structs.replace(plan.config.prompts, epochs=self.epochs)
            plan = replace(plan, finite=True, config=structs.replace(plan.config, prompts=prompts))
        return plan

    @contextmanager
    def planted(self) -> Generator[None]:
        """Plant the bug while the context is open."""
        wrong = self.change(getattr(self.where, self.function))
        with mock.patch.object(self.where, self.function, wrong):
            yield


def _lease_kept_for_ever(real: Any) -> Any:
    def expired(self: Leases, now_ms: int) -> list[Group]:
        return []

    return expired


def _half_the_time(real: Any) -> Any:
    def late(self: Leases, holder: Any, now_ms: int) -> list[Group]:
        gone: list[Group] = real(self, holder, now_ms + self._lease_ms // 2)
        return gone

    return late


def _does_nothing(real: Any) -> Any:
    def nothing(*_: object, **__: object) -> None:
        return None

    return nothing


def _lease_number_again(real: Any) -> Any:
    def reserve(self: Ledger, *args: Any, **named: Any) -> Group:
        group: Group = real(self, *args, **named)
        if group.lease % 50 == 0:
            self.lease_hi = LeaseId(self.lease_hi - 1)
        return group

    return reserve


def _any_lease_pushes(real: Any) -> Any:
    def push(ledger: Ledger, event: Push) -> None:
        group = ledger.groups.get(event.group)
        if group is not None and group.state is LEASED and group.lease > event.lease:
            event = replace(event, lease=group.lease, worker=group.worker)
        real(ledger, event)

    return push


def _one_version_more(real: Any) -> Any:
    def init(self: Window, limits: Any) -> None:
        real(self, limits)
        self.max_staleness += 1

    return init


def _one_more(real: Any) -> Any:
    def more(self: Window, *args: Any) -> int:
        return int(real(self, *args)) + 1

    return more


def _no(real: Any) -> Any:
    def no(*_: object, **__: object) -> bool:
        return False

    return no


def _ready_when_full(real: Any) -> Any:
    def ready(self: Window) -> bool:
        return self.occupied >= self.batch_size - self.claimed

    return ready


def _latest_first(real: Any) -> Any:
    def taken(self: Window, count: int) -> list[Group]:
        return list(reversed(real(self, count)))

    return taken


def _keeps_abandoned(real: Any) -> Any:
    def judge(ledger: Ledger, group: Group, to: int) -> None:
        ledger.window.enter(group)

    return judge


def _second_push(real: Any) -> Any:
    def push(ledger: Ledger, event: Any) -> None:
        before = len(ledger.out)
        real(ledger, event)
        if len(ledger.out) > before and getattr(ledger.out[-1], "code", None) == "duplicate":
            ledger.out[-1] = pushed_effect(event)

    return push


def pushed_effect(event: Any) -> Any:
    """Effect of a push that never happened."""
    return Pushed(
        group=event.group,
        lease=event.lease,
        worker=event.worker,
        shard=event.shard,
        sha=event.sha,
        nbytes=event.nbytes,
        truncated=event.truncated,
        segments=event.segments,
    )


def _answer_at_once(real: Any) -> Any:
    def add(self: PendingReplies, call: Any, reply: Any) -> None:
        call.reply(reply)

    return add


def _told_when_it_comes(real: Any) -> Any:
    def push(self: Shard, pushed: Any, then: Any) -> None:
        real(self, pushed, lambda _: None)
        then(Result())

    return push


def _told_before_registered(real: Any) -> Any:
    def register(self: Shard, held: Any, **how: Any) -> None:
        waiting, held.waiting = held.waiting, []
        for then in waiting:
            then(Result())
        real(self, held, **how)

    return register


def _any_bytes_do(real: Any) -> Any:
    def push(self: Shard, pushed: Any, then: Any) -> None:
        real(self, pushed, lambda result: then(Result() if result.code == "conflict" else result))

    return push


def _believing(real: Any) -> Any:
    def checked(data: Any, sha: str) -> Any:
        try:
            return unpack(data)
        except Exception:
            return real(data, sha)

    return checked


def _lent_as_before(real: Any) -> Any:
    def find(self: Slabs, *where: Any) -> bool:
        found = bool(real(self, *where))
        for slab in self._slabs.values():
            slab.inherited = False
        return found

    return find


def _without_looking(real: Any) -> Any:
    def unpacked(key: Any, record: Any, blob: bytes) -> Any:
        try:
            return unpack(blob)
        except Exception:
            return real(key, record, blob)

    return unpacked


def _told_before_the_scheduler(real: Any) -> Any:
    async def register(self: Catalog, about: Any) -> RegisterVersionReply:
        asyncio.ensure_future(real(self, about)).add_done_callback(lambda task: task.cancelled() or task.exception())
        self._registered.add(about.key)
        return RegisterVersionReply(lineage=about.lineage, version=about.version)

    return register


def _forgets_releases(real: Any) -> Any:
    def restored(ledger: Ledger, globals_row: Any, rows: Any, now_ms: int) -> None:
        kept = [(key, list(row)) for key, row in rows]
        real(ledger, globals_row, kept, now_ms)
        for group in list(ledger.groups.values()):
            if group.state is LEASED and group.id % 3 == 0:
                ledger.leases.end(group)
                ledger.window.leave(group)
                ledger.counts[LEASED] -= 1
                ledger.reserves -= 1
                del ledger.groups[group.id]

    return restored


def _goes_on_after_a_failure(real: Any) -> Any:
    def load(self: Interpreter) -> None:
        if not hasattr(self, "_was_loaded"):
            object.__setattr__(self, "_was_loaded", True)
            real(self)

    return load


def _keeps_the_opening(real: Any) -> Any:
    def forget(self: Interpreter) -> None:
        self.trace.forget()

    return forget


def _not_what_is_occupied(real: Any) -> Any:
    def must_keep(self: Machine, id: Any) -> bool:
        view = self.group(id)
        return bool(real(self, id)) and not (view is not None and view.state.name == "OCCUPIED" and id % 2 == 0)

    return must_keep


def _only_since_the_newest_checkpoint(real: Any) -> Any:
    def must_keep(self: Machine, id: Any) -> bool:
        view = self.group(id)
        if view is not None and view.step is not None and view.state.name == "CONSUMED":
            return view.step >= self.checkpoint[1]
        return bool(real(self, id))

    return must_keep


def _retains_everything(real: Any) -> Any:
    def retain(self: Shard, asked: Any, keep: Any) -> int:
        return 0

    return retain


def _always_the_first_attempt(real: Any) -> Any:
    def deliver(ledger: Ledger, event: Any) -> None:
        ledger.attempts.clear()
        real(ledger, event)

    return deliver


def _nothing_was_abandoned(real: Any) -> Any:
    def survives(self: Lineages, lineage: int, version: int) -> bool:
        return 0 <= lineage <= self.current

    return survives


def _masks_nothing(real: Any) -> Any:
    def masked(self: Group, below: int) -> int:
        return 0

    return masked


def _one_member_less(real: Any) -> Any:
    def seal(ledger: Ledger, groups: tuple[Group, ...]) -> None:
        real(ledger, groups[:-1] if ledger.window.step % 20 == 19 else groups)

    return seal


def _newer_digest(real: Any) -> Any:
    def digest(members: Any) -> str:
        return str(real(tuple(reversed(members))))

    return digest


def _takes_the_base(_: Any) -> Any:
    async def done(self: Any, source: Any, asked: Any, manifest: Any, base: Any, coming: Any) -> bool:
        return bool(comparable(base.manifest, manifest))

    return done


def _draws_of_the_new_lease(real: Any) -> Any:
    def sample_seed(self: Recipe, assign: Any, sample: int, origin: Any = None) -> int:
        return int(real(self, assign, sample, None))

    return sample_seed


def _newest_version_throughout(real: Any) -> Any:
    def payload(*given: Any, **named: Any) -> Any:
        group = real(*given, **named)
        group.segments[:, 1:3] = group.segments[:, 1:3].max(axis=0)
        return group

    return payload


def _always_loaded(real: Any) -> Any:
    def pulled(**named: Any) -> Any:
        return real(**named | {"ok": True})

    return pulled


def _initial_model(real: Any) -> Any:
    def resume(self: TrainingLoop) -> None:
        real(self)
        self._backend.load(None)

    return resume


def _never_saved(real: Any) -> Any:
    def save(self: Checkpoints, state: Any, write: Any) -> Path:
        return self.folder / str(state.version)

    return save


def _other_order(real: Any) -> Any:
    async def members(self: Fetcher, members: Any) -> Any:
        return list(reversed(await real(self, members)))

    return members


def _pieces_are_kept(real: Any) -> Any:
    steps: set[tuple[int, int]] = set()

    def piece(**named: Any) -> Any:
        step = (named["header"].lineage, named["header"].step)
        again = step in steps
        steps.add(step)
        return real(**named | {"first": named["first"] and not again})

    return piece


def _nothing_is_masked(real: Any) -> Any:
    def mask(self: Any, below: int) -> int:
        return 0

    return mask


def _columns_of_others(real: Any) -> Any:
    async def make(self: Any, groups: Any) -> Any:
        return list(reversed(await real(self, groups)))

    return make


def _counts_pauses(real: Any) -> Any:
    def now_ns(self: RunningClock) -> int:
        return self._real.now_ns()

    return now_ns


def _yes(real: Any) -> Any:
    def yes(*_: object, **__: object) -> bool:
        return True

    return yes


def _any_store_is_served(real: Any) -> Any:
    def opened(*args: Any, **named: Any) -> Any:
        checks = ((trace_writer, "_check_history"), (scheduler_main, "_check_rest"))
        with mock.patch.object(*checks[0]), mock.patch.object(*checks[1]):
            return real(*args, **named)

    return opened


def _any_name_is_free(real: Any) -> Any:
    def objection(self: Attachments, *args: Any) -> Any:
        with mock.patch.multiple(Attachments, _busy=_does_nothing(None), _name_objection=_does_nothing(None)):
            return real(self, *args)

    return objection


def _one_counts_for_all(real: Any) -> Any:
    def all_refuse(self: Backoff) -> int:
        return MAX_PROMPTS if any(streak.failing and streak.hopeless for streak in self._streaks.values()) else 0

    return all_refuse


def _raises(real: Any) -> Any:
    def raises(*_: object, **__: object) -> None:
        raise ValueError("a token is out of range")

    return raises


def _of_another_step(real: Any) -> Any:
    def batch(self: Training, *args: Any) -> Any:
        return structs.replace(real(self, *args), digest="0" * 64)

    return batch


def _gives_up(real: Any) -> Any:
    def end(self: Training, why: str) -> None:
        self.give_up(why)

    return end


def _nothing_while_held(real: Any) -> Any:
    def take(self: StageQueue, worker: str, most: int, **how: Any) -> Any:
        return [] if self._worker(worker).holds else real(self, worker, most, **how)

    return take


def _other_digest(real: Any) -> Any:
    def register(self: Catalog, about: Any) -> Any:
        return real(self, structs.replace(about, manifest=structs.replace(about.manifest, sha="0" * 64)))

    return register


def _published_first(real: Any) -> Any:
    def consume(ledger: Ledger, event: Any) -> None:
        real(ledger, event)
        if len(ledger.out) > 1 and isinstance(ledger.out[-1], Published):
            ledger.out[-2:] = reversed(ledger.out[-2:])

    return consume


def _first_only(real: Any) -> Any:
    def newest(self: Checkpoints) -> Any:
        paths = self.paths()
        return (found for found in real(self) if found[0] == paths[0])

    return newest


def _rules(*names: str) -> frozenset[str]:
    return frozenset(names)


KILLS = ("kill", "kill at a commit", "kill at a rename", "disconnect")
SLOW = ("stop for longer than a lease", "partition", "kill")

MUTANTS = (
    Mutant("leases never expire", Leases, "expired", _lease_kept_for_ever, _rules("LATE"), SLOW, seed=33, events=200),
    Mutant("a lease lives half its time", Leases, "_late", _half_the_time, _rules("EARLY"), SLOW, seed=5),
    Mutant("a report renews nothing", Leases, "renew", _does_nothing, _rules("EARLY"), SLOW, seed=2),
    Mutant("a lease number is used again", Ledger, "reserve", _lease_number_again, _rules("I4")),
    Mutant(
        "a push under an older lease counts",
        production,
        "push",
        _any_lease_pushes,
        _rules("SENT", "ZOMBIE", "ACKNOWLEDGED"),
        SLOW,
        seed=29,
        events=200,
    ),
    Mutant(
        "a row is lost with the group that a rollback drops",
        RowOutcomes,
        "_return",
        _does_nothing,
        _rules("SUBMITTED"),
        ("two trainers", "kill"),
        submitted=True,
    ),
    Mutant(
        "a repeated submission counts twice",
        Submissions,
        "find",
        _does_nothing,
        _rules("SUBMITTED"),
        ("kill", "double messages"),
        submitted=True,
    ),
    Mutant("the bound is one version too wide", Window, "__init__", _one_version_more, _rules("I1", "I2", "I4")),
    Mutant("one group too many is admitted", Window, "slack", _one_more, _rules("I2"), long=True),
    Mutant("a step is sealed over Hall's condition", Window, "ready", _ready_when_full, _rules("I2"), seed=3),
    Mutant("a step is never ready at once", settle, "settle", _does_nothing, _rules("PROGRESS")),
    Mutant("the batch is in another order", Window, "take_earliest", _latest_first, _rules("ORDER"), seed=3),
    Mutant("a batch lacks a member", settle, "seal", _one_member_less, _rules("I3")),
    Mutant("the digest is of other members", settle, "digest", _newer_digest, _rules("DIGEST")),
    Mutant("nobody is fenced", training, "_fenced", _no, _rules("FENCE"), ("two trainers", "kill"), seed=2),
    Mutant(
        "a rollback keeps what was abandoned",
        rollback,
        "_judge",
        _keeps_abandoned,
        _rules("ROLLBACK"),
        ("two trainers", "kill"),
    ),
    Mutant(
        "no version is ever abandoned",
        Lineages,
        "survives",
        _nothing_was_abandoned,
        _rules("VERSION", "PULL", "ROLLBACK"),
        ("two trainers", "delay messages", "slow link"),
        seed=54,
        events=2_000,
    ),
    Mutant("a duplicate has a second effect", production, "push", _second_push, _rules("I4", "MOVE"), KILLS, seed=2),
    Mutant(
        "attempts are not counted", training, "deliver", _always_the_first_attempt, _rules("DELIVERY"), KILLS, seed=37
    ),
    Mutant(
        "answers leave before the commit",
        PendingReplies,
        "add",
        _answer_at_once,
        _rules("ACKNOWLEDGED", "COMMITTED"),
        ("kill at a commit",),
    ),
    Mutant(
        "a push is acknowledged before it is durable",
        Shard,
        "push",
        _told_when_it_comes,
        _rules("ACKNOWLEDGED"),
        ("kill at a commit",),
    ),
    Mutant(
        "a push is acknowledged before it is registered",
        Shard,
        "_register",
        _told_before_registered,
        _rules("ACKNOWLEDGED", "ZOMBIE"),
        SLOW,
        seed=2,
    ),
    Mutant(
        "other bytes under the same key are taken for the same", Shard, "push", _any_bytes_do, _rules("ACKNOWLEDGED")
    ),
    Mutant(
        "a publish is answered before the scheduler knows",
        Catalog,
        "register",
        _told_before_the_scheduler,
        _rules("COMMITTED"),
        KILLS,
    ),
    Mutant(
        "payload is handed to stages unchecked",
        stage_worker,
        "checked",
        _believing,
        _rules("SERVED"),
        ("flip a byte of a payload", "flip a byte of a payload", "slow link", "stop shortly"),
        every_s=0.4,
        seed=3,
    ),
    Mutant(
        "payload is handed to trainers unchecked",
        trajectory_service,
        "unpack_verified",
        _without_looking,
        _rules("SERVED"),
        ("flip a byte of a payload",),
        seed=4,
        long=True,
    ),
    Mutant(
        "payload in a slab is trained unchecked",
        fetching,
        "checked",
        _believing,
        _rules("SERVED"),
        ("flip a byte of a payload", "lose slab files", "an older store of a shard"),
        every_s=0.4,
        seed=3,
    ),
    Mutant(
        "a shard that began again trusts that its workers have mapped its slabs",
        Slabs,
        "find",
        _lent_as_before,
        _rules("SERVED", "SENT"),
        ("an older store of a shard", "lose slab files", "kill"),
        seed=5,
        long=True,
    ),
    Mutant(
        "damage is not reported",
        Shard,
        "_give_up_damaged",
        _does_nothing,
        _rules("PROGRESS"),
        ("flip a byte of a payload",),
        seed=3,
    ),
    Mutant("a restart forgets leases", snapshot, "restore", _forgets_releases, _rules("RECOVERY"), KILLS),
    Mutant(
        "a failed commit is not undone",
        Interpreter,
        "load",
        _goes_on_after_a_failure,
        _rules("RECOVERY", "MOVE", "I4", "I6", "I2"),
        ("full disk", "broken disk"),
    ),
    Mutant(
        "a failed commit forgets that a scheduler began",
        Interpreter,
        "_undo",
        _keeps_the_opening,
        _rules("RUN"),
        ("broken disk", "kill"),
        seed=2,
    ),
    Mutant(
        "what is occupied may be forgotten",
        Machine,
        "must_keep",
        _not_what_is_occupied,
        _rules("STORED", "PROGRESS", "QUARANTINED"),
        KILLS,
        seed=3,
    ),
    Mutant(
        "payload is kept for the newest checkpoint alone",
        Machine,
        "must_keep",
        _only_since_the_newest_checkpoint,
        _rules("STORED"),
        KILLS,
    ),
    Mutant("nothing is ever forgotten", Shard, "retain", _retains_everything, _rules("GARBAGE")),
    Mutant("masked tokens are not counted", Group, "masked", _masks_nothing, _rules("I1"), seed=15),
    Mutant(
        "the base of a delta is taken for the version",
        Remote,
        "_by_delta",
        _takes_the_base,
        _rules("SERVED"),
        KILLS,
        seed=29,
        events=150,
    ),
    Mutant(
        "a group that moved is continued with the draws of its new lease",
        Recipe,
        "sample_seed",
        _draws_of_the_new_lease,
        _rules("SERVED"),
        SLOW,
        seed=21,
        long=True,
    ),
    Mutant(
        "every token is said to be of the newest version",
        groups,
        "payload",
        _newest_version_throughout,
        _rules("SERVED"),
        events=800,
        long=True,
    ),
    Mutant(
        "a version that could not be loaded is reported as loaded",
        pulls,
        "Pulled",
        _always_loaded,
        _rules("PULLED", "PULL"),
        ("flip a byte of the weights",),
    ),
    Mutant(
        "a group that found no room is forgotten",
        Pusher,
        "_delay",
        _does_nothing,
        _rules("PROGRESS"),
        ("full disk", "crowded disk"),
    ),
    Mutant(
        "a trainer comes back with the initial model", TrainingLoop, "_resume", _initial_model, _rules("LEARNED"), KILLS
    ),
    Mutant(
        "a checkpoint is reported and not written",
        Checkpoints,
        "save",
        _never_saved,
        _rules("PROGRESS"),
        ("kill", "two trainers"),
    ),
    Mutant(
        "a batch is trained in the order of its arrival", Fetcher, "members", _other_order, _rules("SERVED"), seed=3
    ),
    Mutant(
        "pieces of a step that began again are trained twice",
        pieces,
        "MicroBatch",
        _pieces_are_kept,
        _rules("SERVED"),
        ("flip a byte of a payload", "flip a byte of a column", "kill"),
        seed=5,
    ),
    Mutant(
        "the trainer trains what the token bound masks",
        batches._Columns,
        "mask",
        _nothing_is_masked,
        _rules("SERVED"),
        seed=15,
    ),
    Mutant(
        "a stage hands back the columns of another group",
        stage_worker.StageWorker,
        "_make",
        _columns_of_others,
        _rules("SERVED"),
        seed=7,
    ),
    Mutant(
        "a pause of the scheduler counts against its leases",
        RunningClock,
        "now_ns",
        _counts_pauses,
        _rules("PAUSED"),
        ("stop for longer than a lease", "partition", "lose messages"),
        every_s=0.4,
        seed=4,
        events=800,
    ),
    Mutant(
        "a rollout worker that fails everything is not held back",
        Backoff,
        "on_trial",
        _no,
        _rules("WASTED"),
        ("a rollout worker fails everything", "slow disk"),
        seed=47,
    ),
    Mutant(
        "a group goes back to the stage worker that failed it",
        StageQueue,
        "_may_have",
        _yes,
        _rules("RETRIED"),
        ("a stage worker fails everything", "slow disk"),
        seed=20,
        long=True,
    ),
    Mutant(
        "a group is given up at its first failure in a stage",
        StageQueue,
        "_count_try",
        _yes,
        _rules("RETRIED"),
        ("a stage worker fails everything", "slow disk"),
        seed=47,
    ),
    Mutant(
        "limits of a push are not checked",
        PayloadLimits,
        "check",
        _does_nothing,
        _rules("POISONED"),
        ("poisoned payload",),
    ),
    Mutant(
        "a scheduler serves a store that is empty or older than its run",
        scheduler_main,
        "open_service",
        _any_store_is_served,
        _rules("HISTORY"),
        ("a lost store of the scheduler", "an older store of the scheduler"),
    ),
    Mutant(
        "a trace is cut to the end of an older store",
        trace_writer,
        "_check_history",
        _does_nothing,
        _rules("LINE", "SEQUENCE", "CHAIN"),
        ("an older store of the scheduler", "slow disk"),
    ),
    Mutant(
        "one instance that refuses everything counts as all",
        Backoff,
        "all_refuse",
        _one_counts_for_all,
        _rules("ENDED"),
        ("a rollout worker fails everything", "slow disk"),
        seed=47,
    ),
    Mutant(
        "groups under way do not count in a deadlock",
        Deadlock,
        "is_certain",
        _yes,
        _rules("ENDED"),
        ("slow disk",),
        seed=47,
        epochs=1,
    ),
    Mutant(
        "an older checkpoint is no fallback for a damaged one",
        Checkpoints,
        "newest",
        _first_only,
        _rules("PROGRESS"),
        ("a damaged checkpoint",),
        seed=47,
    ),
    Mutant(
        "a damaged checkpoint is loaded",
        checkpoints,
        "_check",
        _does_nothing,
        _rules("LEARNED"),
        ("a damaged checkpoint",),
        seed=47,
    ),
    Mutant(
        "failures of a prompt are not counted",
        GroupTries,
        "add",
        _does_nothing,
        _rules("PROGRESS"),
        ("slow disk", "a stage worker fails everything"),
        seed=47,
        epochs=1,
        long=True,
    ),
    Mutant(
        "a worker takes the name of a live one",
        Attachments,
        "_objection",
        _any_name_is_free,
        _rules("NAMED"),
        ("the same name twice",),
        seed=47,
    ),
    Mutant(
        "a full disk of the weights ends the parameter server",
        versions,
        "state_of",
        _does_nothing,
        _rules("ALIVE"),
        ("full disk of the weights",),
    ),
    Mutant(
        "a trainer dies on a group that it cannot train",
        TrainerClient,
        "quarantine",
        _raises,
        _rules("ALIVE"),
        KILLS,
        seed=19,
    ),
    Mutant(
        "a report of a loaded version is believed",
        PullReports,
        "_objection",
        _does_nothing,
        _rules("PULL"),
        KILLS,
        seed=20,
    ),
    Mutant(
        "the end of a run is acknowledged and not stored",
        Phase,
        "save",
        _does_nothing,
        _rules("FINISHED"),
        KILLS,
        seed=14,
    ),
    Mutant(
        "a batch is delivered with the digest of another",
        Training,
        "_batch",
        _of_another_step,
        _rules("BATCH"),
    ),
    Mutant("a drain ends as a failure", Training, "end", _gives_up, _rules("ENDED"), KILLS, seed=16),
    Mutant(
        "a held stage worker is never tried again",
        StageQueue,
        "take",
        _nothing_while_held,
        _rules("PROGRESS"),
        ("a stage worker fails everything", "slow disk"),
        seed=4,
        events=150,
    ),
    Mutant(
        "a version is registered under another digest",
        Catalog,
        "register",
        _other_digest,
        _rules("PUBLISHED"),
    ),
    Mutant(
        "weights change while they are being published",
        TrainerClient,
        "before_update",
        _does_nothing,
        _rules("LEARNED"),
        ("kill", "slow link", "partition"),
        seed=3,
    ),
    Mutant(
        "nothing waits for a version that is being published",
        TrainerClient,
        "finish_commit",
        _does_nothing,
        _rules("PROGRESS"),
        KILLS,
        seed=3,
    ),
    Mutant("a version is traced before its batch is consumed", training, "consume", _published_first, _rules("I5")),
)
