# pyright: basic, reportMissingImports=false
# mypy: disable-error-code="no-untyped-call"
"""Environments of the real package ``verifiers`` are played through the chat server and scored by their rubrics."""

import json
import signal
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("verifiers")

import verifiers as vf
from datasets import Dataset

from staleflow.clients.rollout.engines.base import AsyncEngine, Sampling
from staleflow.clients.rollout.engines.thread import EngineThread
from staleflow.clients.rollout.episodes.chat.server import ChatServer
from staleflow.clients.rollout.episodes.env_client import Client
from staleflow.clients.rollout.episodes.environment import Environments
from staleflow.clients.rollout.episodes.episode import Episode
from staleflow.clients.rollout.groups import ActiveLease, Recipe
from staleflow.configs.schema import Config, Environment, Prompts, Reward
from staleflow.examples.environments import verifiers_env
from staleflow.examples.environments.verifiers_env import VerifiersEnvironment
from tests.clients.rollout.peers import assign

RUN = "staleflow.examples.environments.verifiers_env:VerifiersEnvironment"
CALCULATOR = "staleflow.examples.environments.verifiers_calculator:load_environment"
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "2+1"}}</tool_call><eos>'
SAMPLING = Sampling(max_new_tokens=16, temperature=0.5)
GROUP = 8
HERE = Path(__file__)
ROW = {"question": "2+1=", "answer": "3", "info": {"value": 0.5}}
DATASET = Dataset.from_list([ROW])


def with_image() -> Any:
    row = {"question": "q", "image": b"png"}
    return vf.SingleTurnEnv(dataset=Dataset.from_list([row]), rubric=vf.Rubric(funcs=[lambda: 0.0]))


def two_functions() -> Any:
    """The name of the second function cannot be that of a column."""

    async def turns(state: Any) -> float:
        return float(len(state["trajectory"]))

    async def value(info: dict[str, Any]) -> float:
        return float(info["value"])

    value.__name__ = "<value>"
    return vf.SingleTurnEnv(dataset=DATASET, rubric=vf.Rubric(funcs=[turns, value], weights=[1.0, 4.0]))


def endless() -> Any:
    class Endless(vf.MultiTurnEnv):  # type: ignore[misc]
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            return [{"role": "user", "content": "2+1="}]

    async def asked(completion: list[Any]) -> float:
        return float(sum(message.role == "user" for message in completion))

    return Endless(dataset=DATASET, rubric=vf.Rubric(funcs=[asked]))


def whole_group() -> Any:
    def ranked(completions: list[Any]) -> list[float]:
        return [0.0 for _ in completions]

    return vf.SingleTurnEnv(dataset=DATASET, rubric=vf.Rubric(funcs=[ranked]))


def without_sandbox() -> Any:
    class WithoutSandbox(vf.SingleTurnEnv):  # type: ignore[misc]
        async def setup_state(self, state: Any) -> Any:
            raise vf.SandboxError("no sandbox")

    return WithoutSandbox(dataset=DATASET, rubric=vf.Rubric(funcs=[lambda: 0.0]))


@pytest.fixture(autouse=True)
def _signal_handlers() -> Iterator[None]:
    """Restore those of pytest: an environment that is made in this process replaces them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from staleflow.examples.environments import agent_model

    directory = tmp_path_factory.mktemp("model")
    agent_model.build.__wrapped__(directory, 0, limit=3, hedged=0.0, steps=60, batch=16)  # type: ignore[attr-defined]
    return directory


@pytest.fixture
async def engine(model: Path) -> AsyncIterator[AsyncEngine]:
    from transformers import AutoModelForCausalLM

    from staleflow.clients.rollout.engines.transformers.engine import TransformersEngine
    from staleflow.clients.tokens import open_tokenizer

    stop_ids = [open_tokenizer(model).eos_token_id]
    policy = AutoModelForCausalLM.from_pretrained(model).eval()
    engine = EngineThread(TransformersEngine(policy, stop_ids, slots=GROUP, version=0))
    yield engine
    await engine.close()


async def played(model: Path, engine: AsyncEngine, make: Any, row: dict[str, Any], **settings: Any) -> dict[str, float]:
    """Return the numbers of one episode, played in this process through the chat server."""
    from staleflow.clients.rollout.episodes.chat.tokenizer import open_chat_template

    environment = VerifiersEnvironment(f"{HERE}:{make.__name__}")
    episode = Episode(engine, open_chat_template(model), SAMPLING, seed=0, settings=Environment(run=RUN, **settings))
    server = ChatServer()
    await server.start()
    try:
        return await environment.rollout(Client(server.base_url, server.open(episode.answer)), row)
    finally:
        episode.close()
        await server.close()


def as_row(question: dict[str, Any]) -> dict[str, Any]:
    entry = {**question, "prompt": [{"role": "user", "content": question["question"]}], "example_id": 0}
    return {"prompt": question["question"], "input": json.dumps(entry)}


async def test_a_tool_environment_is_played_unchanged_and_its_rubric_gives_the_reward(
    model: Path, engine: AsyncEngine
) -> None:
    from staleflow.clients.rollout.episodes.chat.tokenizer import open_chat_template
    from staleflow.clients.tokens import open_tokenizer

    options: dict[str, Any] = {"environment": CALCULATOR, "arguments": {"limit": 3}}
    with ThreadPoolExecutor(1) as trainer:  # which reads its rows in a thread
        rows = trainer.submit(partial(verifiers_env.prompts, 0, **options)).result()
    row = next(row for row in rows if row["prompt"] == "2+1=")
    assert json.loads(row["input"])["answer"] == "3"
    settings = Environment(run=RUN, options=options, timeout_s=100.0)
    config = Config(prompts=Prompts(path="p"), reward=Reward(run=""), environment=settings)
    recipe = Recipe(group_size=GROUP, started=GROUP, sampling=SAMPLING, seed=0)
    environments = Environments(config, engine, open_chat_template(model), recipe)
    try:
        await environments.start()
        payload = await environments.produce(ActiveLease(assign(1)), row)
    finally:
        await environments.close()
    payload.check()
    tokenizer = open_tokenizer(model)
    assert tokenizer.decode(payload.prompt_ids.tolist()) == "<tools>calculator<user>2+1=<assistant>"
    numbers = {name.removeprefix("stage/environment/"): column for name, column in payload.stages.items()}
    assert set(numbers) == {"reward", "correct", "num_turns", "total_tool_calls", "calculator_calls"}
    assert np.array_equal(numbers["reward"], numbers["correct"])
    right = np.flatnonzero(numbers["reward"] * (numbers["calculator_calls"] == 1) * (numbers["num_turns"] == 2))
    assert right.size >= GROUP // 4, "some samples call the tool once, then give the right answer"
    sample = int(right[0])
    start = int(payload.lengths[:sample].sum())
    tokens = slice(start, start + int(payload.lengths[sample]))
    sampled = payload.loss_mask[tokens] == 1
    assert tokenizer.decode(payload.token_ids[tokens][~sampled].tolist()) == "<tool>3<assistant>"
    assert tokenizer.decode(payload.token_ids[tokens][sampled].tolist()) == f"{CALL}3<eos>"


def test_the_evaluation_dataset_is_held_out() -> None:
    held_out = verifiers_env.held_out(0, environment=CALCULATOR, arguments={"limit": 10})
    assert held_out
    for row in held_out:
        left, right = row["prompt"].rstrip("=").split("+")
        assert json.loads(row["input"])["prompt"] == [{"role": "user", "content": row["prompt"]}]
        assert json.loads(row["input"])["answer"] == str(int(left) + int(right))


async def test_the_reward_is_the_weighted_sum_and_each_function_is_a_number(model: Path, engine: AsyncEngine) -> None:
    numbers = await played(model, engine, two_functions, as_row(ROW))
    assert numbers == {"reward": 3.0, "turns": 1.0, "_value_": 0.5, "num_turns": 1.0}


async def test_the_limit_of_turns_of_the_run_ends_an_episode_which_is_scored(model: Path, engine: AsyncEngine) -> None:
    numbers = await played(model, engine, endless, as_row(ROW), max_turns=2)
    assert numbers == {"reward": 1.0, "num_turns": 2.0, "asked": 1.0}


async def test_an_environment_that_fails_is_named_with_its_error(model: Path, engine: AsyncEngine) -> None:
    with pytest.raises(RuntimeError, match=r"rollout ended with SandboxError\('no sandbox'\)"):
        await played(model, engine, without_sandbox, as_row(ROW))


async def test_a_row_of_another_source_is_refused(model: Path, engine: AsyncEngine) -> None:
    with pytest.raises(ValueError, match=r'the row has no column "input"; set prompts\.source to staleflow'):
        await played(model, engine, two_functions, {"prompt": "2+1="})


@pytest.mark.parametrize(
    ("environment", "refusal"),
    [
        ("no-such", r"environment='no-such': ValueError: Could not import 'no-such'.* \(No module named 'no_such'\)"),
        (f"{HERE}:absent", r"environment='.*:absent': ConfigError: .* has no absent"),
        ("builtins:dict", r"environment='builtins:dict' is a dict; it must be a verifiers\.Environment"),
        (f"{HERE}:whole_group", r"whole_group' has a reward function of whole groups; an episode is scored alone"),
    ],
)
def test_an_environment_that_cannot_be_played_is_refused_in_one_line(environment: str, refusal: str) -> None:
    with pytest.raises(ValueError, match=refusal) as raised:
        VerifiersEnvironment(environment)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("rows", "make", "refusal"),
    [
        (verifiers_env.held_out, two_functions, r"has no eval dataset; prompts\.eval_source must be"),
        (verifiers_env.prompts, with_image, r"with_image': Object of type bytes .*; rows must be text and numbers"),
    ],
)
def test_rows_that_do_not_exist_or_cannot_be_sent_are_refused(rows: Any, make: Any, refusal: str) -> None:
    with pytest.raises(ValueError, match=refusal) as raised:
        rows(0, environment=f"{HERE}:{make.__name__}")
    assert "\n" not in str(raised.value)
