"""The engine without a model follows the cost model, draws lengths and tokens by seed, and keeps every engine's
contract."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from staleflow.clients.rollout.engines.base import Request, RequestError, Sampling, Trajectory
from staleflow.clients.rollout.engines.simulated import SimulatedEngine
from staleflow.configs.simulation import Simulated
from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.trajectory import Finish


class Clock:
    """A clock that advances only in ``sleep``."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def build(clock: Clock | None = None, *, slots: int = 4, seed: int = 0, **cost: Any) -> SimulatedEngine:
    clock = clock or Clock()
    return SimulatedEngine(Simulated(**cost), slots=slots, seed=seed, now=clock.now, sleep=clock.sleep)


def ask(id: int, prompt: str = "1+1=", seed: int | None = None, tokens: int = 1000) -> Request:
    prompt_ids = np.frombuffer(prompt.encode(), np.uint8).astype(np.int32)
    return Request(
        id=id, prompt_ids=prompt_ids, sampling=Sampling(max_new_tokens=tokens), seed=id if seed is None else seed
    )


def run(engine: SimulatedEngine) -> dict[int, Trajectory]:
    done: dict[int, Trajectory] = {}
    while engine.stats().running or engine.stats().waiting:
        done.update((trajectory.id, trajectory) for trajectory in engine.step())
    return done


def test_a_step_lasts_what_the_cost_model_says() -> None:
    clock = Clock()
    engine = build(clock, k1=0.001, k2=0.5, k3=0.2, k4=0.1, sigma=0, mean_tokens=10)
    for id in range(3):
        engine.submit(ask(id))
    before = clock.now_s
    engine.step()
    assert clock.now_s - before == pytest.approx(0.001 * 3 * 3 + 0.2 * 3 + 0.1)  # the cache has 3 tokens of each prompt
    engine.abort(1)
    engine.abort(2)
    before = clock.now_s
    engine.step()
    assert clock.now_s - before == pytest.approx(0.001 * 4 + 0.5 + 0.1)


def test_its_counters_tell_what_a_step_costs() -> None:
    """The difference of two readings (tokens, steps, seconds) gives the number of running requests and the time of a
    step."""
    engine = build(slots=2, sigma=0, mean_tokens=10)
    for id in range(3):
        engine.submit(ask(id))
    engine.step()
    engine.step()
    seen = engine.stats()
    assert (seen.running, seen.waiting, seen.slots, seen.steps, seen.generated_tokens) == (2, 1, 2, 2, 4)
    assert seen.kv_tokens == 2 * (4 + 1)  # the newest token is not in the cache yet
    assert seen.kv_used == pytest.approx(seen.kv_tokens / seen.kv_capacity)


def test_time_that_a_sleep_overshot_is_caught_up() -> None:
    clock = Clock()
    engine = build(clock, k1=0, k2=1.0, sigma=0, mean_tokens=10)
    engine.submit(ask(0))
    engine.step()
    clock.now_s += 0.4
    before = clock.now_s
    engine.step()
    assert clock.now_s - before == pytest.approx(0.6)


def test_lengths_are_lognormal_and_half_of_their_spread_belongs_to_the_prompt() -> None:
    engine = build(mean_tokens=200, sigma=0.8)
    lengths = np.array([[engine.length(ask(s, f"{p}=", 1000 * p + s, 10**6)) for s in range(20)] for p in range(300)])
    logs = np.log(lengths)
    assert lengths.mean() == pytest.approx(200, rel=0.1)
    assert logs.std() == pytest.approx(0.8, rel=0.1)
    assert logs.mean(axis=1).var() == pytest.approx(0.8**2 / 2, rel=0.25)


def test_the_same_seed_writes_the_same_tokens_whoever_else_is_in_the_batch() -> None:
    alone, crowded = build(slots=1), build(slots=8)
    for id in range(5):
        alone.submit(ask(id))
        crowded.submit(ask(id))
        crowded.submit(ask(100 + id))
    first, second = run(alone), run(crowded)
    for id in range(5):
        assert first[id].token_ids.tolist() == second[id].token_ids.tolist()
    assert first[0].token_ids.tolist() != first[1].token_ids.tolist()
    assert build(seed=1).length(ask(0)) != build(seed=2).length(ask(0))


def test_a_trajectory_ends_with_a_stop_token_or_at_its_limit() -> None:
    engine = build(sigma=0, mean_tokens=10)
    engine.submit(ask(0))
    engine.submit(ask(1, tokens=4))
    done = run(engine)
    assert (len(done[0].token_ids), done[0].finish, done[0].token_ids[-1]) == (10, Finish.STOP, 0)
    assert (len(done[1].token_ids), done[1].finish) == (4, Finish.LENGTH)
    assert 0 not in done[1].token_ids


def test_new_weights_begin_a_new_segment() -> None:
    engine = build(sigma=0, mean_tokens=6)
    engine.load({}, Lineage(0), Version(0))
    engine.submit(ask(0))
    engine.step()
    engine.load({}, Lineage(0), Version(3))
    assert [(s.version, len(s.token_ids)) for s in run(engine)[0].segments] == [(0, 1), (3, 5)]


def test_an_interrupt_keeps_the_tokens_and_an_abort_forgets_them() -> None:
    engine = build(slots=3, sigma=0, mean_tokens=50)
    for id in range(4):
        engine.submit(ask(id))
    engine.step()
    engine.interrupt(1)
    engine.abort(2)
    engine.interrupt(3)  # starts in the row that became free
    assert [(t.id, len(t.token_ids), t.finish) for t in engine.step()] == [
        (1, 2, Finish.INTERRUPTED),
        (3, 1, Finish.INTERRUPTED),
    ]
    assert sorted(run(engine)) == [0]


def test_an_interrupted_request_that_waits_for_a_row_ends_after_its_first_token() -> None:
    engine = build(slots=1, sigma=0, mean_tokens=5)
    for id in range(3):
        engine.submit(ask(id))
    engine.step()
    engine.interrupt(2)
    assert [(t.id, len(t.token_ids), t.finish) for _ in range(5) for t in engine.step()] == [
        (0, 5, Finish.STOP),
        (2, 1, Finish.INTERRUPTED),
    ]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        build().submit(ask(0, ""))


def test_the_worker_with_this_engine_imports_no_torch() -> None:
    code = "import sys, staleflow.clients.rollout.main; sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
