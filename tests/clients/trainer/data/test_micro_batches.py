# pyright: basic, reportMissingImports=false
"""A step in pieces equals the step of the whole batch, bit by bit where the passes are equal, also after a restart."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.clients.trainer.backends.base import StepResult, Stopped
from staleflow.clients.trainer.backends.simulated import SimulatedTrainer
from staleflow.clients.trainer.data.batch import FetchedGroup, TrainBatch, assemble
from staleflow.clients.trainer.data.micro_batches import MicroBatch, concatenated
from staleflow.clients.trainer.steps import ComputedStep, StreamedSteps, WholeSteps
from staleflow.clients.trainer.torch_trainer import TorchTrainer
from staleflow.protocols.consistency.ids import GroupId, Step
from tests.clients.trainer.making import batch, config, header, members, payload

LONGEST_FIRST, TWO_ROWS = ((12, 11), (11, 10), (9, 9), (8, 8)), 30
"""Lengths of four groups, and ``micro_tokens``: with the longest rows first, each pass of the whole batch is one
group."""

EVERY: tuple[dict[str, Any], ...] = (
    {},
    {"advantage": "dr_grpo"},
    {"loss": "gspo", "correction": "none"},
    {"advantage": "rloo"},
    {"kl_coef": 0.1},
)


def going_on() -> bool:
    return False


def groups(step: int, lengths: tuple[tuple[int, ...], ...]) -> list[FetchedGroup]:
    made = []
    for number, of in enumerate(lengths):
        one = payload(100 * step + number, list(of))
        one.stages["stage/reference/logprobs"] = -np.linspace(1.0, 3.0, sum(of)).astype(np.float32)
        made.append(FetchedGroup(group=GroupId(number), row={"place": number}, payload=one))
    return made


def pieces(step: int, fetched: list[FetchedGroup], size: int) -> Iterator[MicroBatch]:
    starts = range(0, len(fetched), size)
    for start in starts:
        data = assemble(header(step), fetched[start : start + size])
        last = header(step) if start == starts[-1] else None
        yield MicroBatch(data=data, first=start == 0, batch=last, header=header(step))


class Served:
    """A client whose batches are available immediately, whole or in pieces."""

    waited_s = 0.25

    def __init__(self, steps: list[list[FetchedGroup]]) -> None:
        self._steps = steps

    def batches(self, steps: int) -> Iterator[TrainBatch]:
        for step in range(steps):
            yield assemble(header(step), self._steps[step])

    def stream(self, steps: int, *, size: int) -> Iterator[MicroBatch]:
        for step in range(steps):
            yield from pieces(step, self._steps[step], size)


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def copied(trainer: TorchTrainer | SimulatedTrainer) -> dict[str, Any]:
    return {name: array.copy() for name, array in trainer.weights().items()}


def ran(steps: Any, client: Any, count: int) -> list[ComputedStep]:
    return list(steps(client, count, going_on))


@pytest.mark.parametrize("algorithm", EVERY, ids=str)
def test_streamed_steps_leave_the_same_bits_as_whole_ones(model_directory: Path, algorithm: dict[str, Any]) -> None:
    settings = config(batch_size=4, micro_tokens=TWO_ROWS, algorithm=algorithm)
    client = Served([groups(step, LONGEST_FIRST) for step in range(3)])
    whole, streamed = TorchTrainer(settings, model_directory), TorchTrainer(settings, model_directory)
    every = ran(WholeSteps(whole), client, 3)
    parts = ran(StreamedSteps(streamed, 1), client, 3)
    assert same(copied(whole), copied(streamed))
    assert [one.result.values for one in every] == [one.result.values for one in parts]
    assert (every[0].waited_s, parts[0].waited_s) == (0.25, 4 * 0.25)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_another_cut_moves_the_weights_by_rounding_only(model_directory: Path, size: int) -> None:
    settings = config(batch_size=5)
    client = Served([groups(0, ((2, 9), (12, 1), (5, 5), (7, 3), (8, 8)))])
    whole, streamed = TorchTrainer(settings, model_directory), TorchTrainer(settings, model_directory)
    (every,), (parts,) = ran(WholeSteps(whole), client, 1), ran(StreamedSteps(streamed, size), client, 1)
    found = copied(streamed)
    for name, array in copied(whole).items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=2e-6)
    assert parts.result.values == pytest.approx(every.result.values, rel=1e-4, abs=1e-6)


def test_a_step_that_begins_again_forgets_what_it_had(model_directory: Path) -> None:
    settings = config(batch_size=3)
    fetched = groups(0, ((2, 9), (12, 1), (5, 5)))

    class Again(Served):
        def stream(self, steps: int, *, size: int) -> Iterator[MicroBatch]:
            lost = assemble(header(0), groups(7, ((4, 4), (6, 2))))
            yield MicroBatch(data=lost, first=True, batch=None, header=header(0))
            yield from pieces(0, fetched, size)

    once, again = TorchTrainer(settings, model_directory), TorchTrainer(settings, model_directory)
    (straight,) = ran(StreamedSteps(once, 1), Served([fetched]), 1)
    (restarted,) = ran(StreamedSteps(again, 1), Again([]), 1)
    assert same(copied(once), copied(again))
    assert straight.result.values == restarted.result.values
    assert restarted.batch.group_ids.tolist() == [0, 0, 1, 1, 2, 2]


def test_a_step_that_is_stopped_in_the_middle_leaves_the_weights_and_no_gradient(model_directory: Path) -> None:
    trainer = TorchTrainer(config(batch_size=2), model_directory)
    before = copied(trainer)
    first, second = pieces(0, groups(0, ((2, 9), (12, 1))), 1)
    trainer.begin()
    trainer.add(first.data, going_on, last=False)
    with pytest.raises(Stopped):
        trainer.add(second.data, lambda: True, last=True)
    assert same(before, copied(trainer))
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_joined_pieces_are_the_batch(size: int) -> None:
    fetched = groups(3, ((2, 9), (12, 1), (0, 5)))
    whole = assemble(header(3), fetched)
    found = concatenated([piece.data for piece in pieces(3, fetched, size)], header(3))
    for name in TrainBatch.__slots__:
        left, right = getattr(whole, name), getattr(found, name)
        if isinstance(left, dict):
            assert same(left, right)
        elif isinstance(left, np.ndarray):
            assert np.array_equal(left, right), name
            assert left.dtype == right.dtype, name
        else:
            assert left == right, name


def test_a_stage_column_that_one_piece_lacks_is_empty_there() -> None:
    fetched = groups(3, ((2, 9), (12, 1)))
    del fetched[1].payload.stages["stage/reference/logprobs"]
    fetched[0].payload.stages["stage/judge/score"] = np.array([0.25, 0.5], np.float32)
    found = concatenated([piece.data for piece in pieces(3, fetched, 1)], header(3))
    whole = assemble(header(3), fetched)
    assert same(found.token_stages, whole.token_stages)
    np.testing.assert_equal(found.sample_stages, whole.sample_stages)


def test_a_simulated_trainer_makes_the_same_weights_of_pieces() -> None:
    client = Served([members(step) for step in range(4)])
    whole, streamed = SimulatedTrainer(0.0, 3), SimulatedTrainer(0.0, 3)
    ran(WholeSteps(whole), client, 4)
    ran(StreamedSteps(streamed, 2), client, 4)
    assert same(copied(whole), copied(streamed))


def test_a_bad_step_in_pieces_changes_nothing(model_directory: Path) -> None:
    trainer = TorchTrainer(config(batch_size=3), model_directory)
    before = copied(trainer)
    fetched = members(0)
    fetched[1].payload.logprobs[:] = np.nan
    (computed,) = ran(StreamedSteps(trainer, 1), Served([fetched]), 1)
    assert computed.result.bad == "loss is nan"
    assert same(before, copied(trainer))
    good: StepResult = trainer.train(batch(1), Step(1), going_on)
    assert good.bad == ""
