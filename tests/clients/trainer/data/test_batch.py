"""Members become columns, and columns become micro-batches."""

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from staleflow.clients.models.passes import padded_passes
from staleflow.clients.trainer.backends.base import batch_values
from staleflow.clients.trainer.data.batch import FetchedGroup, assemble
from staleflow.clients.trainer.data.column_means import column_means
from staleflow.clients.trainer.data.fetch import MAX_REQUEST_GROUPS, next_request
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Version
from staleflow.protocols.wire.messages import MemberRef
from staleflow.protocols.wire.trajectory import Finish, GroupPayload
from tests.clients.trainer.making import header, payload


def two_versions() -> GroupPayload:
    """Prompt 8 9; samples 1 2 3 (versions 4, 4, 6; the policy did not write the second token) and 5 (version 6)."""
    return GroupPayload(
        prompt_ids=np.array([8, 9], np.int32),
        lengths=np.array([3, 1], np.int32),
        token_ids=np.array([1, 2, 3, 5], np.int32),
        logprobs=np.array([-0.1, -0.2, -0.3, -0.5], np.float32),
        loss_mask=np.array([1, 0, 1, 1], np.uint8),
        segments=np.array([[0, 0, 4, 2], [0, 0, 6, 1], [1, 0, 6, 1]], np.int64),
        finish=np.zeros(2, np.uint8),
        stages={"stage/reward/reward": np.array([1.0, 0.5], np.float32)},
    )


def test_a_row_is_prompt_then_completion_then_padding() -> None:
    made = assemble(header(7), [FetchedGroup(group=GroupId(42), row={"answer": "x"}, payload=two_versions())])
    assert made.input_ids.tolist() == [[8, 9, 1, 2, 3], [8, 9, 5, 0, 0]]
    assert made.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert made.loss_mask.tolist() == [[False, False, True, False, True], [False, False, True, False, False]]
    assert made.behavior_logprobs[0].tolist() == pytest.approx([0, 0, -0.1, -0.2, -0.3])
    assert made.token_versions.tolist() == [[-1, -1, 4, -1, 6], [-1, -1, 6, -1, -1]]  # an environment wrote one token
    assert made.rewards.tolist() == [1.0, 0.5]
    assert made.group_ids.tolist() == [42, 42]
    assert made.completion_lengths.tolist() == [3, 1]
    assert made.sampled_lengths.tolist() == [2, 1]
    assert made.rows == ({"answer": "x"}, {"answer": "x"})
    assert (made.trained_tokens, made.masked_tokens) == (3, 0)


def test_columns_a_token_stand_where_their_tokens_do_and_are_0_elsewhere() -> None:
    first, second = two_versions(), payload(1, [2, 0, 1], prompt=1)
    first.stages["stage/reference/logprobs"] = np.array([-1, -2, -3, -5], np.float32)
    first.stages["stage/critic/values"] = np.array([0.1, 0.2, 0.3, 0.5], np.float32)
    second.stages["stage/reference/logprobs"] = np.array([-6, -7, -8], np.float32)
    made = assemble(
        header(7), [FetchedGroup(group=GroupId(g), row={}, payload=p) for g, p in ((4, first), (5, second))]
    )
    assert made.token_stages["reference/logprobs"].tolist() == [
        [0, 0, -1, -2, -3],
        [0, 0, -5, 0, 0],
        [0, -6, -7, 0, 0],
        [0, 0, 0, 0, 0],
        [0, -8, 0, 0, 0],
    ]
    assert made.token_stages["critic/values"][:2] == pytest.approx(
        np.array([[0, 0, 0.1, 0.2, 0.3], [0, 0, 0.5, 0, 0]], np.float32)
    )
    assert not made.token_stages["critic/values"][2:].any()
    assert {column.dtype.name for column in made.token_stages.values()} == {"float32"}


def test_columns_a_sample_and_a_token_of_a_users_stage_go_by_their_short_names() -> None:
    first, second = two_versions(), payload(1, [2, 1], prompt=1)
    first.stages["stage/judge/score"] = np.array([3.0, 4.0], np.float32)
    first.stages["stage/judge/weights:token"] = np.array([1, 2, 3, 5], np.float32)
    made = assemble(
        header(7), [FetchedGroup(group=GroupId(g), row={}, payload=p) for g, p in ((4, first), (5, second))]
    )
    assert made.token_stages["judge/weights"].tolist() == [[0, 0, 1, 2, 3], [0, 0, 5, 0, 0], [0] * 5, [0] * 5]
    assert set(made.sample_stages) == {"judge/score", "reward/reward"}
    np.testing.assert_array_equal(made.sample_stages["judge/score"], [3.0, 4.0, np.nan, np.nan])
    np.testing.assert_array_equal(made.sample_stages["reward/reward"], made.rewards)


def test_as_many_samples_as_tokens_do_not_make_a_column_a_sample_one_a_token() -> None:
    one = payload(1, [1, 1], prompt=2)
    one.stages["stage/critic/values"] = np.array([0.5, 0.25], np.float32)
    made = assemble(header(7), [FetchedGroup(group=GroupId(4), row={}, payload=one)])
    assert set(made.token_stages) == {"critic/values"}
    assert made.token_stages["critic/values"].tolist() == [[0, 0, 0.5], [0, 0, 0.25]]


def test_off_policy_is_the_age_of_the_trained_tokens() -> None:
    made = assemble(header(7), [FetchedGroup(group=GroupId(42), row={}, payload=two_versions())])
    mean, most = made.off_policy()
    assert mean == pytest.approx((3 + 1 + 1) / 3)
    assert most == 3


def test_entropy_is_of_the_trained_tokens_and_cut_off_is_whatever_did_not_stop_by_itself() -> None:
    first, second = two_versions(), payload(1, [2, 4])
    first.finish[1], second.finish[0] = Finish.LENGTH, Finish.INTERRUPTED
    members = [FetchedGroup(group=GroupId(g), row={}, payload=p) for g, p in ((4, first), (5, second))]
    made = assemble(header(7, mask_below=5), members[:1])
    assert (made.cut.tolist(), assemble(header(7), members).cut.tolist()) == ([False, True], [False, True, True, False])
    values = batch_values(made)
    assert values["length/truncated"] == 0.5
    assert values["entropy"] == pytest.approx((0.3 + 0.5) / 2), "version 4 and the environment's token are not trained"
    both = batch_values(made, lambda column: np.concatenate([column, column]))
    assert (both["length/truncated"], both["entropy"]) == (0.5, values["entropy"]), "of two ranks alike"


def test_the_token_bound_masks_older_tokens_and_counts_them() -> None:
    made = assemble(header(7, mask_below=5), [FetchedGroup(group=GroupId(42), row={}, payload=two_versions())])
    assert made.loss_mask.tolist() == [[False, False, False, False, True], [False, False, True, False, False]]
    assert made.masked_tokens == 1
    assert made.off_policy() == (1.0, 1)


def test_groups_keep_the_order_of_the_members() -> None:
    members = [FetchedGroup(group=GroupId(g), row={}, payload=payload(g, [2, 3])) for g in (9, 4, 6)]
    assert assemble(header(0), members).group_ids.tolist() == [9, 9, 4, 4, 6, 6]


def test_a_completion_may_be_empty() -> None:
    members = [FetchedGroup(group=GroupId(0), row={}, payload=payload(0, [0, 3]))]
    assert assemble(header(0), members).loss_mask.sum(axis=1).tolist() == [0, 3]


def test_micro_batches_are_longest_first_and_equal_lengths_keep_their_order() -> None:
    cuts = padded_passes(np.array([3, 10, 3, 7, 10]), micro_tokens=20)
    assert [cut.tolist() for cut in cuts] == [[1, 4], [3, 0], [2]]


def test_a_row_longer_than_a_micro_batch_goes_alone() -> None:
    assert [cut.tolist() for cut in padded_passes(np.array([50, 2]), micro_tokens=20)] == [[0], [1]]


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 200))
def test_every_row_is_in_exactly_one_micro_batch_that_fits(lengths: list[int], micro_tokens: int) -> None:
    cuts = padded_passes(np.array(lengths, np.int64), micro_tokens)
    assert sorted(row for cut in cuts for row in cut.tolist()) == list(range(len(lengths)))
    for cut in cuts:
        longest = max(lengths[int(row)] for row in cut)
        assert len(cut) == 1 or len(cut) * longest <= micro_tokens


def member(group: int, nbytes: int = 100) -> MemberRef:
    return MemberRef(
        group=GroupId(group),
        lease=LeaseId(group),
        lineage=Lineage(0),
        version=Version(0),
        sha="",
        shard=0,
        nbytes=nbytes,
        sequence_tokens=10,
    )


def test_a_request_takes_the_first_members_that_fit() -> None:
    waiting = deque(member(g) for g in range(5))
    most = 2 * member(0).nbytes
    assert [m.group for m in next_request(waiting, most)] == [0, 1]
    assert [m.group for m in next_request(waiting, most + 1)] == [2, 3]
    assert [m.group for m in next_request(waiting, most)] == [4]
    assert not waiting


def test_a_request_has_a_member_however_large_it_is_and_no_more_than_a_message_may() -> None:
    large = deque([member(0, 2000), member(1)])
    assert [m.group for m in next_request(large, 1)] == [0]
    many = deque(member(g) for g in range(MAX_REQUEST_GROUPS + 1))
    assert len(next_request(many, 1 << 30)) == MAX_REQUEST_GROUPS
    assert len(many) == 1


def test_each_column_of_a_stage_has_a_metric_of_its_mean() -> None:
    first, second = two_versions(), payload(1, [2, 1], prompt=1)
    first.stages |= {
        "stage/reward/brief": np.array([-1.0, -2.0], np.float32),
        "stage/environment/turns": np.array([2.0, 4.0], np.float32),
        "stage/judge/weights:token": np.array([1, 2, 3, 6], np.float32),
    }
    second.stages["stage/reward/brief"] = np.array([-4.0, -5.0], np.float32)
    made = assemble(
        header(7), [FetchedGroup(group=GroupId(g), row={}, payload=p) for g, p in ((4, first), (5, second))]
    )
    values = batch_values(made)
    assert values["reward/brief"] == -3.0
    assert values["environment/turns"] == 3.0  # only one of the groups has it
    assert values["stage/judge/weights"] == pytest.approx(12 / 7)
    assert "reward/reward" not in values


def test_a_rank_takes_part_in_columns_that_only_another_rank_has() -> None:
    """Two ranks gather at the same time; a call that only one of them made would break the barrier."""
    payloads = [two_versions(), payload(1, [2, 1], prompt=1)]
    payloads[1].stages["stage/environment/turns"] = np.array([2.0, 4.0], np.float32)
    payloads[0].stages["stage/judge/weights:token"] = np.ones(payloads[0].num_tokens, np.float32)
    barrier, sent = threading.Barrier(2, timeout=100), dict[int, NDArray[Any]]()

    def rank(number: int) -> dict[str, float]:
        def gather(column: NDArray[Any]) -> NDArray[Any]:
            sent[number] = column
            barrier.wait()
            whole: NDArray[Any] = np.concatenate([sent[0], sent[1]])
            barrier.wait()
            return whole

        made = assemble(header(7), [FetchedGroup(group=GroupId(4), row={}, payload=payloads[number])])
        return column_means(made, gather)

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(rank, range(2))
    assert first == second
    assert first == {"environment/turns": 3.0, "stage/judge/weights": 1.0}
