"""The scheduler requests the features of upcoming prompts from the shards."""

import numpy as np
import pytest

from staleflow.net.endpoint import Call
from staleflow.net.memory_transport import MemoryEndpoint
from staleflow.process.clock import WALL
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import FEATURES, Attach, PromptFeatures, PromptFeaturesReply, Refusal, Reply
from staleflow.protocols.wire.tensors import Array, specs_and_frames
from staleflow.servers.scheduler.lengths.expected import Lengths, Ranker
from staleflow.servers.scheduler.prompt_features import CHUNK, PromptFeatureRequests
from staleflow.servers.scheduler.prompts.queue import PromptQueue
from staleflow.servers.scheduler.prompts.stream import Clustering
from staleflow.servers.scheduler.workers.registry import Registry


class World:
    """Two shards, and a deck in blocks of 200 of ``rows`` prompts."""

    def __init__(self, *, rows: int = 1000, ranker: Ranker = "learned") -> None:
        clustering = Clustering(batch_size=50, lookahead=4)
        self.prompts = PromptQueue(seed=0, epochs=0, lengths=Lengths(ranker, ahead=200), clustering=clustering)
        self.prompts.set_source(rows, "sha")
        registry = Registry(2, WALL)
        for name, role in (("a", "trajectories"), ("b", "trajectories"), ("r", "rollout")):
            registry.attach(Attach(worker=WorkerId(name), name=name, role=role, shard=name == "b"))
        self.describing = PromptFeatureRequests(self.prompts, registry, lambda: self.now_ms)
        self.now_ms = 0
        self.endpoint = MemoryEndpoint(self._take, lambda answer: answer())
        self.heard: dict[str, list[Reply]] = {"a": [], "b": [], "r": []}

    def _take(self, call: Call) -> None:
        assert isinstance(call.body, PromptFeatures)
        self.describing.receive(call, call.body)

    def bring(self, name: str, rows: list[int] | None = None, features: Array | None = None) -> None:
        """Report features of ``rows``, and wait for the next request."""
        rows = rows or []
        if features is None and rows:
            features = np.repeat(np.array(rows, np.float16)[:, None], FEATURES, axis=1)
        specs, frames = specs_and_frames({} if features is None else {"features": features})
        body = PromptFeatures(shard=0, rows=rows, frames=specs, wait_ms=1000)
        self.endpoint.call(name, body, self.heard[name].append, frames)

    def asked(self, name: str) -> list[int]:
        """Return the rows of the last request."""
        last = self.heard[name][-1]
        assert isinstance(last, PromptFeaturesReply)
        return last.rows

    def lose(self, name: str) -> None:
        self.endpoint.leave(name)
        self.describing.remove_peer(name)

    def deal(self, count: int) -> list[int]:
        """Return the rows of the next groups."""
        return [group % self.prompts.rows for group in (self.prompts.pop() for _ in range(count)) if group is not None]


def test_the_rows_of_this_block_and_the_next_are_asked_for_in_chunks_and_no_others() -> None:
    world = World()
    world.bring("a")
    first = world.asked("a")
    assert len(first) == CHUNK
    world.bring("a", first)
    second = world.asked("a")
    world.bring("a", second)
    assert len(world.heard["a"]) == 2  # the shard waits: no row needs features
    assert sorted(first + second) == sorted(world.deal(400))


def test_a_shard_that_waits_is_asked_once_the_next_block_begins() -> None:
    world = World()
    for _ in range(2):
        world.bring("a", world.asked("a") if world.heard["a"] else None)
    world.bring("a", world.asked("a"))
    world.deal(199)
    world.describing.reply_waiting()
    assert len(world.heard["a"]) == 2
    world.deal(1)
    world.describing.reply_waiting()
    this_block, next_block = world.deal(200), world.deal(200)
    assert sorted(world.asked("a")) == sorted(next_block)
    assert set(this_block) & set(next_block) == set()


def test_two_shards_share_the_rows_whatever_shard_the_groups_are_on() -> None:
    world = World()
    world.bring("a")
    world.bring("b")
    assert sorted(world.asked("a") + world.asked("b")) == sorted(world.deal(400))


def test_what_a_lost_shard_was_asked_for_is_asked_of_another_one() -> None:
    world = World()
    world.bring("a")
    world.bring("b", None)
    lost, mine = world.asked("a"), world.asked("b")
    world.bring("b", mine)
    world.lose("a")
    assert world.asked("b") == lost


def test_a_shard_that_is_gone_while_it_waits_is_not_asked() -> None:
    world = World(rows=10)
    world.bring("a")
    world.bring("a", world.asked("a"))
    world.lose("a")
    world.bring("b")
    assert world.heard["b"] == []


def test_rows_that_a_vanished_caller_would_have_described_go_to_the_next_one() -> None:
    world = World()
    for _ in range(2):
        world.bring("a", world.asked("a") if world.heard["a"] else None)
    world.bring("a", world.asked("a"))
    world.endpoint.leave("a")
    world.deal(200)
    world.describing.reply_waiting()
    world.bring("b")
    world.deal(200)
    assert sorted(world.asked("b")) == sorted(world.deal(200))


def test_features_that_came_are_kept_with_their_rows_and_rows_that_are_described_are_not_asked_for_again() -> None:
    world = World(rows=10)
    world.bring("a")
    assert sorted(world.asked("a")) == list(range(10))  # the next epochs have the same rows
    world.bring("a", world.asked("a"))
    world.deal(1000)
    world.describing.reply_waiting()
    assert len(world.heard["a"]) == 1
    assert world.prompts.lengths.num_described == 10


def test_a_call_is_answered_with_nothing_when_it_has_waited_long_enough() -> None:
    world = World(rows=10)
    world.bring("a")
    world.bring("a", world.asked("a"))
    world.describing.answer_due(999)
    assert len(world.heard["a"]) == 1
    world.describing.answer_due(1000)
    assert world.asked("a") == []


def test_a_ranker_that_needs_no_features_asks_for_none() -> None:
    world = World(ranker="history")
    world.bring("a")
    assert world.heard["a"] == []


@pytest.mark.parametrize(
    ("name", "rows", "features", "code", "detail"),
    [
        ("r", [0], None, Code.DENIED, "r is not a trajectory server of this run"),
        ("a", [1000], None, Code.MALFORMED, "row is 1000; it must be 0 to 999"),
        ("a", [-1], None, Code.MALFORMED, "row is -1; it must be 0 to 999"),
        ("a", [0, 1], np.zeros((1, FEATURES), np.float16), Code.MALFORMED, "of 2 rows must be float16[2, 32]"),
        ("a", [0], np.zeros((1, FEATURES), np.float32), Code.MALFORMED, "of 1 rows must be float16[1, 32]"),
        ("a", [0], np.full((1, FEATURES), np.nan, np.float16), Code.MALFORMED, "holds a value that is not finite"),
    ],
)
def test_what_is_no_description_is_refused(
    name: str, rows: list[int], features: Array | None, code: Code, detail: str
) -> None:
    world = World()
    world.bring(name, rows, features)
    (refusal,) = world.heard[name]
    assert isinstance(refusal, Refusal)
    assert refusal.code is code
    assert detail in refusal.detail
    assert world.prompts.lengths.num_described == 0
