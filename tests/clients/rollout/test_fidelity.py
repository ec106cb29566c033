# pyright: basic, reportMissingImports=false
"""The embedded engine and the trainer agree on log-probabilities across every load of weights."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from staleflow.clients.rollout.engines.base import Sampling
from staleflow.clients.rollout.engines.transformers.engine import TransformersEngine, generate
from staleflow.protocols.consistency.ids import Lineage, Version
from tests.clients.rollout.fidelity import STOP, build, prompts, published, step, trainer_logprobs


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_engine_and_trainer_agree_after_no_one_and_twenty_updates(kind: str, temperature: float) -> None:
    learner = build(kind)
    engine = TransformersEngine(build(kind), [STOP], slots=8)
    sampling = Sampling(max_new_tokens=40, temperature=temperature)
    for version in range(21):
        if version:
            step(learner, version)
            engine.load(published(learner), Lineage(0), Version(version))
        if version in (0, 1, 20):
            given = prompts(8, seed=version)
            delta = np.concatenate(
                [
                    np.abs(sample.logprobs - trainer_logprobs(learner, prompt, sample.token_ids, temperature))
                    for prompt, (sample,) in zip(given, generate(engine, given, 1, sampling), strict=True)
                ]
            )
            assert (delta.mean() <= 1e-4, delta.max() <= 1e-2) == (True, True), (version, delta.mean(), delta.max())
