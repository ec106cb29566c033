"""A simulated rollout worker: the messages of ``clients/rollout/worker``, an engine in virtual time, no tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from staleflow.protocols.consistency.effects import Code, ReleaseWhy
from staleflow.protocols.consistency.ids import LeaseId, Lineage, Version, WorkerId
from staleflow.protocols.wire.messages import (
    Abort,
    Assign,
    Attach,
    AttachReply,
    Command,
    Commands,
    Detach,
    InstanceStats,
    Interrupt,
    Operations,
    Pull,
    Pulled,
    RegisterRelease,
    RegisterYield,
    Reply,
    Report,
    Result,
    Results,
    Yield,
)
from staleflow.sim.asking import Ask, sha_of
from staleflow.sim.engine import EngineFull, SimEngine
from staleflow.sim.sample import Fate, Sample
from staleflow.sim.shard import SimShard
from staleflow.sim.timeline import Timeline
from staleflow.sim.workload import Workload

GIVE_UP_S = 1.0
"""From a group that the engine refuses to its release: time must pass, or the next ones would all come at once."""


@dataclass(eq=False, slots=True)
class Held:
    """A lease that it works on."""

    assign: Assign
    samples: list[Sample]
    left: int
    """Samples that the engine has."""
    done: list[Sample] = field(default_factory=list[Sample])
    pushing: bool = False
    yielding: bool = False
    """It goes on elsewhere, once the engine has let go of it."""


class SimInstance:
    """One life of one worker: ``ask`` sends a request to the scheduler.

    ``begun`` gets every group that it begins.
    """

    def __init__(
        self,
        worker: WorkerId,
        name: str,
        engine: SimEngine,
        workload: Workload,
        timeline: Timeline,
        ask: Ask,
        shards: Sequence[SimShard],
        *,
        pull_s: float,
        load_s: float,
        report_s: float,
        begun: list[tuple[Version, list[Sample]]],
    ) -> None:
        self.worker = worker
        self.name = name
        self.engine = engine
        self.thrown_away = 0
        """Tokens of samples that were aborted or refused."""
        self.began_s = timeline.now_s
        self.ended_s = float("inf")
        self._workload = workload
        self._timeline = timeline
        self._ask = ask
        self._shards = shards
        self._pull_s, self._load_s = pull_s, load_s
        self._begun = begun
        self._report_ms = round(report_s * 1000)
        self._held: dict[LeaseId, Held] = {}
        self._group_of: dict[Sample, Held] = {}
        self._ack = 0
        self._loaded = (Lineage(0), Version(-1))
        self._wanted: tuple[Lineage, Version] | None = None
        self._pulling = False
        self._to_begin: list[Held] = []
        """Their weights are on their way."""
        self._dead = False
        self._hung = False
        self._reports = 0

    # --- life ------------------------------------------------------------------------------------------------

    def attach(self, capacity: int) -> None:
        """Join the run."""
        self._ask(Attach(worker=self.worker, name=self.name, role="rollout", capacity=capacity), self._attached)

    def _attached(self, reply: Reply) -> None:
        if isinstance(reply, AttachReply):
            self._report()

    def leave(self) -> None:
        """Say goodbye; what it works on is given up."""
        self.crash()
        self._ask(Detach(worker=self.worker, why="leaves"))

    def crash(self) -> None:
        """Gone without a word."""
        self._dead = True
        self.ended_s = self._timeline.now_s
        for held in self._held.values():
            self.thrown_away += sum(self.engine.written(sample) for sample in held.samples)
        self.engine.stop()

    def hang(self) -> None:
        """The engine stands still, and so do the reports."""
        self._hung = True
        self.engine.hang()

    def resume(self) -> None:
        """Go on where it hung."""
        if self._hung and not self._dead:
            self._hung = False
            self.engine.resume()
            self._report()

    # --- reports and commands --------------------------------------------------------------------------------

    def _report(self) -> None:
        if not self._dead and not self._hung:
            self._reports += 1
            number = self._reports
            report = Report(
                worker=self.worker, ack=self._ack, held=list(self._held), stats=self._stats(), wait_ms=self._report_ms
            )
            self._ask(report, lambda reply: self._commanded(reply, number))

    def _commanded(self, reply: Reply, of_report: int) -> None:
        """Carry out what is new, and report again at once; a report that a newer one replaced is over."""
        if self._dead or not isinstance(reply, Commands):
            return
        for number, command in enumerate(reply.commands, start=reply.first):
            if number > self._ack:
                self._ack = number
                self._obey(command)
        if of_report == self._reports:
            self._report()

    def _stats(self) -> InstanceStats:
        seen = self.engine.seen()
        lineage, version = self._loaded
        capacity = self.engine.kv_capacity
        tokens_per_s = self.engine.cost.tokens_per_s(seen.running, seen.kv_tokens) if seen.running else 0.0
        return InstanceStats(
            lineage=lineage,
            version=version,
            running=seen.running,
            waiting=seen.waiting,
            kv_used=seen.kv_tokens / capacity if capacity else 0.0,
            kv_tokens=seen.kv_tokens,
            kv_capacity=capacity,
            slots=self.engine.slots,
            steps=seen.steps,
            tokens_per_s=tokens_per_s,
            generated_tokens=seen.generated,
            busy_s=seen.busy_s,
        )

    def _obey(self, command: Command) -> None:
        match command:
            case Assign():
                if command.lease not in self._held:
                    self._start(command)
            case Pull():
                self._wanted = (command.lineage, command.version)
                if not self._pulling:
                    self._pull()
            case Interrupt():
                if (held := self._held.get(command.lease)) is not None:
                    for sample in held.samples:
                        self.engine.interrupt(sample)
            case Abort():
                if (held := self._held.get(command.lease)) is not None and not held.pushing:
                    self._throw_away(held)
            case Yield():
                if (held := self._held.get(command.lease)) is not None and not held.pushing:
                    self._yield(held)

    # --- groups ----------------------------------------------------------------------------------------------

    def _start(self, assign: Assign) -> None:
        samples = self._shards[assign.shard].partials.pop(assign.partial, None)
        if samples is None:
            samples = self._workload.samples(assign.group, assign.lease)
            self._begun.append((assign.version, samples))
        held = self._held[assign.lease] = Held(assign, samples, 0)
        self._begin(held)

    def _begin(self, held: Held) -> None:
        """Now, or when the weights have come that are on their way; without them it is given up, as a worker does."""
        needed = held.assign.lineage, held.assign.version
        if needed <= self._loaded:
            self._submit(held)
        elif self._wanted is None or self._wanted < needed:
            self._give_up(held, f"version {held.assign.version} is not loaded here")
        else:
            self._to_begin.append(held)

    def _submit(self, held: Held) -> None:
        """Let the engine write what is not written yet."""
        held.done = [sample for sample in held.samples if _over(sample)]
        for sample in held.samples:
            if not _over(sample):
                try:
                    self.engine.submit(sample)
                except EngineFull as error:
                    self._give_up(held, str(error))
                    return
                self._group_of[sample] = held
                held.left += 1

    def ended(self, sample: Sample) -> None:
        """The engine lets go of a sample; the last one that its group needs completes it."""
        held = self._group_of.pop(sample, None)
        if held is None:
            return
        held.left -= 1
        if _over(sample):
            held.done.append(sample)
        if len(held.done) == self._workload.group_size:
            self._push(held)
        elif held.yielding and not held.left:
            self._hand_over(held)

    def _push(self, held: Held) -> None:
        held.pushing = True
        for spare in held.samples:
            if spare not in held.done:
                self._drop(spare)
        samples = sorted(held.done, key=lambda done: done.id)
        shard = self._shards[held.assign.shard]
        shard.push(held.assign, self.worker, samples, lambda result: self._settled(held, result))

    def _give_up(self, held: Held, detail: str) -> None:
        """Release a lease that cannot be served. It counts as held until the scheduler knows."""
        for sample in held.samples:
            self._drop(sample)
        held.pushing = True
        lease = held.assign.lease
        op = RegisterRelease(group=held.assign.group, lease=lease, why=ReleaseWhy.ABORTED, detail=detail)

        def release() -> None:
            if not self._dead:
                self._ask(Operations(ops=[op]), lambda _: self._forget(lease))

        self._timeline.after(GIVE_UP_S, release)

    def _forget(self, lease: LeaseId) -> None:
        self._held.pop(lease, None)

    # --- on to another instance ------------------------------------------------------------------------------

    def _yield(self, held: Held) -> None:
        held.yielding = True
        if held in self._to_begin:
            self._to_begin.remove(held)
            self._hand_over(held)
        for sample in held.samples:
            if sample in self._group_of:
                self.engine.withdraw(sample)

    def _hand_over(self, held: Held) -> None:
        """The engine has let go of all of it: put it to the shard, then tell the scheduler."""
        assign = held.assign
        self._shards[assign.shard].partials[assign.lease] = held.samples
        newest = max((sample.segments[-1][:2] for sample in held.samples if sample.segments), default=None)
        lineage, version = newest or (assign.lineage, assign.version)
        op = RegisterYield(group=assign.group, lease=assign.lease, lineage=lineage, version=version, sha="")
        self._ask(Operations(ops=[op]), lambda reply: self._handed_over(held, reply))

    def _handed_over(self, held: Held, reply: Reply) -> None:
        lease = held.assign.lease
        code = reply.results[0].code if isinstance(reply, Results) else Code.BUSY
        if code is None:
            self._held.pop(lease, None)
        elif lease in self._held and not self._dead:
            self._shards[held.assign.shard].partials.pop(lease, None)
            held.yielding = False
            if code is Code.STALE_LEASE:
                self._throw_away(held)
            else:
                self._begin(held)

    def _settled(self, held: Held, result: Result) -> None:
        """The shard's verdict on a push."""
        if result.code is not None and result.code is not Code.DUPLICATE:
            self.thrown_away += sum(sample.written for sample in held.done)
        self._held.pop(held.assign.lease, None)

    def _throw_away(self, held: Held) -> None:
        for sample in held.samples:
            self._drop(sample)
        del self._held[held.assign.lease]

    def _drop(self, sample: Sample) -> None:
        self.thrown_away += self.engine.written(sample)
        if self._group_of.pop(sample, None) is not None:
            self.engine.abort(sample)

    # --- weights ---------------------------------------------------------------------------------------------

    def _pull(self) -> None:
        """Fetch what was wanted last, then load it."""
        if self._wanted is None or self._wanted == self._loaded:
            return
        self._pulling = True
        lineage, version = self._wanted
        self._timeline.after(self._pull_s, lambda: self._load(lineage, version))

    def _load(self, lineage: Lineage, version: Version) -> None:
        if not self._dead:
            self.engine.load(lineage, version, self._load_s, lambda: self._took(lineage, version))

    def _took(self, lineage: Lineage, version: Version) -> None:
        if self._dead:
            return
        self._pulling = False
        self._loaded = (lineage, version)
        waiting, self._to_begin = self._to_begin, []
        for held in waiting:
            if held.assign.lease in self._held:
                self._begin(held)
        pulled = Pulled(worker=self.worker, lineage=lineage, version=version, sha=sha_of(lineage, version), ok=True)
        self._ask(pulled)
        self._report()
        self._pull()


def _over(sample: Sample) -> bool:
    """Whether nothing more will be written of it."""
    return sample.written == sample.length or sample.fate is Fate.INTERRUPTED
