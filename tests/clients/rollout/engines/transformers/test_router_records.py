# pyright: basic, reportMissingImports=false
"""The engine records the experts of the pass that sampled each token, over updates, moves and rows that end."""

from typing import Any

import numpy as np
import torch

from staleflow.clients.models.routers import Routers
from staleflow.clients.rollout.engines.base import Request, Sampling, TokenSegment, Trajectory
from staleflow.clients.rollout.engines.transformers.engine import TransformersEngine
from staleflow.clients.rollout.groups import payload, trajectories
from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.routed_experts import COLUMN, NAME
from staleflow.protocols.wire.tensors import pack, unpack
from staleflow.protocols.wire.trajectory import Finish, GroupPayload
from tests.clients.rollout.engines.transformers.test_engine import ask, build, prompts, run


def chosen(model: Any, prompt: list[int], tokens: list[int]) -> Any:
    """Experts of each token by one pass over all of them: [tokens, layers, experts per token]."""
    fresh = build("qwen3_moe")
    fresh.load_state_dict(model.state_dict())
    with torch.inference_mode(), Routers(fresh).recording() as layers:
        fresh(input_ids=torch.tensor([[*prompt, *tokens]]))
    return torch.stack(layers, 1)[len(prompt) - 1 : -1].numpy()


def experts(segments: tuple[TokenSegment, ...]) -> Any:
    return np.concatenate([segment.columns[NAME] for segment in segments])


def engine_of(model: Any, **more: Any) -> TransformersEngine:
    return TransformersEngine(model, [3], routers=Routers(model), **more)


def test_records_are_the_experts_of_a_whole_pass_while_rows_join_and_end() -> None:
    """Prompts of several lengths share a prefill, and rows move into those of samples that ended."""
    model = build("qwen3_moe")
    engine = engine_of(model, slots=4)
    asked = dict(enumerate(prompts(9)))
    asked[9] = asked[0]
    for number, prompt in asked.items():
        engine.submit(ask(number, prompt, tokens=4 + 11 * number % 70))
    done = run(engine)
    assert len({len(trajectory.token_ids) for trajectory in done.values()}) > 5
    for number, trajectory in done.items():
        recorded = experts(trajectory.segments)
        assert recorded.dtype == np.uint8
        assert np.array_equal(recorded, chosen(model, asked[number], trajectory.token_ids.tolist()))


def test_an_update_ends_the_records_of_the_old_weights() -> None:
    model, newer = build("qwen3_moe"), build("qwen3_moe", seed=1)
    engine = engine_of(model, slots=2, version=4, recompute=True)
    prompt = [5, 6, 7]
    engine.submit(ask(0, prompt, tokens=20, seed=5))
    for _ in range(8):
        assert engine.step() == []
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine.load({name: tensor.numpy() for name, tensor in newer.state_dict().items()}, Lineage(0), Version(5))
    first, second = run(engine)[0].segments
    assert (first.version, second.version) == (4, 5)
    tokens = [*first.token_ids.tolist(), *second.token_ids.tolist()]
    assert np.array_equal(second.columns[NAME], chosen(newer, prompt, tokens)[len(first.token_ids) :])
    older = build("qwen3_moe")
    older.load_state_dict(before)
    assert np.array_equal(first.columns[NAME], chosen(older, prompt, tokens)[: len(first.token_ids)])
    assert not np.array_equal(chosen(older, prompt, tokens), chosen(newer, prompt, tokens)), "the weights matter"


def test_a_sample_that_moves_keeps_its_records_and_continues_them() -> None:
    """Through a stored partial group, as another worker receives it."""
    prompt, model, newer = [5, 6, 7], build("qwen3_moe"), build("qwen3_moe", seed=1)
    engine = engine_of(model, slots=2, version=4)
    engine.submit(ask(0, prompt, tokens=20, seed=5))
    for _ in range(8):
        engine.step()
    engine.interrupt(0)
    (begun,) = engine.step()
    untouched = Trajectory(id=1, segments=(), finish=Finish.INTERRUPTED)
    partial = payload(np.array(prompt, np.int32), [begun, untouched], [COLUMN], unfinished=True)
    moved = trajectories(GroupPayload.from_arrays(unpack(pack(partial.to_arrays()))), [COLUMN])

    other = engine_of(newer, slots=2, version=5)
    for sample in moved:
        request = Request(
            id=sample.id,
            prompt_ids=np.array(prompt, np.int32),
            sampling=Sampling(max_new_tokens=20),
            seed=5,
            prefix=sample.segments,
        )
        other.submit(request)
    done = run(other)
    kept, continued = done[0].segments
    assert np.array_equal(kept.columns[NAME], experts(begun.segments))
    tokens = [*kept.token_ids.tolist(), *continued.token_ids.tolist()]
    assert np.array_equal(continued.columns[NAME], chosen(newer, prompt, tokens)[len(kept.token_ids) :])
    whole = payload(np.array(prompt, np.int32), [done[0], done[1]], [COLUMN])
    assert np.array_equal(
        whole.columns[COLUMN.key], np.concatenate([experts(done[0].segments), experts(done[1].segments)])
    )
