# pyright: basic, reportMissingImports=false
"""A worker process with a real model works among real servers and ends cleanly."""

import asyncio
import itertools
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.clients.attachment import attach
from staleflow.clients.prompts import Encode
from staleflow.clients.rollout import main, session
from staleflow.clients.rollout.engines.base import Trajectory
from staleflow.clients.rollout.engines.simulated import SimulatedEngine
from staleflow.clients.rollout.engines.thread import EngineThread
from staleflow.clients.weights import Publisher
from staleflow.configs.loading.load import addresses, read_run, write_resolved
from staleflow.configs.schema import Config, Model, Prompts, Reward, Rollout, Scheduler
from staleflow.configs.simulation import Simulated
from staleflow.net.client import Client
from staleflow.protocols.consistency.ids import Lineage, Version, WorkerId
from staleflow.protocols.wire.messages import (
    Attach,
    GetStageWork,
    GetStatus,
    Join,
    JoinReply,
    SchedulerStatus,
    StageItem,
    StageWork,
)
from staleflow.protocols.wire.tensors import unpack
from staleflow.protocols.wire.trajectory import GroupPayload
from tests.clients.rollout.engines.waiting import until
from tests.servers.running import eventually

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ME = WorkerId("trainer.test")


def model_directory(path: Path, seed: int) -> Any:
    from staleflow.examples.quickstart.model import character_tokenizer, shape

    torch.manual_seed(seed)
    tokenizer = character_tokenizer()
    model = transformers.Qwen3ForCausalLM(shape(tokenizer, 32, 2, 4))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return model.eval()


def configured(run_dir: Path, model: Path, **rollout: Any) -> Config:
    config = Config(
        model=Model(path=str(model)),
        prompts=Prompts(source="staleflow.examples.quickstart.task:prompts"),
        reward=Reward(run="staleflow.examples.quickstart.task:reward"),
        rollout=Rollout(group_size=2, max_inflight=8, max_new_tokens=12, **rollout),
        scheduler=Scheduler(lease_s=5),
    )
    write_resolved(config, run_dir)
    return config


@contextmanager
def process(*words: str) -> Iterator[subprocess.Popen[str]]:
    """Run ``staleflow ...`` until the end of the test at the latest."""
    command = [sys.executable, "-m", "staleflow.cli", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


@contextmanager
def servers(run_dir: Path) -> Iterator[None]:
    at = ("--run-dir", str(run_dir))
    with process("serve", "scheduler", *at), process("serve", "trajectories", *at), process("serve", "parameters", *at):
        yield


async def publish(scheduler: Client, model: Any) -> None:
    """Act as the trainer until version 0 is published."""
    found = await attach(scheduler, Attach(worker=ME, name="trainer", role="trainer"), parameters=True)
    term = (await scheduler.ask(Join(trainer=ME, lineage=Lineage(0), version=Version(0)), JoinReply)).trainer_term
    publisher = Publisher(found.parameters, worker=ME)
    weights = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    await publisher.publish(weights, trainer_term=term, lineage=Lineage(0), version=Version(0), batch=None)
    publisher.close()


async def take(address: str, count: int) -> list[tuple[StageItem, GroupPayload]]:
    """Take the first groups that a stage receives."""
    shard = Client(address, worker=ME)
    taken: list[tuple[StageItem, GroupPayload]] = []
    async with asyncio.timeout(120):
        while len(taken) < count:
            work, frames = await shard.call(GetStageWork(stage="reward", worker=ME, max_groups=4), timeout_s=None)
            assert isinstance(work, StageWork)
            for item in work.items:
                payload = GroupPayload.from_arrays({n: np.array(a) for n, a in unpack(frames.pop(0)).items()})
                taken.append((item, payload))
    shard.close()
    return taken


async def left(scheduler: Client) -> bool:
    """Return whether the rollout worker has left and none of its leases remains."""
    status = await scheduler.ask(GetStatus(), SchedulerStatus)
    return status.ledger["leased"] == 0 and all(worker.role != "rollout" for worker in status.workers)


def check(model: Any, prompt: str, payload: GroupPayload) -> None:
    """Check that the pushed log-probabilities are those of the published weights."""
    from staleflow.examples.quickstart.model import character_tokenizer

    prompt_ids = character_tokenizer()(prompt)["input_ids"]
    assert payload.prompt_ids.tolist() == prompt_ids
    assert payload.token_versions().tolist() == [0] * payload.num_tokens
    for start, end in itertools.pairwise(np.cumsum([0, *payload.lengths])):
        token_ids = torch.tensor(payload.token_ids[start:end].astype(np.int64))
        with torch.inference_mode():
            logits = model(input_ids=torch.cat([torch.tensor(prompt_ids), token_ids])[None]).logits[0]
        expected = logits[len(prompt_ids) - 1 : -1].log_softmax(-1).gather(-1, token_ids[:, None])[:, 0]
        np.testing.assert_allclose(payload.logprobs[start:end], expected.numpy(), atol=1e-4)


async def test_pushed_groups_were_written_by_the_published_weights(tmp_path: Path) -> None:
    model_directory(tmp_path / "model", seed=0)
    published = model_directory(tmp_path / "other", seed=1)
    run_dir = tmp_path / "run"
    config = configured(run_dir, tmp_path / "model")
    where = addresses(config, run_dir)
    with servers(run_dir), process("attach", "rollout", "--run-dir", str(run_dir), "--name", "rollout-0") as worker:
        scheduler = Client(where.scheduler, worker=ME)
        await publish(scheduler, published)
        for item, payload in await take(where.trajectories[0], 4):
            check(published, item.row["prompt"], payload)
        worker.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(worker.wait, 60) == 0
        if "detach failed: no answer" in (run_dir / "logs" / "rollout-0.log").read_text():
            await eventually(lambda: left(scheduler))  # it does not wait long for a scheduler that stands still
        assert await left(scheduler)
        scheduler.close()


def test_a_signal_ends_a_worker_that_waits_for_its_run(tmp_path: Path) -> None:
    model_directory(tmp_path / "model", seed=0)
    configured(tmp_path / "run", tmp_path / "model", engine="simulated")
    with process("attach", "rollout", "--run-dir", str(tmp_path / "run"), "--name", "rollout-0") as worker:
        log = tmp_path / "run" / "logs" / "rollout-0.log"
        asyncio.run(until(lambda: log.exists() and "waiting for the scheduler" in log.read_text(), 120))
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0


class Broken(SimulatedEngine):
    """An engine that fails at its first step, for every request."""

    def step(self) -> list[Trajectory]:
        raise MemoryError("Unable to allocate 8 GiB")


def test_an_engine_that_crashes_ends_its_worker_and_the_leases_go_back_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published, run_dir = model_directory(tmp_path / "model", seed=0), tmp_path / "run"
    configured(run_dir, tmp_path / "model")
    config = read_run(run_dir)

    async def opened(*_: object) -> tuple[EngineThread, Encode]:
        return EngineThread(Broken(Simulated(), slots=8)), main.text_bytes

    async def asked(before: bool) -> bool:
        scheduler = Client(addresses(config, run_dir).scheduler, worker=ME)
        try:
            if before:
                await publish(scheduler, published)
            return await left(scheduler)
        finally:
            scheduler.close()

    def released() -> dict[str, str]:
        """Groups of released leases, each with the reason."""
        lines = (run_dir / "trace.jsonl").read_bytes().split(b"\n")[:-1]  # the last line may be incomplete
        return {str(event["group"]): event["why"] for event in map(json.loads, lines) if event["ev"] == "release"}

    monkeypatch.setattr(main, "open_engine", opened)
    monkeypatch.setattr(session, "LEAVE_TIMEOUT_S", 60.0)  # the scheduler may be slow to reply
    with servers(run_dir):
        asyncio.run(asked(before=True))
        assert main.attach(config, run_dir, "rollout-0", addresses(config, run_dir).scheduler) == 1
        assert asyncio.run(asked(before=False))
    log = (run_dir / "logs" / "rollout-0.log").read_text()
    named = re.search(r"engine of (rollout-0\.\w+) failed, releasing the leases of its groups: (\d+(?:, \d+)*)", log)
    assert named is not None
    assert "MemoryError('Unable to allocate 8 GiB'); lower rollout.max_inflight, or rollout.max_new_tokens" in log
    why = [released()[group] for group in named[2].split(", ")]
    assert "aborted" in why
    assert set(why) <= {"aborted", "expired"}


@pytest.mark.parametrize("missing", ["directory", "tokenizer", "embeddings"])
def test_a_model_directory_that_cannot_be_used_is_the_operators_error(
    tmp_path: Path, missing: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if missing == "embeddings":
        model_directory(tmp_path / "model", seed=0)
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
        tokenizer.add_tokens(["more"])
        tokenizer.save_pretrained(tmp_path / "model")
    if missing == "tokenizer":
        model_directory(tmp_path / "model", seed=0)
        for file in (tmp_path / "model").glob("tokenizer*"):
            file.unlink()
    config = configured(tmp_path / "run", tmp_path / "model")
    assert main.attach(config, tmp_path / "run", "rollout-0", "ipc:///nowhere") == 2
    told = {
        "directory": "no such directory",
        "tokenizer": "it has no tokenizer",
        "embeddings": "they do not belong together",
    }
    assert f"{told[missing]}" in capfd.readouterr().err
