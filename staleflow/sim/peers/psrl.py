"""PSRL, the system of the StaleFlow paper: the strict ledger with its simplest routing."""

from collections.abc import Sequence

from staleflow.protocols.consistency.effects import Joined, ReleaseWhy, Reserved, Sealed
from staleflow.protocols.consistency.events import Consume, Event, Join, Occupy, Publish, Push, Release, Reserve
from staleflow.protocols.consistency.ids import GroupId, Step, TrainerTerm, Version, WorkerId
from staleflow.protocols.consistency.limits import Limits
from staleflow.protocols.consistency.machine import Machine
from staleflow.sim.peers.pool import LINEAGE, Group, Pool, Replica
from staleflow.sim.peers.rule import Rule
from staleflow.sim.sample import segments_of

TRAINER = WorkerId("trainer")
NO_SHA = "0" * 64


class Psrl(Rule):
    """A group starts when it fits into a buffer that its version may still enter; batch k is buffer k when it is full.

    Based on Somoku/psrl: psrl/workers/ps/staleness_controller.py (reserve the latest admissible place, occupy the
    earliest), and the authors' simulator psrl-project/DryRun-RL: dryrun/simulator/policy/psrl.py, simulator.py (a new
    group goes to the engine with the fewest active requests; every engine takes new weights at once). Their buffers and
    this project's counters admit and train the same groups, so the shipped ``Machine`` represents them. Left out, as in
    their defaults: redundancy, migration, and their measures against stragglers.

    Bound in versions: ``max_staleness``, hard, for the version that a group started with. Nothing is lost. The price is
    waiting, since a batch of independent draws nearly always holds a very long trajectory.
    """

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self._machine = Machine(Limits(max_staleness=pool.max_staleness, batch_size=pool.batch_size))
        self._term = TrainerTerm(0)
        self._groups: dict[GroupId, Group] = {}
        self._sealed: dict[Step, Sealed] = {}
        self._apply(Join(trainer=TRAINER, lineage=LINEAGE, version=Version(0)))

    def begin(self) -> None:
        while (group := self.pool.upcoming()) is not None:
            replica = self._reserve(group)
            if replica is None or not self.pool.begin(replica):
                return
            self._groups[group] = self.pool.started[-1]

    def _reserve(self, group: GroupId) -> Replica | None:
        """Return the least active replica whose version has room, or None."""
        refused: set[Version] = set()
        for replica in sorted(self.pool.replicas, key=lambda replica: replica.active):
            if replica.version in refused:
                continue
            if self._apply(Reserve(group=group, worker=_name(replica), version=replica.version)):
                return replica
            refused.add(replica.version)
        return None

    def batch(self) -> Sequence[Group]:
        sealed = self._sealed.get(Step(self.pool.step))
        return [] if sealed is None else [self._groups[member.group] for member in sealed.members]

    def published(self) -> None:
        if self.pool.version == 0:
            self._apply(Publish(trainer_term=self._term, sha=NO_SHA, nbytes=0))
        else:
            batch = self._sealed.pop(Step(self.pool.version - 1)).batch
            step = Step(self.pool.version - 1)
            self._apply(Consume(batch=batch, step=step, trainer_term=self._term, sha=NO_SHA, nbytes=0))
        super().published()

    def arrived(self, group: Group) -> None:
        super().arrived(group)
        self._push(group)
        self._apply(Occupy(group=group.id, lease=group.number))

    def filtered(self, group: Group) -> None:
        self._push(group)
        self._apply(Release(group=group.id, lease=group.number, why=ReleaseWhy.FILTERED))

    def _push(self, group: Group) -> None:
        self._apply(
            Push(
                group=group.id,
                lease=group.number,
                worker=_name(group.replica),
                shard=0,
                sha=NO_SHA,
                nbytes=0,
                truncated=False,
                segments=tuple(segments_of(group.written)),
                sequence_tokens=0,
            )
        )

    def _apply(self, event: Event) -> bool:
        """Apply an event and keep the batch that it seals; return whether a reservation was granted."""
        effects = self._machine.apply(event, now_ms=0)
        for effect in effects:
            match effect:
                case Joined():
                    self._term = effect.trainer_term
                case Sealed():
                    self._sealed[effect.step] = effect
                case _:
                    pass
        return any(isinstance(effect, Reserved) for effect in effects)


def _name(replica: Replica) -> WorkerId:
    return WorkerId(f"engine-{replica.number}")
