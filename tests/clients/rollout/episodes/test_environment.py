"""Episodes of user code run against an engine, through real processes and a real socket."""

import asyncio
import importlib.util
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.clients.rollout.engines.base import Sampling
from staleflow.clients.rollout.engines.simulated import SimulatedEngine
from staleflow.clients.rollout.engines.thread import EngineThread
from staleflow.clients.rollout.episodes import env_child, environment
from staleflow.clients.rollout.episodes.chat.template import ByteChatTemplate
from staleflow.clients.rollout.episodes.env_runner import EpisodeFailed
from staleflow.clients.rollout.episodes.environment import Environments
from staleflow.clients.rollout.groups import ActiveLease, Recipe, interrupt
from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config, Environment, Prompts, Reward
from staleflow.configs.simulation import Simulated
from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.trajectory import Finish, GroupPayload
from tests.clients.rollout.engines.waiting import until
from tests.clients.rollout.peers import assign

FILE = Path(__file__).parent / "environments.py"


class Scene:
    """Environments that run over a simulated engine at version 0."""

    def __init__(self, config: Config, tokens: float, group_size: int) -> None:
        self.engine = SimulatedEngine(Simulated(mean_tokens=tokens, sigma=0.3, k2=1e-4), slots=16)
        self.engine.load({}, Lineage(0), Version(0))
        self.runner = EngineThread(self.engine)
        recipe = Recipe(group_size=group_size, started=group_size, sampling=Sampling(max_new_tokens=10**6), seed=3)
        self.environments = Environments(config, self.runner, ByteChatTemplate(), recipe)
        self.held = ActiveLease(assign(1))

    async def play(self, prompt: str = "1+1=", **columns: Any) -> GroupPayload:
        payload = await self.environments.produce(self.held, {"prompt": prompt, **columns})
        payload.check()
        return payload

    def interrupt(self) -> None:
        interrupt(self.runner, self.held)


@asynccontextmanager
async def playing(
    name: str, *, tokens: float = 8, group_size: int = 2, reward: str = "m:f", **settings: Any
) -> AsyncGenerator[Scene]:
    config = Config(
        prompts=Prompts(path="p.jsonl"),
        reward=Reward(run=reward),
        environment=Environment(run=f"{FILE}:{name}", **settings),
    )
    scene = Scene(config, tokens, group_size)
    try:
        await scene.environments.start()
        yield scene
    finally:
        await scene.environments.close()
        await scene.runner.close()


def spoken(payload: GroupPayload, sample: int) -> list[tuple[bool, bytes]]:
    """The completion of a sample as runs of tokens: (the policy wrote it, its bytes)."""
    start = int(payload.lengths[:sample].sum())
    here = slice(start, start + int(payload.lengths[sample]))
    mask, ids = payload.loss_mask[here], payload.token_ids[here]
    cuts = np.flatnonzero(np.diff(mask)) + 1
    return [(bool(m[0]), bytes(i.tolist())) for m, i in zip(np.split(mask, cuts), np.split(ids, cuts), strict=True)]


async def test_a_dialogue_is_one_trajectory_with_the_environments_tokens_masked() -> None:
    async with playing("Dialogue") as scene:
        payload = await scene.play()
        assert bytes(payload.prompt_ids.tolist()) == b"user: 1+1=\nassistant: "
        for sample in range(2):
            first, between, second = spoken(payload, sample)
            assert (first[0], between, second[0]) == (True, (False, b"\ntool: turn 1\nassistant: "), True)
            assert first[1][-1:] == second[1][-1:] == b"\0"
            assert payload.stages["stage/environment/reward"][sample] == len(second[1]) - 1
        assert payload.finish.tolist() == [Finish.STOP] * 2
        assert (payload.logprobs[payload.loss_mask == 0] == 0).all()
        assert (payload.logprobs[payload.loss_mask == 1] < 0).all()
        assert payload.segment_summary() == [(0, 0, int(payload.loss_mask.sum()))]
        assert payload.segments[:, 3].sum() == payload.num_tokens
        assert len(payload.segments) == 4


async def test_each_turn_keeps_its_version_and_what_is_read_belongs_to_the_turn_that_follows() -> None:
    async with playing("Endless", group_size=1) as scene:
        group = asyncio.ensure_future(scene.play())
        await until(lambda: scene.engine.stats().generated_tokens > 40)
        await scene.runner.load({}, Lineage(0), Version(3))
        written = scene.engine.stats().generated_tokens
        await until(lambda: scene.engine.stats().generated_tokens > written + 40)
        scene.interrupt()
        payload = await group
        versions, mask = payload.token_versions(), payload.loss_mask
        assert sorted(set(versions.tolist())) == [0, 3]
        masked = np.flatnonzero(mask == 0)
        following = [int(np.flatnonzero(mask[place:])[0]) + place for place in masked]
        assert versions[masked].tolist() == versions[following].tolist()


async def test_samples_that_begin_differently_share_what_they_can_of_the_prompt() -> None:
    from staleflow.clients.rollout.engines.base import TokenSegment
    from staleflow.clients.rollout.episodes.chat.transcript import Transcript, Turn, group_payload

    def transcript(*given: int) -> Transcript:
        segment = TokenSegment(
            lineage=Lineage(0),
            version=Version(1),
            token_ids=np.array([9], np.int32),
            logprobs=np.array([-1], np.float32),
        )
        return Transcript([Turn(given=np.array(given, np.int32), segments=(segment,), finish=Finish.LENGTH)])

    payload = group_payload([transcript(1, 2, 3), transcript(1, 2, 4, 5)], {})
    payload.check()
    assert payload.prompt_ids.tolist() == [1, 2]
    assert payload.token_ids.tolist() == [3, 9, 4, 5, 9]
    assert payload.loss_mask.tolist() == [0, 1, 0, 0, 1]
    assert payload.segments.tolist() == [[0, 0, 1, 2], [1, 0, 1, 3]]


async def test_columns_of_an_engine_stay_with_its_tokens_and_the_environments_have_zeros() -> None:
    from staleflow.clients.rollout.engines.base import ColumnError, TokenSegment
    from staleflow.clients.rollout.episodes.chat.transcript import Transcript, Turn, cut, group_payload
    from staleflow.protocols.wire.routed_experts import COLUMN, NAME

    def turn(given: list[int], *tokens: int, columns: bool = True) -> Turn:
        experts = np.array(tokens, np.uint8)[:, None, None].repeat(2, 1)
        segment = TokenSegment(
            lineage=Lineage(0),
            version=Version(1),
            token_ids=np.array(tokens, np.int32),
            logprobs=np.full(len(tokens), -1, np.float32),
            columns={NAME: experts} if columns else {},
        )
        kept = cut((segment,), 2)  # as at a stop string
        return Turn(given=np.array(given, np.int32), segments=kept, finish=Finish.STOP)

    first = Transcript([turn([1, 2, 3], 11, 12, 13), turn([4, 5], 14)])
    second = Transcript([turn([1, 2, 6, 7], 15)])
    payload = group_payload([first, second], {}, [COLUMN])
    assert payload.token_ids.tolist() == [3, 11, 12, 4, 5, 14, 6, 7, 15]
    experts = payload.columns[COLUMN.key]
    assert experts.shape == (9, 2, 1)
    assert experts[:, 0, 0].tolist() == [0, 11, 12, 0, 0, 14, 0, 0, 15]
    with pytest.raises(ColumnError, match="sample 1 lacks the column routed_experts"):
        group_payload([first, Transcript([turn([1, 2], 15, columns=False)])], {}, [COLUMN])
    assert group_payload([first, second], {}).columns == {}


async def test_plain_completions_go_on_with_the_text_and_other_numbers_come_along() -> None:
    async with playing("Raw", tokens=100) as scene:
        payload = await scene.play()
        for sample in range(2):
            runs = spoken(payload, sample)
            assert [written for written, _ in runs] == [True, False, True, False, True]
            assert runs[1] == runs[3] == (False, b"\nnext:")
        assert sorted(payload.stages) == ["stage/environment/calls", "stage/environment/length"]
        assert payload.finish.tolist() == [Finish.LENGTH] * 2


async def test_tokens_that_an_environment_writes_are_taken_as_they_are() -> None:
    async with playing("Tokens", tokens=100) as scene:
        payload = await scene.play()
        assert payload.prompt_ids.tolist() == [65, 66]
        assert [run for run in spoken(payload, 0) if not run[0]] == [(False, bytes([35, 36, 37]))]
        assert payload.stages == {}


async def test_what_would_not_be_trained_as_it_was_sampled_is_refused_by_name() -> None:
    async with playing("Refused", group_size=1) as scene:
        payload = await scene.play()
        assert payload.stages["stage/environment/reward"].tolist() == [11.0]
        assert len(spoken(payload, 0)) == 1


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ("raise", "the environment raised ValueError: no such planet"),
        ("exit", "the environment's process ended with code 7"),
        ("memory", "the environment raised MemoryError"),
        ("text", "the environment returned 'good'; it must return None, a finite number, or finite numbers by name"),
        ("nan", "it must return None, a finite number"),
        ("name", "'a/b' is no name of a column"),
        ("silent", "there is nothing to train"),
    ],
)
async def test_an_environment_that_misbehaves_is_named_and_the_next_group_is_played(prompt: str, why: str) -> None:
    async with playing("Bad", timeout_s=60.0, memory_mb=1024) as scene:
        with pytest.raises(EpisodeFailed, match=why):
            await scene.play(prompt)
        scene.held = ActiveLease(assign(2))
        assert (await scene.play("good")).stages["stage/environment/reward"].tolist() == [1.0, 1.0]


async def test_samples_of_a_group_that_return_different_things_are_refused() -> None:
    async with playing("Bad", group_size=8) as scene:
        with pytest.raises(EpisodeFailed, match="the same for all samples of a group; it returned None and reward"):
            await scene.play("mixed")


async def test_without_a_reward_function_the_environment_must_return_one() -> None:
    async with playing("Raw", reward="") as scene:
        with pytest.raises(EpisodeFailed, match=r"returned no reward, and there is no reward\.run"):
            await scene.play()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hang", "block"])
async def test_episodes_beside_and_after_one_that_never_ends_are_played(kind: str) -> None:
    """The time limit leaves the good episodes time on a loaded machine; one that blocks their process ends it."""
    async with playing("Bad", timeout_s=15.0, memory_mb=1024) as scene:
        endless = asyncio.ensure_future(scene.environments.produce(ActiveLease(assign(2)), {"prompt": kind}))
        good = await scene.play("good")
        assert good.stages["stage/environment/reward"].tolist() == [1.0, 1.0]
        with pytest.raises(EpisodeFailed, match="the environment took longer than 15 s"):
            await endless
        scene.held = ActiveLease(assign(3))
        assert (await scene.play("good")).stages["stage/environment/reward"].tolist() == [1.0, 1.0]


async def outcomes(scene: Scene, prompts: Sequence[str]) -> list[str]:
    """Play one group of each prompt concurrently; return each group's outcome: "good" or the reason for its failure."""
    groups = [scene.environments.produce(ActiveLease(assign(n)), {"prompt": p}) for n, p in enumerate(prompts, 1)]
    ended = await asyncio.gather(*groups, return_exceptions=True)
    assert all(isinstance(one, GroupPayload | EpisodeFailed) for one in ended), ended
    return [str(one) if isinstance(one, BaseException) else "good" for one in ended]


EXITED = "the environment's process ended with code 7"


@pytest.mark.parametrize("kind", ["exit", "subtask"])
async def test_an_episode_that_ends_its_process_fails_its_own_group_only(kind: str) -> None:
    async with playing("Bad", group_size=1) as scene:
        prompts = [kind if number % 5 == 2 else "good" for number in range(15)]
        assert await outcomes(scene, prompts) == [EXITED if prompt == kind else "good" for prompt in prompts]


async def test_where_half_of_all_episodes_end_their_process_the_others_come_to_their_end() -> None:
    async with playing("Bad", group_size=1, processes=2) as scene:
        prompts = ["exit", "exit", "good", "good"] * 4  # each process gets prompts of both kinds
        assert await outcomes(scene, prompts) == [EXITED, EXITED, "good", "good"] * 4


@pytest.mark.parametrize(("kind", "code"), [("thread", 7), ("killed", -9)])
async def test_an_episode_whose_guilt_cannot_be_seen_is_found_by_playing_alone(kind: str, code: int) -> None:
    async with playing("Bad", group_size=1) as scene:
        prompts = ["good", kind, "good", "good"]
        expected = ["good", f"the environment's process ended with code {code}", "good", "good"]
        assert await outcomes(scene, prompts) == expected


async def test_an_episode_beside_a_crash_is_played_again_with_the_same_seed_and_its_tokens_are_in_no_group(
    tmp_path: Path,
) -> None:
    async with playing("Bad", group_size=1) as scene:
        undisturbed = await scene.play("waits", marker=str(tmp_path))
    async with playing("Bad", group_size=1) as scene:
        playing_twice = asyncio.ensure_future(scene.play("waits", marker=str(tmp_path / "marker")))
        await until((tmp_path / "marker").exists)  # it has its tokens, and the crash finds it there
        with pytest.raises(EpisodeFailed, match=EXITED):
            await scene.environments.produce(ActiveLease(assign(2)), {"prompt": "exit"})
        payload = await playing_twice
        assert payload.token_ids.tolist() == undisturbed.token_ids.tolist()
        assert scene.engine.stats().generated_tokens >= 2 * payload.num_tokens + 1


async def test_no_more_episodes_share_a_process_than_its_concurrency() -> None:
    async with playing("Counting", group_size=1, processes=2, concurrency=3) as scene:
        groups = [scene.environments.produce(ActiveLease(assign(number)), {"prompt": "1"}) for number in range(1, 19)]
        most = [payload.stages["stage/environment/reward"][0] for payload in await asyncio.gather(*groups)]
        assert max(most) == 3


async def test_an_interrupt_keeps_the_tokens_so_far_and_the_environment_has_the_last_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment, "RETURN_TIMEOUT_S", 60.0)
    async with playing("Endless") as scene:
        group = asyncio.ensure_future(scene.play())
        await until(lambda: scene.engine.stats().generated_tokens > 60)
        scene.interrupt()
        payload = await group
        assert payload.finish.tolist() == [Finish.INTERRUPTED] * 2
        turns = [sum(written for written, _ in spoken(payload, sample)) for sample in range(2)]
        assert payload.stages["stage/environment/reward"].tolist() == turns


async def test_an_interrupt_before_the_first_token_leaves_one() -> None:
    async with playing("Endless", tokens=10**5) as scene:
        scene.held.interrupted = True
        payload = await scene.play()
        assert payload.lengths.tolist() == [1, 1]


async def test_an_interrupted_episode_that_says_nothing_counts_as_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "RETURN_TIMEOUT_S", 0.2)
    for prompt in ("speechless", "slow"):
        async with playing("Endless", reward="") as scene:
            group = asyncio.ensure_future(scene.play(prompt))
            await until(lambda scene=scene: scene.engine.stats().generated_tokens > 5)  # type: ignore[misc]
            scene.interrupt()
            assert (await group).stages["stage/environment/reward"].tolist() == [0.0, 0.0]


async def test_an_abort_ends_the_turn_and_the_episode() -> None:
    async with playing("Dialogue", tokens=10**5) as scene:
        group = asyncio.ensure_future(scene.play())
        await until(lambda: scene.engine.stats().running == 2)
        group.cancel()
        await asyncio.gather(group, return_exceptions=True)
        await until(lambda: scene.engine.stats().running == 0)


async def test_an_aborted_episode_that_will_not_end_is_killed(tmp_path: Path) -> None:
    async with playing("Bad", group_size=1) as scene:
        group = asyncio.ensure_future(scene.play("deaf", pid=str(tmp_path / "pid")))
        await until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        pid = int((tmp_path / "pid").read_text())
        group.cancel()
        await asyncio.gather(group, return_exceptions=True)
        await until(lambda: not Path(f"/proc/{pid}").exists())
        scene.held = ActiveLease(assign(2))
        assert await scene.play("good")


async def test_max_turns_is_the_last_call() -> None:
    async with playing("Dialogue", max_turns=1) as scene:
        with pytest.raises(EpisodeFailed, match=r"environment\.max_turns is 1"):
            await scene.play()


async def test_options_go_to_the_class_and_episodes_are_spread_over_the_processes() -> None:
    async with playing("Dialogue", options={"turns": 4}, processes=2) as scene:
        payload = await scene.play()
        assert [len(spoken(payload, sample)) for sample in range(2)] == [7, 7]


@pytest.mark.parametrize(
    ("name", "settings", "why"),
    [
        ("Nobody", {}, "has no Nobody"),
        ("Dialogue", {"options": {"rounds": 1}}, "making it raised TypeError"),
        ("annotations", {}, "must be callable|has no"),
        ("Path", {"options": {}}, "it must have a method: async def rollout"),
    ],
)
async def test_a_class_that_is_no_environment_is_the_operators_error(
    name: str, settings: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        async with playing(name, **settings):
            pass


@pytest.mark.skipif(importlib.util.find_spec("openai") is None, reason="the openai package is not installed")
async def test_the_openai_package_speaks_to_it() -> None:
    async with playing("OpenAI", tokens=50) as scene:
        payload = await scene.play()
        assert payload.stages["stage/environment/reward"].tolist() == [3.0, 3.0]
        assert [written for written, _ in spoken(payload, 0)] == [True, False, True]


def test_this_process_has_no_child_left() -> None:
    def command(pid: str) -> bytes:
        with suppress(OSError):  # another test's child ends meanwhile
            return Path(f"/proc/{pid}/cmdline").read_bytes()
        return b""

    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    assert [pid for pid in children if env_child.__name__.encode() in command(pid)] == []
