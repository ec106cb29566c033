"""Measure each step, recommend, and follow the recommendation where ``rollout.elastic`` allows it."""

import logging
from collections.abc import Callable, Mapping

from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.coordination.admission import Step
from staleflow.protocols.coordination.recommend import Action, Advisor
from staleflow.protocols.coordination.view import Cost
from staleflow.protocols.wire.messages.status import Recommendation
from staleflow.servers.scheduler.elastic.balance import Balance
from staleflow.servers.scheduler.elastic.wanted_workers import WantedWorkers
from staleflow.servers.scheduler.state import SchedulerState

log = logging.getLogger(__name__)

TRAIN = "time/train"
"""Metric of the trainer: the computation of a step, which its ranks divide among them."""


class ElasticControl:
    """The scheduler's view of how many engines the run needs."""

    def __init__(self, state: SchedulerState, cost_of: Callable[[WorkerId], Cost | None], *, new_session: bool) -> None:
        """``cost_of``: returns the cost model of an instance; None without one. ``new_session``: as for
        ``WantedWorkers``."""
        self._balance = Balance(state.config, state.instances, cost_of)
        self._advisor = Advisor()
        self._workers = WantedWorkers(state, new_session=new_session)
        self._logged: tuple[Action | None, int] = None, 0

    @property
    def recommendation(self) -> Recommendation:
        """The stable recommendation; one that is followed stays until the engines have changed."""
        newest = self._advisor.newest
        return Recommendation(
            action=newest.action or "",
            count=newest.count,
            sentence=newest.sentence,
            steps_per_min=newest.steps_per_min,
            expected_steps_per_min=newest.expected_steps_per_min,
        )

    @property
    def wanted(self) -> tuple[str, ...]:
        """Names of the rollout workers that should run; empty: all that were started."""
        return self._workers.wanted

    def step(self, step: Step, version: int, now_ms: int) -> None:
        """Take the times of a step into account. ``version``: the version that ended it."""
        measured = self._balance.step(step, version, now_ms)
        if measured is None:
            self._advisor.forget()
            return
        advice = self._advisor.update(measured)
        change = advice.action, advice.count
        if change != self._logged and advice.action:
            self._logged = change
            log.info("recommendation: %s", advice.sentence)
        self._workers.follow(advice, measured.engines)

    def tick(self) -> None:
        """Let workers leave that are no longer wanted."""
        self._workers.release_unwanted()

    def add(self, values: Mapping[str, float]) -> dict[str, float]:
        """Note the trainer's metrics of a step; return them with the scheduler's shares and recommendation."""
        if TRAIN not in values:
            return dict(values)
        self._balance.trained(values[TRAIN])
        last, newest = self._balance.last, self._advisor.newest
        own: dict[str, float] = {}
        if last is not None and last.seconds > 0:
            own["elastic/starved"] = last.starved / last.seconds
            own["elastic/blocked"] = last.blocked / last.seconds
            own["elastic/pinned"] = last.pinned / last.seconds
        if newest.action:
            signs = {Action.ADD: 1, Action.REMOVE: -1}
            own["elastic/engines"] = signs.get(newest.action, 0) * newest.count
            own["elastic/expected_steps_per_min"] = newest.expected_steps_per_min
        return own | dict(values)
