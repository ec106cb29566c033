"""The training loop decides correctly, with a scripted backend and a client that only records its calls."""

import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from staleflow.clients.trainer.backends.base import Backend, OutOfMemory, StepResult, Stopped, Stopping, Weights
from staleflow.clients.trainer.checkpoint import Checkpoints, TrainerState
from staleflow.clients.trainer.client import TrainerClient
from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.clients.trainer.data.prefetch import NoBatch
from staleflow.clients.trainer.errors import BadVersion, Fenced
from staleflow.clients.trainer.loop import GaveUp, TrainingLoop
from staleflow.clients.trainer.samples import Samples
from staleflow.clients.trainer.steps import WholeSteps
from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import Lineage, Step, TrainerTerm, Version
from staleflow.protocols.wire.messages import JoinReply
from tests.clients.trainer.making import batch, config


class Told:
    """A service whose newest version is ``version``; records every publication."""

    def __init__(self, version: int = -1, *, refuse: tuple[int, ...] = (), batches: int = 99) -> None:
        self.waited_s = 0.25
        self.newest = version
        self.published: list[tuple[int, list[float]]] = []
        self.told: list[tuple[Any, ...]] = []
        self.lines: dict[int, Mapping[str, float]] = {}
        self._refuse = refuse
        self._batches = batches
        self._held = 0
        self._current = 0
        self.crowded_at: tuple[int, ...] = ()
        self.full_at: tuple[int, ...] = ()
        self.fenced = self.deaf = False
        self.kept = [0]
        self.drained = ""
        self.on_wait: Callable[[], None] = lambda: None

    def crowded(self) -> bool:
        return self._current + 1 in self.crowded_at

    def join(self, lineage: int, version: int) -> JoinReply:
        if version in self._refuse:
            raise BadVersion(f"version {version}")
        if version < self.newest:
            lineage += 1
        self.told.append(("join", lineage, version))
        self._held = version
        return JoinReply(trainer_term=TrainerTerm(1), lineage=Lineage(lineage), version=Version(self.newest))

    def publish_initial(self, weights: Weights) -> None:
        self.published.append((0, weights["w"].tolist()))

    def holds(self, weights: Weights) -> None:
        pass

    def batches(self, steps: int) -> Iterator[TrainBatch]:
        for step in range(self._held, min(steps, self._held + self._batches)):
            self._current = step - 1
            self.on_wait()
            self._current = step
            yield batch(step, groups=1, lengths=(2, 3))

    def commit(self, weights: Weights) -> Version:
        self.published.append((self._current + 1, weights["w"].tolist()))
        return Version(self._current + 1)

    def begin_commit(self, weights: Weights) -> Version:
        return self.commit(weights)

    def before_update(self) -> None:
        pass

    def finish_commit(self) -> None:
        pass

    def wait_published(self, version: int) -> None:
        pass

    def commit_result(self) -> Callable[[], None]:
        return self.finish_commit

    def cancel_commit(self) -> None:
        pass

    def checkpointed(self, lineage: int, version: int, *, keep: int) -> Version | None:
        if self.fenced:
            raise Fenced("another trainer has joined the run")
        self.told.append(("checkpointed", lineage, version))
        self.kept = [*(older for older in self.kept if older < version), version][-keep:]
        return None if self.deaf else Version(self.kept[0])

    def full(self) -> bool:
        return self._current + 1 in self.full_at

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.lines[step] = values

    def finished(self, error: str = "") -> None:
        self.told.append(("finished", error))


class Counting:
    """Weights count the good steps; ``bad`` lists the bad steps and ``stopped`` the step that is interrupted."""

    def __init__(self, bad: tuple[int, ...] = (), stopped: int = -1) -> None:
        self.count = 0
        self._bad = bad
        self._stopped = stopped
        self.evaluated: list[int] = []

    def check(self, directory: Path) -> None:
        pass

    def load(self, directory: Path | None) -> None:
        self.count = int((directory / "count").read_text()) if directory else 0

    def save(self, directory: Path) -> None:
        (directory / "count").write_text(str(self.count))

    def weights(self) -> Weights:
        return {"w": np.array([self.count], np.float32)}

    def train(self, batch: TrainBatch, step: Step, stopping: Stopping) -> StepResult:
        if step == self._stopped:
            raise Stopped
        if step in self._bad:
            return StepResult(values={"loss": float("nan"), "grad_norm": 1.0}, bad="loss is nan")
        self.count += 1
        return StepResult(values={"loss": 0.5})

    def evaluate(self, version: Version, stopping: Stopping) -> dict[str, float]:
        self.evaluated.append(version)
        return {"reward/eval": version / 10}

    def close(self) -> None:
        pass


class Refusing(Told):
    """A run that takes back the batch of step 3."""

    def commit(self, weights: Weights) -> Version:
        if self._current == 3:
            raise BadVersion("step 3: batch 4 was taken back")
        return super().commit(weights)


def loop(
    folder: Path,
    client: Told,
    backend: Backend,
    settings: Config | None = None,
    stop: threading.Event | None = None,
    samples: Samples | None = None,
    keep: int = 3,
) -> TrainingLoop:
    settings = settings or config(steps=6, checkpoint_every=2)
    return TrainingLoop(
        settings,
        client=cast(TrainerClient, client),
        backend=backend,
        steps=WholeSteps(backend),
        checkpoints=Checkpoints(folder, run="r1", keep=keep),
        stop=stop or threading.Event(),
        samples=samples,
    )


def kept(folder: Path) -> list[int]:
    return [state.version for _, state in Checkpoints(folder, run="r1", keep=3).newest()]


def test_a_whole_run_publishes_every_version_and_keeps_its_checkpoints(tmp_path: Path) -> None:
    client = Told()
    loop(tmp_path, client, Counting()).run()
    assert client.published == [(version, [float(version)]) for version in range(7)]
    assert client.told == [
        ("join", 0, 0),
        ("checkpointed", 0, 2),
        ("checkpointed", 0, 4),
        ("checkpointed", 0, 6),
        ("finished", ""),
    ]
    assert kept(tmp_path) == [6, 4, 2]


def test_a_step_on_tokens_of_another_model_is_neither_published_nor_saved(tmp_path: Path) -> None:
    class Apart(Counting):
        def train(self, batch: TrainBatch, step: Step, stopping: Stopping) -> StepResult:
            super().train(batch, step, stopping)
            compared = {"mismatch_k1": 2.0, "off_policy/share": 1.0, "is_weight/ess": 1.0}
            return StepResult(
                values={f"{name}/age_0": value for name, value in compared.items()} | {"trainer/tokens": 99}
            )

    client = Told()
    with pytest.raises(ConfigError, match=r"max_mismatch is 0\.5; engine and trainer differ by 2 nats a token"):
        loop(tmp_path, client, Apart()).run()
    assert client.published == [(0, [0.0])]
    assert kept(tmp_path) == []


def test_every_step_whose_version_is_out_is_shown_to_whoever_reads_samples(tmp_path: Path) -> None:
    client, shown = Told(), list[tuple[int, int]]()

    class Kept:
        def write(self, batch: TrainBatch) -> None:
            shown.append((batch.step, client.published[-1][0]))

    loop(tmp_path, client, Counting(bad=(1,)), samples=cast(Samples, Kept())).run()
    assert shown == [(step, step + 1) for step in range(6)]


def test_a_checkpoint_comes_early_when_the_trajectory_servers_are_filling(tmp_path: Path) -> None:
    client = Told()
    client.crowded_at = (3,)
    loop(tmp_path, client, Counting(), config(steps=6, checkpoint_every=5)).run()
    assert [version for _, _, version in client.told[1:-1]] == [3, 5, 6]
    assert client.kept == [3, 5, 6]


def test_while_the_trajectory_servers_are_filling_payload_is_kept_for_two_checkpoints(tmp_path: Path) -> None:
    client = Told()
    client.crowded_at = (5, 6)
    loop(tmp_path, client, Counting(), config(steps=6, checkpoint_every=2), keep=4).run()
    assert client.kept == [5, 6]
    assert kept(tmp_path) == [6, 5, 4, 2], "the directories stay"


def test_while_it_waits_for_a_batch_a_checkpoint_makes_room_where_pushes_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = Told()
    client.full_at = (0, 3, 5)
    loop(tmp_path, client, Counting(), config(steps=6, checkpoint_every=5)).run()
    assert [version for _, _, version in client.told[1:-1]] == [3, 5, 5, 6], "none of the initial model"
    assert caplog.text.count("saving an early checkpoint and keeping payload for no older one") == 2
    assert client.kept == [5, 6], "only a full server costs the older ones"


def damage(checkpoint: Path, name: str = "count") -> None:
    """Change the last byte of a file."""
    data = (checkpoint / name).read_bytes()
    (checkpoint / name).write_bytes(data[:-1] + bytes((data[-1] ^ 1,)))


def test_a_damaged_newest_checkpoint_is_set_aside_and_the_run_resumes_from_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop(tmp_path, Told(), Counting(stopped=5)).run()
    assert kept(tmp_path) == [5, 4, 2]
    before = {path.name: path.read_bytes() for path in (tmp_path / "5").iterdir()}
    damage(tmp_path / "5")
    damaged = {path.name: path.read_bytes() for path in (tmp_path / "5").iterdir()}
    assert damaged != before
    client = Told(version=5)
    loop(tmp_path, client, Counting()).run()
    assert client.told[0] == ("join", 1, 4)
    assert client.published == [(5, [5.0]), (6, [6.0])]
    (aside,) = tmp_path.glob("5.*.damaged")
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == damaged
    said = (
        f"checkpoint 5 is damaged (count does not match its checksum): set aside as {aside}, resumed from {tmp_path}/4"
    )
    assert [record.levelname for record in caplog.records if said in record.getMessage()] == ["WARNING"]
    assert kept(tmp_path) == [6, 4, 2]


@pytest.mark.parametrize("file", ["count", "checkpoint.json"])
def test_where_no_checkpoint_is_whole_the_initial_model_is_one_as_long_as_the_run_keeps_its_batches(
    tmp_path: Path, file: str
) -> None:
    loop(tmp_path, Told(), Counting(stopped=3), keep=2).run()
    damage(tmp_path / "2", file)
    damage(tmp_path / "3", file)
    client = Told(version=3)
    loop(tmp_path, client, Counting(), keep=2).run()
    assert client.told[0] == ("join", 1, 0)
    assert client.published == [(version, [float(version)]) for version in range(1, 7)]
    assert len([*tmp_path.glob("*.damaged")]) == 2


def test_where_nothing_whole_is_left_the_trainer_is_refused_in_one_line_and_everything_stays(tmp_path: Path) -> None:
    """The error names the weights that are still readable: those of the newest directory with an intact model."""

    class Model(Counting):
        def save(self, directory: Path) -> None:
            super().save(directory)
            for name in ("config.json", "model.safetensors", "trainer.safetensors"):
                (directory / name).write_text(name)

    loop(tmp_path, Told(), Model(stopped=5)).run()
    damage(tmp_path / "5", "model.safetensors")
    damage(tmp_path / "4", "trainer.safetensors")
    before = sorted(tmp_path.rglob("*"))
    for _ in range(2):
        with pytest.raises(ConfigError) as refused:
            loop(tmp_path, Told(version=5, refuse=(0, 2)), Model()).run()
        text = str(refused.value)
        assert "\n" not in text
        assert "5 is damaged (model.safetensors does not match its checksum)" in text
        assert "4 is damaged (trainer.safetensors does not match its checksum)" in text
        assert "2 is rejected (version 2); the initial model is rejected (version 0)" in text
        assert f"start a new run with model.path={tmp_path}/4 " in text
        assert sorted(tmp_path.rglob("*")) == before


def test_a_checkpoint_that_another_trainer_saved_meanwhile_is_tried_before_the_run_is_given_up(tmp_path: Path) -> None:
    class Late(Told):
        def join(self, lineage: int, version: int) -> JoinReply:
            if version == 0:
                Checkpoints(tmp_path, run="r1", keep=3).save(TrainerState(version=Version(3)), Counting().save)
            return super().join(lineage, version)

    client = Late(version=3, refuse=(0,))
    loop(tmp_path, client, Counting()).run()
    assert client.told[0] == ("join", 0, 3)


@pytest.mark.parametrize("version", [5, 4])
def test_a_fenced_trainer_that_is_asked_to_end_leaves_what_its_successor_saved(tmp_path: Path, version: int) -> None:
    client, successor = Told(), Checkpoints(tmp_path, run="r1", keep=1)
    saved = TrainerState(lineage=Lineage(1), version=Version(version))

    class Long(Counting):
        def train(self, batch: TrainBatch, step: Step, stopping: Stopping) -> StepResult:
            if step == 5:
                client.fenced = True
                successor.save(saved, Counting().save)
                successor.tidy(saved, saved.version)
                raise Stopped
            return super().train(batch, step, stopping)

    with pytest.raises(Fenced, match="another trainer has joined the run"):
        loop(tmp_path, client, Long(), config(steps=6, checkpoint_every=3), keep=1).run()
    assert saved in [state for _, state in successor.newest()]


def test_older_checkpoints_stay_until_the_run_has_heard_of_a_newer_one(tmp_path: Path) -> None:
    client = Told()
    client.deaf = True
    loop(tmp_path, client, Counting(), config(steps=6, checkpoint_every=1), keep=1).run()
    assert kept(tmp_path) == [6, 5, 4, 3, 2, 1]


def test_a_bad_step_is_counted_and_named_and_publishes_identical_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = Told()
    loop(tmp_path, client, Counting(bad=(1, 2, 4))).run()
    assert [weights for _, [weights] in client.published] == [0.0, 1.0, 1.0, 1.0, 2.0, 2.0, 3.0]
    assert "step 2: loss is nan; batch consumed, weights unchanged (2 in a row)" in caplog.text
    assert [line["trainer/bad_steps"] for line in client.lines.values() if "trainer/bad_steps" in line] == [
        *(0.0, 1.0, 2.0, 2.0, 3.0, 3.0)
    ]
    assert "loss" not in client.lines[1]
    assert client.told[-1] == ("finished", "")


def test_the_third_bad_step_in_a_row_is_not_consumed_and_stops_the_run_with_its_batch_kept(tmp_path: Path) -> None:
    client = Told()
    with pytest.raises(GaveUp, match="step 3: loss is nan, the third in a row; batch 4 is kept"):
        loop(tmp_path, client, Counting(bad=(1, 2, 3))).run()
    assert client.published[-1] == (3, [1.0])
    assert client.told[-2:] == [
        ("checkpointed", 0, 3),
        ("finished", "step 3: loss is nan, the third in a row; batch 4 is kept"),
    ]
    again = Told(version=3)
    with pytest.raises(GaveUp):
        loop(tmp_path, again, Counting(bad=(3,))).run()
    assert again.published == []


def test_a_step_whose_batch_was_taken_back_is_neither_saved_nor_the_end_of_the_run(tmp_path: Path) -> None:
    client = Refusing()
    with pytest.raises(BadVersion, match="batch 4 was taken back"):
        loop(tmp_path, client, Counting()).run()
    assert client.published[-1] == (3, [3.0])
    assert client.told == [("join", 0, 0), ("checkpointed", 0, 2)]
    assert kept(tmp_path) == [2]


class Small(Counting):
    """A backend without memory for step 3; with ``can_save``, no other rank waits for it in that step."""

    def __init__(self, *, can_save: bool, disk: Exception | None = None) -> None:
        super().__init__()
        self._can_save = can_save
        self._disk = disk

    def train(self, batch: TrainBatch, step: Step, stopping: Stopping) -> StepResult:
        if step == 3:
            raise OutOfMemory("step 3: out of memory; batch 4 of 2 trajectories is kept", can_save=self._can_save)
        return super().train(batch, step, stopping)

    def save(self, directory: Path) -> None:
        if self.count == 3 and self._disk is not None:
            raise self._disk
        super().save(directory)


NO_ROOM = ("finished", "step 3: out of memory; batch 4 of 2 trajectories is kept")


@pytest.mark.parametrize(("can_save", "kept"), [(True, 3), (False, 2)])
def test_a_step_that_does_not_fit_the_device_stops_the_run_with_its_batch_and_the_steps_before_it_kept(
    tmp_path: Path, *, can_save: bool, kept: int
) -> None:
    client = Told()
    with pytest.raises(GaveUp, match="step 3: out of memory; batch 4"):
        loop(tmp_path, client, Small(can_save=can_save)).run()
    assert client.published[-1] == (3, [3.0])
    assert client.told[-2:] == [("checkpointed", 0, kept), NO_ROOM]
    assert (tmp_path / str(kept) / "count").read_text() == str(kept)
    assert (tmp_path / "3").exists() == can_save


def test_the_run_is_told_why_it_ends_where_there_is_no_memory_for_a_checkpoint_either(tmp_path: Path) -> None:
    client = Told()
    with pytest.raises(GaveUp, match="step 3: out of memory; batch 4"):
        loop(tmp_path, client, Small(can_save=True, disk=MemoryError())).run()
    assert client.told[-2:] == [("checkpointed", 0, 2), NO_ROOM]
    with pytest.raises(RuntimeError, match="the weights are a ruin"):
        loop(tmp_path, Told(), Small(can_save=True, disk=RuntimeError("the weights are a ruin"))).run()


def test_a_batch_that_can_never_come_ends_the_run_with_the_reason_and_keeps_what_was_learned(tmp_path: Path) -> None:
    class Spent(Told):
        def batches(self, steps: int) -> Iterator[TrainBatch]:
            yield from super().batches(3)
            raise NoBatch("step 3 can never be trained: the prompts are used up")

    client = Spent()
    with pytest.raises(GaveUp, match="step 3 can never be trained: the prompts are used up"):
        loop(tmp_path, client, Counting()).run()
    assert client.published[-1] == (3, [3.0])
    assert client.told[-2:] == [
        ("checkpointed", 0, 3),
        ("finished", "step 3 can never be trained: the prompts are used up"),
    ]


def test_a_drained_run_is_saved_and_finished_without_an_error(tmp_path: Path) -> None:
    client = Told(batches=3)
    client.drained = "night"
    loop(tmp_path, client, Counting()).run()
    assert kept(tmp_path) == [3, 2]
    assert client.told[-2:] == [("checkpointed", 0, 3), ("finished", "")]


def test_asked_to_end_it_keeps_the_last_whole_step_and_says_nothing_of_finishing(tmp_path: Path) -> None:
    client = Told()
    loop(tmp_path, client, Counting(stopped=3)).run()
    assert kept(tmp_path) == [3, 2]
    assert client.told[-1] == ("checkpointed", 0, 3)
    resumed = Told(version=3)
    loop(tmp_path, resumed, Counting()).run()
    assert resumed.published == [(version, [float(version)]) for version in (4, 5, 6)]
    assert resumed.told[0] == ("join", 0, 3)


def test_an_end_while_it_waits_for_a_batch_is_an_end_too(tmp_path: Path) -> None:
    client = Told(batches=3)
    loop(tmp_path, client, Counting()).run()
    assert kept(tmp_path) == [3, 2]
    assert ("finished", "") not in client.told


def test_it_comes_back_from_the_newest_checkpoint_on_the_lineage_that_survives(tmp_path: Path) -> None:
    loop(tmp_path, Told(batches=5), Counting()).run()
    shutil.rmtree(tmp_path / "5")  # killed before the request to stop
    client = Told(version=5)
    loop(tmp_path, client, Counting()).run()
    assert client.told[0] == ("join", 1, 4)
    assert client.published == [(5, [5.0]), (6, [6.0])]
    (_, newest), *_ = Checkpoints(tmp_path, run="r1", keep=3).newest()
    assert (newest.lineage, newest.version) == (1, 6)


def test_a_checkpoint_that_the_run_refuses_is_passed_over_and_removed(tmp_path: Path) -> None:
    loop(tmp_path, Told(batches=5), Counting()).run()
    client = Told(version=4, refuse=(5,))
    loop(tmp_path, client, Counting(), config(steps=4)).run()
    assert client.told[0] == ("join", 0, 4)
    assert kept(tmp_path) == [4, 2]


def test_a_checkpoint_of_another_backend_is_found_before_the_run_hears_of_this_trainer(tmp_path: Path) -> None:
    class Other(Counting):
        def check(self, directory: Path) -> None:
            raise ConfigError("checkpoint", str(directory), "it was written by fsdp on 2 ranks")

    loop(tmp_path, Told(batches=5), Counting()).run()
    client = Told(version=5)
    with pytest.raises(ConfigError, match="it was written by fsdp on 2 ranks"):
        loop(tmp_path, client, Other()).run()
    assert (client.told, client.published) == ([], [])
    assert kept(tmp_path) == [5, 4, 2]


def test_a_kill_in_an_evaluation_costs_no_step(tmp_path: Path) -> None:
    class Killed(Counting):
        def evaluate(self, version: Version, stopping: Stopping) -> dict[str, float]:
            if version == 4:
                raise KeyboardInterrupt
            return super().evaluate(version, stopping)

    client = Told()
    with pytest.raises(KeyboardInterrupt):
        loop(tmp_path, client, Killed(), config(steps=6, checkpoint_every=2, eval_every=2)).run()
    assert client.told[-1] == ("checkpointed", 0, 4)
    again, backend = Told(version=4), Counting()
    loop(tmp_path, again, backend, config(steps=6, checkpoint_every=2, eval_every=2)).run()
    assert again.told[0] == ("join", 0, 4)
    assert backend.evaluated == [4, 6]


def test_held_out_prompts_are_evaluated_first_last_and_every_so_often(tmp_path: Path) -> None:
    client, backend = Told(), Counting()
    loop(tmp_path, client, backend, config(steps=5, eval_every=2)).run()
    assert backend.evaluated == [0, 2, 4, 5]
    assert {step: line["reward/eval"] for step, line in client.lines.items() if "reward/eval" in line} == {
        -1: 0.0,
        1: 0.2,
        3: 0.4,
        4: 0.5,
    }


def test_times_add_up_and_all_but_training_is_idle(tmp_path: Path) -> None:
    client = Told()
    loop(tmp_path, client, Counting(), config(steps=6, checkpoint_every=2, eval_every=2)).run()
    line = client.lines[0]
    parts = line["time/wait_for_batch"] + line["time/train"] + line["time/publish"]
    assert line["time/step"] == pytest.approx(parts)
    assert line["trainer/idle_ratio"] == pytest.approx(1 - line["time/train"] / parts)
    assert line["perf/tokens_per_second"] == pytest.approx(5 / parts)
    saved = client.lines[1]
    stalls = ("wait_for_batch", "publish", "checkpoint", "eval")
    stalled = sum(saved[f"time/{name}"] for name in stalls)
    assert saved["time/step"] == pytest.approx(saved["time/train"] + stalled)
    assert saved["trainer/idle_ratio"] == pytest.approx(stalled / saved["time/step"])
    assert {"reward/mean", "reward/std", "length/mean", "length/p99", "off_policy/mean", "off_policy/max"} <= set(line)


def test_counters_go_on_after_a_resume(tmp_path: Path) -> None:
    loop(tmp_path, Told(batches=2), Counting(bad=(0,))).run()
    loop(tmp_path, Told(version=2), Counting()).run()
    (_, state), *_ = Checkpoints(tmp_path, run="r1", keep=3).newest()
    assert msgspec.structs.replace(state, last_batch=0, last_digest="") == type(state)(
        version=Version(6), tokens_trained=25, bad_steps=1, evaluated=0
    )
