# pyright: basic, reportMissingImports=false
"""The critic of a real run rolls back with it when the trainer is killed beyond its newest checkpoint."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from staleflow.clients.rollout.engines.simulated import VOCABULARY
from staleflow.clients.stage.critic import Critic
from staleflow.clients.stage.history import RunHistory
from staleflow.clients.stage.main import work_until
from staleflow.clients.stage.model_stage import FollowingStage
from staleflow.net.permissions import Role
from staleflow.net.security import client_sockets
from staleflow.process.daemon import Stop
from tests.clients.trainer.service import Service, serving
from tests.clients.trainer.test_process import checkpoints, surviving_steps

pytestmark = pytest.mark.slow

LIMIT_S = 90.0
SETTINGS = (
    *("trainer.algorithm.advantage=gae", "critic.batch=2", "critic.lr=1e-3", "critic.threads=1"),
    *("trainer.steps=1000", "trainer.checkpoint_every=4", "trainer.simulated_step_s=0.2"),
)
State = dict[str, torch.Tensor]


@pytest.fixture
def backbone(model_directory: Path, tmp_path: Path) -> Path:
    """A random model with as many tokens as the simulated engine, beside the tokenizer of another."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
    )
    model: Any = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(tmp_path / "model")
    for path in model_directory.glob("tokenizer*"):
        shutil.copy(path, tmp_path / "model")
    return tmp_path / "model"


class Recorded(Critic):
    """Records its snapshots before each rollback, and its own state after it."""

    rollbacks: list[tuple[RunHistory, dict[int, State], State]]

    def follow(self, history: RunHistory) -> None:
        if not history.lineage:
            super().follow(history)
            return
        snapshots = {version: load_file(self._files._path(version)) for version in self._files.versions()}
        super().follow(history)
        state = {f"model/{name}": value.detach().clone() for name, value in self._model.named_parameters()}
        for name, parameter in self._model.named_parameters():
            state |= {f"adam/{key}/{name}": value.clone() for key, value in self._adam.state[parameter].items()}
        self.rollbacks.append((history, snapshots, state))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - files of other processes raise no event
            await asyncio.sleep(0.05)


@asynccontextmanager
async def learning(service: Service, backbone: Path) -> AsyncGenerator[Recorded]:
    """Run the shipped stage worker with a critic in this process."""
    critic = Recorded(service.config, backbone, service.run_dir / "critic")
    critic.rollbacks = []
    stage = FollowingStage(lambda: critic)
    await stage.start()

    @asynccontextmanager
    async def opened() -> AsyncGenerator[tuple[FollowingStage, int]]:
        try:
            yield stage, 0
        finally:
            await stage.close()

    stop, transport = Stop(), client_sockets(service.config.security, Role.STAGE)
    working = asyncio.create_task(
        work_until(stop, service.config, "critic-0", service.address, "critic", opened=opened(), transport=transport)
    )
    try:
        yield critic
    finally:
        stop.set("the test ends")
        await working


async def kill_beyond_a_checkpoint(service: Service, critic: Critic) -> int:
    """Kill the trainer once the critic has learned from versions after its newest checkpoint; return that version."""
    trainer = service.start_trainer()
    await until(lambda: service.trace("checkpoint"))
    async with asyncio.timeout(LIMIT_S):
        while True:
            os.kill(trainer.pid, signal.SIGSTOP)
            newest = max(checkpoints(service))
            if critic._newest[1] > newest and service.trace("consume")[-1]["step"] >= newest:
                trainer.kill()
                await asyncio.to_thread(trainer.wait, LIMIT_S)
                return newest
            os.kill(trainer.pid, signal.SIGCONT)
            await asyncio.sleep(0.1)


async def test_a_killed_trainer_takes_the_critic_back_to_its_snapshot_of_the_checkpoint(backbone: Path) -> None:
    with serving(*SETTINGS, f"model.path={backbone}") as service:
        async with learning(service, backbone) as critic:
            newest = await kill_beyond_a_checkpoint(service, critic)
            service.start_trainer()
            await until(lambda: critic.rollbacks)
            history, snapshots, state = critic.rollbacks[0]
            assert [event["to_version"] for event in service.trace("rollback")] == [newest]
            assert history.forks == ((0, 0), (1, newest + 1))
            expected = snapshots[max(version for version in snapshots if version <= newest)]
            waiting = {name for name in expected if name.startswith("group/")}
            assert state.keys() == expected.keys() - waiting
            assert all(torch.equal(state[name], expected[name]) for name in state)
            assert int(state["adam/step/head.weight"]) > 0
            await until(lambda: critic._newest[0] == 1)  # it learns from the new lineage
        steps = surviving_steps(service)
        assert steps == list(range(len(steps)))
