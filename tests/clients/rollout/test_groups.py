"""A group in progress keeps its samples when it leaves an instance and another instance continues it."""

import asyncio
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from staleflow.clients.evaluation.player import sampling_of
from staleflow.clients.rollout.engines.base import Engine, Sampling
from staleflow.clients.rollout.engines.simulated import SimulatedEngine
from staleflow.clients.rollout.groups import (
    ActiveLease,
    GroupSamples,
    PartialGroup,
    Recipe,
    interrupt,
    leave,
    payload,
    trajectories,
)
from staleflow.clients.texts import ids_as_text
from staleflow.configs.evals import EvalSet
from staleflow.configs.schema import Rollout
from staleflow.configs.simulation import Simulated
from staleflow.protocols.consistency.ids import LeaseId, Lineage, Version
from staleflow.protocols.wire.trajectory import Finish, GroupPayload
from tests.clients.rollout.engines.transformers.stepped import Stepped, settled
from tests.clients.rollout.peers import assign

PROMPT = np.array([5, 6, 7], np.int32)
V1 = (Lineage(0), Version(1))
V2 = (Lineage(0), Version(2))


def simulated(version: int = 1, slots: int = 16) -> SimulatedEngine:
    """An engine that generates samples of about 40 tokens, each of a different length, without delay."""
    engine = SimulatedEngine(Simulated(mean_tokens=40, sigma=0.8, k2=0.0, k3=0.0), slots=slots, sleep=lambda _: None)
    engine.load({}, Lineage(0), Version(version))
    return engine


def transformer(version: int = 1, seed: int = 0, slots: int = 8, **more: Any) -> Any:
    pytest.importorskip("torch")
    from staleflow.clients.rollout.engines.transformers.engine import TransformersEngine
    from tests.clients.rollout.engines.transformers.test_engine import build

    return TransformersEngine(build("qwen3", seed), stop_ids=[1], slots=slots, version=version, **more)


def recipe(started: int = 4, most: int = 60) -> Recipe:
    return Recipe(group_size=4, started=started, sampling=Sampling(max_new_tokens=most), seed=3)


class Scene:
    """Lease 7 of a group at one engine, which generates tokens only at the test's command."""

    def __init__(
        self, engine: Engine, how: Recipe | None = None, lease: int = 7, begun: PartialGroup | None = None
    ) -> None:
        self.engine = Stepped(engine)
        self.held = ActiveLease(assign(1, lease))
        self.samples = GroupSamples(self.engine, self.held, PROMPT, how or recipe(), begun)
        self.going = asyncio.ensure_future(self.samples.run())

    async def left_after(self, steps: int) -> PartialGroup:
        """Leave after ``steps`` tokens."""
        await self.engine.steps(steps)
        leave(self.engine, self.held)
        await self.engine.steps()
        assert await self.going is False
        return self.samples.partial()

    async def done(self) -> GroupPayload:
        await self.engine.until_idle()
        assert await self.going is True
        return self.samples.payload()

    def stay(self) -> None:
        """Continue here, because the group could not leave."""
        self.held.leaving = False
        self.going = asyncio.ensure_future(self.samples.run())


def same(one: GroupPayload, other: GroupPayload, but: str = "") -> None:
    for name in GroupPayload.__slots__:
        if name not in ("stages", but):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


async def test_a_group_that_moved_is_the_group_that_stayed() -> None:
    stayed = await Scene(simulated()).done()
    begun = await Scene(simulated()).left_after(steps=20)
    assert begun.origin == 7
    assert 0 < begun.payload.num_tokens < stayed.num_tokens
    moved = await Scene(simulated(), lease=9, begun=begun).done()
    same(moved, stayed)
    assert moved.finish.tolist() == [Finish.STOP] * 4


async def test_a_group_that_moved_twice_keeps_its_first_origin() -> None:
    stayed = await Scene(simulated()).done()
    first = await Scene(simulated()).left_after(steps=5)
    second = await Scene(simulated(), lease=9, begun=first).left_after(steps=5)
    assert second.origin == 7
    same(await Scene(simulated(), lease=12, begun=second).done(), stayed)


async def test_a_real_model_goes_on_with_the_tokens_as_they_were_first_sampled() -> None:
    """The weights are equal, so the tokens match those of a group that stayed; written tokens keep their
    log-probabilities bit by bit."""
    stayed = await Scene(transformer(), recipe(most=24)).done()
    begun = await Scene(transformer(), recipe(most=24)).left_after(steps=6)
    moved = await Scene(transformer(), recipe(most=24), lease=9, begun=begun).done()
    same(moved, stayed, but="logprobs")
    np.testing.assert_allclose(moved.logprobs, stayed.logprobs, atol=1e-4)  # one prefill pass read the prefix
    first = np.cumsum([0, *moved.lengths])
    starts = np.cumsum([0, *begun.payload.lengths])
    for sample, (start, end) in enumerate(pairwise(starts)):
        written = slice(first[sample], first[sample] + end - start)
        np.testing.assert_array_equal(moved.logprobs[written], begun.payload.logprobs[start:end])


def test_every_sampling_setting_of_the_run_reaches_training_and_evaluation() -> None:
    set_ones: dict[str, Any] = {"top_p": 0.9, "top_k": 20, "min_p": 0.1, "temperature": 0.7, "max_new_tokens": 9}
    penalties: dict[str, Any] = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": -0.5}
    rollout = Rollout(group_size=2, stop=["x"], **set_ones, **penalties)
    training = Sampling.of(rollout)
    assert asdict(training) == {**set_ones, **penalties, "stop": ("x",)}
    assert sampling_of(EvalSet(name="held_out", **set_ones), rollout) == training


async def test_a_group_that_moved_continues_with_the_same_sampling() -> None:
    """Penalty and stop strings depend on the tokens that the earlier instance wrote."""
    sampling = Sampling(max_new_tokens=24, top_p=0.9, top_k=20, min_p=0.01, repetition_penalty=1.5, stop=("7 ",))
    sampling = replace(sampling, frequency_penalty=0.5, presence_penalty=0.5)
    how = replace(recipe(), sampling=sampling)
    stayed = await Scene(transformer(decode=ids_as_text), how).done()
    begun = await Scene(transformer(decode=ids_as_text), how).left_after(steps=4)
    moved = await Scene(transformer(decode=ids_as_text), how, lease=9, begun=begun).done()
    same(moved, stayed, but="logprobs")
    np.testing.assert_allclose(moved.logprobs, stayed.logprobs, atol=1e-4)


@pytest.mark.parametrize("kind", ["simulated", "transformers"])
async def test_what_newer_weights_go_on_with_is_a_segment_of_its_own(kind: str) -> None:
    first, second = (simulated(1), simulated(2)) if kind == "simulated" else (transformer(1), transformer(2, seed=1))
    begun = await Scene(first, recipe(most=24)).left_after(steps=4)
    assert begun.newest() == V1
    moved = await Scene(second, recipe(most=24), lease=9, begun=begun).done()
    written, rows = begun.payload.lengths, moved.segments
    for sample in range(4):
        mine = [tuple(row[1:]) for row in rows.tolist() if row[0] == sample]
        rest = int(moved.lengths[sample] - written[sample])
        assert mine == [(*V1, int(written[sample]))] + ([(*V2, rest)] if rest else [])
    assert moved.segment_summary()[0] == (*V1, begun.payload.num_tokens)


async def test_segments_of_three_instances_stay_three_segments() -> None:
    first = await Scene(simulated(1)).left_after(steps=4)
    second = await Scene(simulated(2), lease=9, begun=first).left_after(steps=4)
    same(payload(PROMPT, trajectories(second.payload)), second.payload)
    moved = await Scene(simulated(4), lease=12, begun=second).done()
    rows = [(*V1, 5), (*V2, 5), (Lineage(0), Version(4), int(moved.lengths[0]) - 10)]
    assert [tuple(row[1:]) for row in moved.segments.tolist() if row[0] == 0] == rows


@pytest.mark.parametrize("kind", ["simulated", "transformers"])
async def test_samples_that_wait_for_a_slot_leave_at_once_and_empty(kind: str) -> None:
    scene = Scene(simulated(slots=2) if kind == "simulated" else transformer(slots=2))
    begun = await scene.left_after(steps=3)
    assert sorted(begun.payload.lengths.tolist())[:2] == [0, 0]
    assert begun.payload.finish.tolist() == [Finish.INTERRUPTED] * 4
    assert scene.engine.stats().running == scene.engine.stats().waiting == 0
    if kind == "simulated":
        same(await Scene(simulated(), lease=9, begun=begun).done(), await Scene(simulated()).done())


async def test_what_has_ended_is_not_written_again() -> None:
    begun = await Scene(simulated()).left_after(steps=30)
    ended = [n for n, finish in enumerate(begun.payload.finish) if finish == Finish.STOP]
    assert 0 < len(ended) < 4
    scene = Scene(simulated(), lease=9, begun=begun)
    moved = await scene.done()
    assert len(scene.engine.given) == 4 - len(ended)
    assert [int(moved.lengths[n]) for n in ended] == [int(begun.payload.lengths[n]) for n in ended]


@pytest.mark.parametrize("steps", [4, 12, 20])
async def test_redundant_samples_travel_along_and_the_first_to_end_are_the_group(steps: int) -> None:
    """Six samples start and four are needed: the group is the first four to finish, wherever they did; the other two
    add nothing."""
    stayed = await Scene(simulated(), recipe(started=6)).done()
    begun = await Scene(simulated(), recipe(started=6)).left_after(steps)
    assert begun.payload.num_samples == 6
    moved = await Scene(simulated(), recipe(started=6), lease=9, begun=begun).done()
    same(moved, stayed)
    assert moved.finish.tolist() == [Finish.STOP] * 4


async def test_a_group_that_is_done_before_it_could_leave_stays() -> None:
    scene = Scene(simulated())
    await scene.engine.until_idle()
    leave(scene.engine, scene.held)
    assert await scene.going is True
    assert scene.samples.payload().finish.tolist() == [Finish.STOP] * 4


async def test_what_could_not_leave_goes_on_under_the_same_lease() -> None:
    scene = Scene(simulated())
    await scene.left_after(steps=10)
    scene.stay()
    same(await scene.done(), await Scene(simulated()).done())


async def test_told_to_leave_before_it_began_it_begins_nothing() -> None:
    engine = Stepped(simulated())
    held = ActiveLease(assign(1, 7), leaving=True)
    samples = GroupSamples(engine, held, PROMPT, recipe())
    assert await samples.run() is False
    assert engine.given == []
    begun = samples.partial()
    assert (begun.newest(), begun.payload.lengths.tolist()) == (None, [0] * 4)
    begun.payload.check()
    same(await Scene(simulated(), lease=9, begun=begun).done(), await Scene(simulated()).done())


async def test_an_interrupt_on_the_way_out_ends_the_group_here() -> None:
    """The group is ordered to leave, then to finish with its tokens so far: each sample has at least one, and none gets
    more."""
    scene = Scene(simulated(slots=2))
    await scene.engine.steps(3)
    leave(scene.engine, scene.held)
    interrupt(scene.engine, scene.held)
    cut = await scene.done()
    assert cut.finish.tolist() == [Finish.INTERRUPTED] * 4
    assert sorted(cut.lengths.tolist()) == [1, 1, 4, 4]


async def test_an_interrupt_after_a_move_takes_what_there_is_without_another_token() -> None:
    begun = await Scene(simulated()).left_after(steps=5)
    engine = Stepped(simulated())
    held = ActiveLease(assign(1, 9), interrupted=True)
    samples = GroupSamples(engine, held, PROMPT, recipe(), begun)
    assert await samples.run() is True
    assert engine.given == []
    same(samples.payload(), begun.payload)


@pytest.mark.parametrize("other", ["a prompt", "a recipe"])
async def test_what_was_begun_for_another_prompt_or_recipe_is_left_aside(other: str) -> None:
    begun = await Scene(simulated()).left_after(steps=5)
    held, engine = ActiveLease(assign(1, 9)), Stepped(simulated())
    prompt, how = (PROMPT + 1, recipe()) if other == "a prompt" else (PROMPT, recipe(started=5))
    samples = GroupSamples(engine, held, prompt, how, begun)
    going = asyncio.ensure_future(samples.run())
    await settled()
    assert [request.prefix for request in engine.given] == [()] * how.started
    assert samples.origin == LeaseId(9)
    going.cancel()
    await asyncio.gather(going, return_exceptions=True)


async def test_samples_come_back_from_their_columns() -> None:
    begun = await Scene(simulated(slots=2)).left_after(steps=3)
    same(payload(PROMPT, trajectories(begun.payload)), begun.payload)
