"""Common base of all peers: engines, groups in progress, finished groups, and the newest version.

A rule (``rule.Rule``) decides; the pool carries out and counts. A group is the samples of one prompt on one engine, as
in the service's own run; the n-th group started here has the prompt and the lengths of the service's lease n. A prompt
whose group is lost does not come back (no peer here deals it again), so groups lost by a rule are missing from its
training.
"""

from collections.abc import Callable, Sequence

from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Version
from staleflow.servers.scheduler.prompts.queue import PromptQueue
from staleflow.sim.charges import Charges
from staleflow.sim.check import fleet
from staleflow.sim.engine import OnUpdate, SimEngine
from staleflow.sim.rewards import RewardWorkers
from staleflow.sim.sample import Sample
from staleflow.sim.timeline import Timeline
from staleflow.sim.workload import Workload

LINEAGE = Lineage(0)
"""Peers have no rollback."""


class Group:
    """One prompt's samples."""

    __slots__ = ("id", "number", "over", "replica", "samples", "version", "written")

    def __init__(self, id: GroupId, number: LeaseId, replica: "Replica", samples: list[Sample]) -> None:
        self.id = id
        self.number = number
        """Counted from 1, in order of starting."""
        self.replica = replica
        """The replica that writes it."""
        self.version = replica.version
        """The version that it started with."""
        self.samples = samples
        self.written: list[Sample] = []
        self.over = False
        """Written or lost: its engine no longer has it."""

    def oldest(self) -> Version:
        """Return the oldest version that wrote any of its tokens; all samples must be written."""
        return min(segment.version for sample in self.written for segment in sample.segments)


class Replica:
    """An engine and its groups."""

    def __init__(self, number: int, engine: SimEngine) -> None:
        self.number = number
        self.engine = engine
        self.version = Version(-1)
        """The version with which a sample submitted now starts."""
        self.groups: dict[Group, None] = {}
        """Unfinished groups, in order of arrival."""
        self.active = 0
        """Samples that run, wait, or are at a tool."""


class Pool:
    """State of one run. ``arrived`` is called with each group that may be trained, ``filtered`` with each that the
    filter rejected."""

    def __init__(
        self,
        config: Config,
        timeline: Timeline,
        on_update: OnUpdate,
        *,
        arrived: Callable[[Group], None],
        filtered: Callable[[Group], None],
    ) -> None:
        self.config = config
        self.timeline = timeline
        self.batch_size = config.trainer.batch_size
        self.max_staleness = config.staleness.max_staleness
        self.version = Version(-1)
        """The newest published version."""
        self.step = 0
        """The next step to be trained, which equals the number of steps started."""
        self.training = False
        self.running: dict[Group, None] = {}
        """Started and not rewarded, in order of starting."""
        self.finished: dict[Group, None] = {}
        """Ready to be trained, in order of finishing."""
        self.started: list[Group] = []
        self.steps: list[Sequence[Group]] = []
        """The groups of each step that was started."""
        self.lost_tokens = 0
        self.filtered_tokens = 0
        self.changed = True
        """Set by events that the rule has not handled yet."""
        self.charges = Charges.of(config)
        self._rewards = RewardWorkers(timeline, self.charges)
        self.fleet = fleet(config)
        self.replicas = [self._replica(number, on_update) for number in range(len(self.fleet))]
        self._arrived = arrived
        self._filtered = filtered
        self._workload = Workload(config)
        self._prompts = PromptQueue(seed=config.seed, epochs=config.prompts.epochs)
        self._prompts.set_source(self._workload.rows, "simulated")
        self._at: dict[Sample, tuple[Group, Replica]] = {}
        """Samples that an engine has."""

    def _replica(self, number: int, on_update: OnUpdate) -> Replica:
        kind = self.fleet[number]
        engine = SimEngine(
            self.timeline,
            self.charges.step_cost(kind.speed, kind.compute),
            slots=kind.slots,
            kv_capacity=kind.kv_tokens,
            on_update=on_update,
            on_end=self._ended,
        )
        return Replica(number, engine)

    # --- groups ----------------------------------------------------------------------------------------------

    def upcoming(self) -> GroupId | None:
        """Return the prompt of the next group; None at the end of the prompts."""
        first = self._prompts.upcoming(1)
        return first[0] if first else None

    def begin(self, replica: Replica | None = None) -> bool:
        """Start the next group, on the least active replica by default; return False at the end of the prompts."""
        prompt = self._prompts.pop()
        if prompt is None:
            return False
        number = LeaseId(len(self.started) + 1)
        replica = replica or min(self.replicas, key=lambda replica: replica.active)
        group = Group(prompt, number, replica, self._workload.samples(prompt, number))
        self.started.append(group)
        self.running[group] = None
        replica.groups[group] = None
        for sample in group.samples:
            self._submit(group, sample)
        return True

    def _submit(self, group: Group, sample: Sample) -> None:
        replica = group.replica
        self._at[sample] = group, replica
        replica.active += 1
        replica.engine.submit(sample)

    def tokens(self, group: Group) -> int:
        """Return the number of tokens written of a group by now."""
        running = (self._at[sample][1].engine.written(sample) for sample in group.samples if sample in self._at)
        return sum(running) + sum(sample.written for sample in group.written)

    def lose(self, group: Group) -> None:
        """Discard a group, running or finished, with its tokens."""
        if not group.over:
            self._clear(group)
        self.lost_tokens += sum(sample.written for sample in group.written)
        self.running.pop(group, None)
        self.finished.pop(group, None)

    def take(self, groups: Sequence[Group]) -> None:
        """Make ``groups`` the batch of the next step."""
        for group in groups:
            self.finished.pop(group, None)
        self.steps.append(groups)
        self.step += 1
        self.training = True

    def move(self, group: Group, to: Replica) -> None:
        """Let another replica continue a group: its samples leave at the next step and are prefilled again there."""
        del group.replica.groups[group]
        to.groups[group] = None
        group.replica = to
        for sample in group.samples:
            if sample in self._at:
                self._at[sample][1].engine.withdraw(sample)

    def _ended(self, sample: Sample) -> None:
        """Handle a sample that left its engine: it moves on, or is written; the last one that its group needs completes
        it."""
        if sample not in self._at:  # discarded in the same instant
            return
        group, replica = self._at.pop(sample)
        replica.active -= 1
        if sample.written < sample.length:
            self._submit(group, sample)
            return
        group.written.append(sample)
        if len(group.written) == self._workload.group_size:
            self._clear(group)
            self._rewards.score(group.id, group.number, lambda: self._rewarded(group))

    def _clear(self, group: Group) -> None:
        """Remove a group from its engine; its unwritten samples are discarded."""
        group.over = True
        del group.replica.groups[group]
        for sample in group.samples:
            if sample in self._at:
                _, replica = self._at.pop(sample)
                replica.active -= 1
                self.lost_tokens += replica.engine.written(sample)
                replica.engine.abort(sample)

    def _rewarded(self, group: Group) -> None:
        if group not in self.running:
            return
        del self.running[group]
        self.changed = True
        if self._workload.filtered(group.id, group.number):
            self.filtered_tokens += sum(sample.written for sample in group.written)
            self._filtered(group)
        else:
            self._arrived(group)

    # --- weights ---------------------------------------------------------------------------------------------

    def load(self, replica: Replica) -> None:
        """Let a replica load the newest weights, ``pull_s`` from now."""
        version = self.version
        pull_s = self.charges.pull_s(remote=self.fleet[replica.number].remote)
        if pull_s:
            self.timeline.after(pull_s, lambda: self._load(replica, version))
        else:
            self._load(replica, version)

    def _load(self, replica: Replica, version: Version) -> None:
        replica.version = version
        replica.engine.load(LINEAGE, version, self.charges.load_s())
        self.changed = True

    def loaded(self) -> bool:
        """Return whether every replica has the newest weights."""
        return all(replica.version == self.version for replica in self.replicas)
