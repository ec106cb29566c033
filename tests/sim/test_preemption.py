"""Preemptible engines are lost and return, and a run costs what its engines and its trainer cost while they live."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config
from staleflow.configs.simulation import Fleet, Preemption
from staleflow.sim.peers.run import simulate_peer
from staleflow.sim.simulate import simulate
from staleflow.trace.reader import read_events
from tests.sim.configs import config

FIXED = Fleet(count=2, price=4.0)
TAKEN = Fleet(count=2, price=1.0, preemptible=True)


def losing(*, handover_s: float = 0.0, **preemption: Any) -> Config:
    """Two engines that stay and two that live for 10 s on average."""
    given = config(
        steps=45,
        train_s=0.1,
        fleet=[FIXED, TAKEN],
        preemption=Preemption(per_min=6.0, **{"notice_s": 10.0, "return_s": 6.0, **preemption}),
        trainer_price=10.0,
    )
    return msgspec.structs.replace(given, rollout=msgspec.structs.replace(given.rollout, handover_s=handover_s))


def left(run_dir: Path) -> list[tuple[str, str]]:
    """(engine, reason) of each preemptible engine that detached before the end; "killed" if it did not do so itself."""
    found = [event for event in read_events(run_dir / "trace.jsonl") if event["ev"] == "detach"]
    ends = [(str(event["worker"]).partition(".")[0], event["why"]) for event in found if event["role"] == "rollout"]
    return [(name, why if why == "preempted" else "killed") for name, why in ends if why != "drained"]


@pytest.mark.parametrize(("announced", "why"), [(1.0, "preempted"), (0.0, "killed")])
def test_engines_are_lost_with_or_without_an_announcement_and_return(
    tmp_path: Path, announced: float, why: str
) -> None:
    result = simulate(losing(announced=announced, handover_s=5.0), run_dir=tmp_path)
    assert (len(result.steps), result.violations) == (45, 0)
    assert len(left(tmp_path)) >= 2
    assert set(left(tmp_path)) <= {("rollout-2", why), ("rollout-3", why)}
    lives = [engine for engine in result.engines if engine.name.startswith(("rollout-2", "rollout-3"))]
    assert len(lives) > 2
    again = simulate(losing(announced=announced, handover_s=5.0))
    assert (again.trace_hash, [one.ended_s for one in again.engines]) == (
        result.trace_hash,
        [one.ended_s for one in result.engines],
    )


def test_an_announced_loss_costs_no_tokens_if_the_engine_hands_its_groups_over() -> None:
    kept, lost, crashed = (
        simulate(given) for given in (losing(handover_s=8.0), losing(), losing(announced=0.0, handover_s=8.0))
    )
    assert kept.discarded < 0.2 * lost.discarded
    assert crashed.discarded > kept.discarded


def test_an_engine_that_hands_over_for_longer_than_its_notice_is_killed(tmp_path: Path) -> None:
    alone = msgspec.structs.replace(TAKEN, count=1)  # no other engine takes its groups
    given = losing(handover_s=60.0, notice_s=0.5)
    given = msgspec.structs.replace(given, simulation=msgspec.structs.replace(given.simulation, fleet=[alone]))
    simulate(given, run_dir=tmp_path)
    assert ("rollout-0", "killed") in left(tmp_path)


def test_a_step_costs_what_engines_and_trainer_cost_meanwhile() -> None:
    given = config(steps=12, fleet=[FIXED], trainer_price=10.0)
    result = simulate(given)
    assert result.cost_per_step == pytest.approx((2 * 4.0 + 10.0) / 60.0 / result.steps_per_min)
    assert result.cost_per_1000 == pytest.approx(1000.0 * result.cost_per_step / (4 * 2))
    peer = simulate_peer("verl", given)
    assert peer.cost_per_step == pytest.approx((2 * 4.0 + 10.0) / 60.0 / peer.steps_per_min)
    assert simulate(config(steps=2)).cost_per_step == 0.0


def test_an_engine_costs_nothing_while_it_is_away() -> None:
    result = simulate(losing(announced=0.0))
    assert result.cost_per_step < (2 * 4.0 + 2 * 1.0 + 10.0) / 60.0 / result.steps_per_min
    assert result.cost_per_step > (2 * 4.0 + 10.0) / 60.0 / result.steps_per_min


def test_machines_that_are_launched_share_their_price_among_their_engines() -> None:
    given = config(steps=4, engines=4)
    launch = msgspec.structs.replace(given.launch, rollout_nodes=2, rollout_price=6.0, trainer_nodes=3, trainer_price=5)
    result = simulate(msgspec.structs.replace(given, launch=launch))
    assert result.cost_per_step == pytest.approx((2 * 6.0 + 3 * 5.0) / 60.0 / result.steps_per_min)


def test_losses_need_an_engine_that_may_be_lost_and_a_run_of_this_service() -> None:
    given = config(fleet=[FIXED], preemption=Preemption(per_min=0.1))
    with pytest.raises(ConfigError, match=r"simulation\.preemption\.per_min is 0\.1; no engine .* is preemptible"):
        simulate(given)
    with pytest.raises(
        ConfigError, match=r"simulation\.preemption\.per_min is 6\.0; 0: the engines of peers never fail"
    ):
        simulate_peer("verl", losing())
