"""The simulated worker keeps to the contract of the real one where a run would hide that it does not."""

from collections.abc import Callable, Sequence

from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Segment, Version, WorkerId
from staleflow.protocols.wire.messages import (
    Abort,
    Assign,
    AttachReply,
    Command,
    Commands,
    Operations,
    Pull,
    Pulled,
    RegisterYield,
    Reply,
    Report,
    Request,
    Result,
    Results,
    Yield,
)
from staleflow.sim.cost import StepCost
from staleflow.sim.engine import SimEngine
from staleflow.sim.instance import SimInstance
from staleflow.sim.sample import Sample
from staleflow.sim.shard import SimShard, segments_of
from staleflow.sim.timeline import Timeline
from staleflow.sim.workload import Workload
from tests.sim.configs import config

ATTACHED = AttachReply(
    run="r",
    config=b"",
    config_sha="",
    run_dir="",
    shards=[],
    parameters="",
    lineage=Lineage(0),
    version=Version(0),
    lease_ms=1,
)


class Alone:
    """An instance whose scheduler is the test. Its first command was to load version 0."""

    def __init__(self, slots: int = 8) -> None:
        self.timeline = Timeline()
        self.said: list[Request] = []
        self.answer: Callable[[Reply], None] = lambda _: None
        self.begun: list[tuple[Version, list[Sample]]] = []
        workload = Workload(config())
        self.shard = SimShard(0, workload, self.timeline, self._ask, reward_s=0.0, describes=False, taken={})
        cost = StepCost(k1=0.0, k2=1.0, k3=0.0, k4=0.0)
        self.engine = SimEngine(self.timeline, cost, slots=slots, on_end=lambda sample: self.instance.ended(sample))
        self.instance = SimInstance(
            WorkerId("rollout-0.0"),
            "rollout-0",
            self.engine,
            workload,
            self.timeline,
            self._ask,
            [self.shard],
            pull_s=0.0,
            load_s=0.0,
            report_s=1.0,
            begun=self.begun,
        )
        self.instance.attach(4)
        self.answer(ATTACHED)
        self.answer(commands(1, Pull(lineage=Lineage(0), version=Version(0))))
        self.timeline.run(lambda: any(isinstance(body, Pulled) for body in self.said))

    def _ask(
        self, body: Request, on_reply: Callable[[Reply], None] = lambda _: None, frames: Sequence[memoryview] = ()
    ) -> None:
        self.said.append(body)
        if not isinstance(body, Pulled):
            self.answer = on_reply

    def report(self) -> Report:
        """The last thing that it said."""
        assert isinstance(self.said[-1], Report)
        return self.said[-1]


def assign(lease: int) -> Assign:
    return Assign(group=GroupId(lease), lease=LeaseId(lease), lineage=Lineage(0), version=Version(0), shard=0)


def commands(first: int, *given: Command) -> Commands:
    return Commands(first=first, commands=list(given), version=Version(0))


def test_a_command_that_is_repeated_is_carried_out_once() -> None:
    alone = Alone()
    alone.answer(commands(2, assign(1), Abort(lease=LeaseId(1)), assign(2)))
    assert (alone.report().ack, alone.report().held) == (4, [2])
    alone.answer(commands(2, assign(1), Abort(lease=LeaseId(1)), assign(2), assign(3)))
    assert (alone.report().ack, alone.report().held) == (5, [2, 3])
    assert len(alone.begun) == 3


def test_an_aborted_group_leaves_the_engine_too() -> None:
    alone = Alone()
    alone.answer(commands(2, assign(1), assign(2)))
    alone.timeline.at(1.0, lambda: None)
    alone.timeline.run(lambda: alone.timeline.now_s >= 1.0)
    assert alone.engine.seen().running == 4
    alone.answer(commands(4, Abort(lease=LeaseId(1))))
    alone.timeline.run(lambda: alone.engine.seen().running < 4)
    assert (alone.engine.seen().running, alone.timeline.now_s, alone.instance.thrown_away) == (2, 1.0, 2)


def test_an_answer_to_an_older_report_is_obeyed_and_not_reported_on() -> None:
    alone = Alone()
    older = alone.answer
    alone.answer(commands(2, Pull(lineage=Lineage(0), version=Version(1))))
    alone.timeline.run(lambda: sum(isinstance(body, Pulled) for body in alone.said) == 2)
    reports = sum(isinstance(body, Report) for body in alone.said)
    older(commands(3, assign(1)))
    assert sum(isinstance(body, Report) for body in alone.said) == reports
    assert len(alone.begun) == 1


def test_a_group_is_handed_over_once_all_of_it_is_out_of_the_engine() -> None:
    alone = Alone(slots=1)  # one of the two samples runs, the other waits
    alone.answer(commands(2, assign(1)))
    alone.timeline.at(1.5, lambda: alone.answer(commands(3, Yield(lease=LeaseId(1)))))
    alone.timeline.run(lambda: isinstance(alone.said[-1], Operations))
    assert alone.timeline.now_s == 2.0
    op = RegisterYield(group=GroupId(1), lease=LeaseId(1), lineage=Lineage(0), version=Version(0), sha="")
    assert alone.said[-1] == Operations(ops=[op])
    alone.answer(Results(results=[Result()]))
    ((_, samples),) = alone.begun
    assert sorted(sample.written for sample in samples) == [0, 2]
    assert alone.shard.partials == {1: samples}


def test_a_worker_that_has_crashed_says_nothing_more() -> None:
    alone = Alone()
    alone.answer(commands(2, assign(1)))
    said = len(alone.said)
    alone.instance.crash()
    alone.answer(commands(3, assign(2)))
    assert (len(alone.said), len(alone.begun)) == (said, 1)


def test_segments_of_a_group_are_summed_by_version_in_order() -> None:
    samples = [Sample(place, 0, (10,)) for place in range(2)]
    for sample, written in zip(samples, (((0, 2, 3), (0, 3, 4)), ((0, 1, 5), (0, 3, 1))), strict=True):
        for lineage, version, tokens in written:
            sample.add(Lineage(lineage), Version(version), tokens)
    assert segments_of(samples) == [
        Segment(Lineage(0), Version(1), 5),
        Segment(Lineage(0), Version(2), 3),
        Segment(Lineage(0), Version(3), 5),
    ]
