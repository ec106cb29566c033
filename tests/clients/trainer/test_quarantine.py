# pyright: basic, reportMissingImports=false
"""Groups that make a step raise are found and reported, and the step is trained without them."""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from staleflow.clients.trainer.backends.base import StepResult, Stopped, Stopping, Untrainable
from staleflow.clients.trainer.data.batch import FetchedGroup, TrainBatch, rows_of
from staleflow.clients.trainer.data.micro_batches import MicroBatchStream
from staleflow.clients.trainer.data.prefetch import BatchStream, NoBatch
from staleflow.clients.trainer.ranks.follower import FollowerBatches
from staleflow.clients.trainer.ranks.leader import Leader, follow
from staleflow.clients.trainer.steps import Steps, StreamedSteps, WholeSteps
from staleflow.clients.trainer.torch_trainer import TorchTrainer
from staleflow.configs.errors import ConfigError
from staleflow.net.client import Client
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId, Step, TrainerTerm
from staleflow.protocols.wire.messages import Done, MemberRef, ModelLimits, QuarantineGroups
from staleflow.protocols.wire.tensors import Array
from tests.clients.trainer.backends.test_backends import TWO_RANKS, settings
from tests.clients.trainer.making import batch, config, header, payload
from tests.clients.trainer.ranked import ranked
from tests.clients.trainer.ranks.test_leader import LIMIT_S, Ranks, Recorded, Room
from tests.clients.trainer.test_taken_back import WEIGHTS, Sealed, Trainer, member

USERS = '''
"""A loss and an advantage that do not bear everything."""

def careful(logprobs, old, behavior, advantages, row):
    if (behavior < -50).any():
        raise ValueError("a token of probability 0")
    return -(logprobs - old).exp() * advantages

def centred(rewards, group_ids):
    if (rewards > 50).any():
        raise ZeroDivisionError("a reward of too much")
    return rewards - rewards.mean()

def undefined(rewards, group_ids):
    return rewards / (rewards < 50)

def broken(logprobs, old, behavior, advantages, row):
    raise TypeError("of no use")
'''


@pytest.fixture
def users(tmp_path: Path) -> str:
    (tmp_path / "users.py").write_text(USERS)
    return str(tmp_path / "users.py")


def going_on() -> bool:
    return False


def trainer(directory: Path, **algorithm: str) -> TorchTrainer:
    return TorchTrainer(config(micro_tokens=40, algorithm=algorithm), directory)


def copied(of: TorchTrainer) -> dict[str, Any]:
    return {name: array.copy() for name, array in of.weights().items()}


def surprising(data: TrainBatch, group: int) -> None:
    data.behavior_logprobs[(data.group_ids == group)[:, None] & data.completions] = -60.0


def rich(data: TrainBatch, group: int) -> None:
    data.rewards[data.group_ids == group] = 60.0


def foreign(data: TrainBatch, group: int) -> None:
    data.input_ids[np.flatnonzero(data.group_ids == group)[0], 4] = 1_000_000


Harm = Callable[[TrainBatch, int], None]
HARMS = [
    (surprising, {"loss": "careful"}, "ValueError: a token of probability 0"),
    (rich, {"advantage": "centred"}, "ZeroDivisionError: a reward of too much"),
    (rich, {"advantage": "undefined"}, "it returned a value that is not finite"),
    (foreign, {}, "IndexError: index out of range in self"),
]


@pytest.mark.parametrize(("harm", "keys", "why"), HARMS)
def test_the_group_that_makes_a_step_raise_is_named_and_nothing_has_changed(
    model_directory: Path, users: str, harm: Harm, keys: dict[str, str], why: str
) -> None:
    one = trainer(model_directory, **{key: f"{users}:{name}" for key, name in keys.items()})
    before, data = copied(one), batch(0)
    harm(data, 1)
    with pytest.raises(Untrainable, match=why) as found:
        one.train(data, Step(0), going_on)
    assert (found.value.groups, found.value.every) == ([1], False)
    assert all(np.array_equal(before[name], array) for name, array in one.weights().items())
    other = trainer(model_directory, **{key: f"{users}:{name}" for key, name in keys.items()})
    rest = rows_of(batch(0), np.flatnonzero(batch(0).group_ids != 1))
    assert one.train(rest, Step(0), going_on) == other.train(rest, Step(0), going_on)
    assert all(np.array_equal(copied(other)[name], array) for name, array in one.weights().items())


@pytest.mark.parametrize("micro_tokens", [20, 4000])
def test_a_loss_that_bears_no_group_is_at_fault_itself(model_directory: Path, users: str, micro_tokens: int) -> None:
    """The rule also holds where no pass has two groups."""
    one = TorchTrainer(config(micro_tokens=micro_tokens, algorithm={"loss": f"{users}:broken"}), model_directory)
    with pytest.raises(Untrainable, match="no group of the batch can be trained, so the model or the algorithm") as no:
        one.train(batch(0), Step(0), going_on)
    assert no.value.every


def test_a_result_that_is_wrong_for_every_group_names_the_key(model_directory: Path, users: str) -> None:
    one, data = trainer(model_directory, advantage=f"{users}:undefined"), batch(0)
    for group in range(3):
        rich(data, group)
    with pytest.raises(ConfigError, match=r"trainer.algorithm.advantage .* it returned a value that is not finite"):
        one.train(data, Step(0), going_on)


def test_an_error_that_no_group_alone_causes_is_raised_as_it_is(model_directory: Path) -> None:
    one = trainer(model_directory)
    forward, raised = one.learner.forward, iter([True])

    def once(**inputs: Any) -> Any:
        if next(raised, False):
            raise ValueError("a passing mood")
        return forward(**inputs)

    one.learner.forward = once  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="a passing mood"):
        one.train(batch(0), Step(0), going_on)


@pytest.mark.parametrize(("backend", "stage", "nproc"), TWO_RANKS)
def test_a_group_that_makes_one_rank_raise_is_named_on_all_and_the_next_step_is_trained(
    model_directory: Path, tmp_path: Path, users: str, backend: str, stage: int, nproc: int
) -> None:
    chosen = settings(backend, stage, algorithm={"loss": f"{users}:careful"})
    bad, good = ranked(chosen, model_directory, tmp_path, nproc, steps=[0, 1], surprising=[0]).results
    assert bad["bad"].startswith("groups 2")
    clean = TorchTrainer(settings(algorithm={"loss": f"{users}:careful"}), model_directory)
    expected = clean.train(batch(1), Step(1), going_on).values
    assert (good["loss"], good["grad_norm"]) == pytest.approx((expected["loss"], expected["grad_norm"]), rel=1e-4)


# --- between the trainer and the run -------------------------------------------------------------------------------


class Quarantining(Sealed):
    """Seal the next batch without quarantined groups: batch n has the groups 10 n to 10 n + 3."""

    def __init__(self, batches: dict[int, int], *, patience: int = 8) -> None:
        super().__init__(batches)
        self.reported: list[int] = []
        self._patience = patience

    async def ask(self, body: Any, reply: Any, *, timeout_s: float | None) -> Any:
        if not isinstance(body, QuarantineGroups):
            return await super().ask(body, reply, timeout_s=timeout_s)
        self.reported += body.groups
        if len(self.reported) > self._patience:
            raise Refused(Code.DENIED, "the model is at fault")
        for step, number in self.batches.items():
            if body.groups[0] // 10 == number:
                self.batches[step] = number + 5
        return Done()


class Fetching(MicroBatchStream):
    """Invent the groups; those of ``foreign`` hold a token of another vocabulary, ``unlike`` has experts of another
    model."""

    unlike: Mapping[int, Array] = {}

    def __init__(self, sealed: Sealed, foreign: Sequence[int], rank: int, world: int, model: ModelLimits) -> None:
        client = cast(Client, sealed)
        super().__init__(client, [], TrainerTerm(1), size=2, rank=rank, world=world, model=model)
        self._sealed, self._foreign = sealed, foreign

    async def _members(self, members: Sequence[MemberRef]) -> list[FetchedGroup]:
        found = [FetchedGroup(group=m.group, row={}, payload=payload(m.group, [3, 2])) for m in members]
        for item in found:
            if item.group in self._foreign:
                item.payload.token_ids[0] = 1_000_000
            if self.unlike:
                experts = self.unlike.get(item.group, np.zeros((5, 2, 2), np.uint8))
                item.payload.columns["token/routed_experts"] = experts
        return found


class Foreign(Trainer):
    """A trainer that fetches some groups of another vocabulary."""

    foreign: Sequence[int] = ()

    def _stream(self, term: TrainerTerm) -> BatchStream:
        return Fetching(self._sealed, self.foreign, *self._place, self.model)

    def micro_batches(self, term: TrainerTerm, size: int = 1) -> MicroBatchStream:
        return Fetching(self._sealed, self.foreign, *self._place, self.model)


class Choosy(Recorded):
    """A backend that cannot train some groups, which ``GroupQuarantine`` announces to every rank."""

    def __init__(self, *untrainable: int, every: bool = False) -> None:
        super().__init__(together=True)
        self._untrainable, self._every = untrainable, every

    def _look(self, data: TrainBatch) -> None:
        batches = set((data.group_ids // 10).tolist())
        if bad := [GroupId(group) for group in self._untrainable if group // 10 in batches]:
            raise Untrainable(bad, "it raises", every=self._every)

    def train(self, batch: TrainBatch, step: Step, stopping: Stopping) -> StepResult:
        self._look(batch)
        return super().train(batch, step, stopping)

    def add(self, part: TrainBatch, stopping: Stopping, *, last: bool) -> None:
        self._look(part)
        super().add(part, stopping, last=last)


def streamed(backend: Any) -> Steps:
    return StreamedSteps(backend, 2)


STEPPING = [WholeSteps, streamed]


@pytest.mark.parametrize("stepping", STEPPING)
def test_the_step_is_taken_with_the_batch_that_is_sealed_instead(tmp_path: Path, stepping: Any) -> None:
    sealed = Quarantining({0: 1, 1: 2, 2: 3})
    with Foreign(tmp_path, sealed) as client:
        for _ in stepping(Choosy(21))(client, 3, going_on):
            client.commit(WEIGHTS)
    assert sealed.reported == [21]
    assert client.commits.published == [(1, 1), (2, 7), (3, 3)]


@pytest.mark.parametrize("stepping", STEPPING)
def test_every_rank_trains_the_batch_that_is_sealed_instead(tmp_path: Path, stepping: Any) -> None:
    sealed, room = Quarantining({0: 1, 1: 2}), Room()
    first, second = Choosy(11), Choosy(11)
    with Foreign(tmp_path, sealed, world=2) as client, Foreign(tmp_path, sealed, rank=1, world=2) as other:
        followed = FollowerBatches(other, 2, streaming=stepping is streamed)
        following = (second, Ranks(room, 1), followed, going_on, other.write_spans)
        thread = threading.Thread(target=follow, args=following, daemon=True)
        thread.start()
        leader = Leader(first, Ranks(room, 0), lambda: client.current_term)
        client.same, client.share = leader.same, leader.share
        leader.load(None)
        for _ in stepping(leader)(client, 2, going_on):
            client.commit(WEIGHTS)
        leader.close()
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    assert sealed.reported == [11]
    steps = [[call[1:3] for call in rank.calls if call[0] in ("train", "finish")] for rank in (first, second)]
    assert steps == [[(0, 6), (1, 2)]] * 2


def test_what_no_quarantine_helps_ends_the_trainer(tmp_path: Path) -> None:
    sealed = Quarantining({0: 1})
    with Foreign(tmp_path, sealed) as client, pytest.raises(Untrainable, match="it raises"):
        next(iter(WholeSteps(Choosy(10, 11, 12, 13, every=True))(client, 1, going_on)))
    assert sealed.reported == []


def test_a_trainer_that_has_failed_too_many_groups_is_told_so(tmp_path: Path) -> None:
    sealed = Quarantining({0: 1}, patience=0)
    with Foreign(tmp_path, sealed) as client, pytest.raises(NoBatch, match="the model is at fault"):
        next(iter(WholeSteps(Choosy(11))(client, 1, going_on)))


@pytest.mark.parametrize("stepping", STEPPING)
def test_a_group_beyond_the_models_vocabulary_is_given_to_no_backend(tmp_path: Path, stepping: Any) -> None:
    """A trajectory server accepted the group before it knew the model."""
    sealed, backend = Quarantining({0: 1, 1: 2}), Recorded(together=True)
    with Foreign(tmp_path, sealed) as client:
        client.model, client.foreign = ModelLimits(vocabulary=100), (12, 21)
        for _ in stepping(backend)(client, 2, going_on):
            client.commit(WEIGHTS)
    assert sealed.reported == [12, 21]
    assert client.commits.published == [(1, 6), (2, 7)]


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
async def test_a_group_with_experts_of_another_model_is_quarantined_without_limits(dtype: str) -> None:
    """A loop of one's own need not know the limits of its model."""
    sealed = Quarantining({0: 1})
    stream = Fetching(sealed, [], 0, 1, ModelLimits())
    stream.unlike = {12: np.zeros((5, 2, 2) if dtype == "uint16" else (5, 3, 2), dtype)}
    with pytest.raises(
        Refused, match=r"routed_experts is uint.*; in most groups of the batch it is uint8\[tokens, 2, 2\]"
    ):
        await stream._trainable([member(group) for group in (10, 11, 12, 13)])
    assert sealed.reported == [12]


def test_a_rank_above_0_that_is_refused_a_batch_for_good_tells_the_run_and_ends_the_step(tmp_path: Path) -> None:
    told: list[str] = []
    with Foreign(tmp_path, Quarantining({0: 1}, patience=0), rank=1, world=2) as client:
        client.model, client.foreign = ModelLimits(vocabulary=100), (10, 11, 12, 13)
        client.finished = lambda error="", term=None: told.append(error)  # type: ignore[method-assign]
        for streaming in (False, True):
            followed = FollowerBatches(client, 1, streaming=streaming)
            followed.follow(*client.current_term)
            if streaming:
                with pytest.raises(Stopped):
                    followed.micro_batch(msgspec.structs.replace(header(0), members=[member(10), member(11)]))
            else:
                assert followed.batch(Step(0)) is None
    assert told == ["the model is at fault"] * 2
