"""The stages of ``configs/stages.toml`` make the columns that the configuration declares."""

import numpy as np

from staleflow.clients.user_code.group import Group, checked_columns
from staleflow.examples.stages.examples import credit, length, repeats, reward
from tests.clients.stage.judged import group


def tokens(*samples: list[int]) -> Group:
    one = group(1, lengths=tuple(len(sample) for sample in samples))
    one.payload.token_ids = np.concatenate([np.asarray(sample, np.int32) for sample in samples])
    one.payload.stages["stage/reward/reward"] = np.array([1.0, 0.0], np.float32)
    one.payload.stages["stage/repeats/seen:token"] = np.array([0, 0, 1, 0, 1], np.float32)
    return Group.of({"prompt": "p"}, ["a", "b"], one.payload)


def test_each_makes_the_columns_that_the_configuration_declares() -> None:
    given = tokens([5, 6, 5], [7, 7])
    made = checked_columns(given, ["stage/length/closeness"], length(given, target=2))
    assert made["stage/length/closeness"].tolist() == [-0.5, 0.0]
    made = checked_columns(given, ["stage/repeats/share", "stage/repeats/seen:token"], repeats(given))
    assert made["stage/repeats/seen:token"].tolist() == [0, 0, 1, 0, 1]
    np.testing.assert_allclose(made["stage/repeats/share"], [1 / 3, 1 / 2])
    made = checked_columns(given, ["stage/credit/weights:token"], credit(given))
    assert made["stage/credit/weights:token"].tolist() == [1, 1, 0, 1, 1]
    assert reward("p", "a", closeness=-0.5, share=0.25, answer="4") == -0.75
