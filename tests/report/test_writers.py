# pyright: basic, reportMissingImports=false
"""TensorBoard and W&B get the numbers of a run under the same names, and their failures never affect the run."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from staleflow.configs.metrics import Metrics, Writer
from staleflow.configs.schema import Config, Prompts, Reward
from staleflow.report import writers
from staleflow.report.writers import numbers, with_writers
from staleflow.supervisor.summary import Summary
from staleflow.supervisor.view import Snapshot

LINES: tuple[Mapping[str, Any], ...] = (
    {"step": 0, "lineage": 0, "version": 1, "t": 1000.0, "reward/mean": 0.25, "loss": None},
    {"step": 1, "lineage": 0, "version": 2, "t": 1001.0, "reward/mean": 0.75, "off_policy/max": 2},
)


class Seen:
    """A view that records its messages."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def start(self) -> None:
        self.heard.append("start")

    def show(self, snapshot: Snapshot) -> None:
        self.heard.append(snapshot.phase)

    def notify(self, text: str) -> None:
        self.heard.append(text)

    def stop(self) -> None:
        self.heard.append("stop")

    def summary(self, summary: Summary) -> None:
        self.heard.append(summary.outcome)


def config(*names: Writer) -> Config:
    return Config(name="it", prompts=Prompts(), reward=Reward(run="a:b"), metrics=Metrics(writers=list(names)))


def shown(run_dir: Path, *names: Writer) -> list[str]:
    """Show a run of two lines; return the messages that its user saw."""
    seen = Seen()
    view = with_writers(seen, config(*names), run_dir)
    view.start()
    view.show(Snapshot(phase="training", elapsed_s=1.0, lines=LINES))
    view.stop()
    return seen.heard


def test_tensorboard_has_every_number_by_its_name_and_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "FLUSH_TIMEOUT_S", 120.0)
    told = f"metrics in tensorboard: tensorboard --logdir {tmp_path / 'tensorboard'}"
    assert sorted(shown(tmp_path, "tensorboard")) == sorted(["start", "training", told, "stop"])
    found = {
        (value.tag, event.step, value.simple_value, event.wall_time)
        for file in (tmp_path / "tensorboard").iterdir()
        for event in events(file)
        for value in event.summary.value
    }
    assert found == {("reward/mean", 0, 0.25, 1000), ("reward/mean", 1, 0.75, 1001), ("off_policy/max", 1, 2, 1001)}


def events(file: Path) -> list[Any]:
    """Events of a TensorBoard file: each record is length, checksum, event, checksum."""
    from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

    raw, found = file.read_bytes(), list[Any]()
    while raw:
        size = int.from_bytes(raw[:8], "little")
        found.append(Event.FromString(raw[12 : 12 + size]))
        raw = raw[16 + size :]
    return found


def test_what_the_sessions_before_have_written_is_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[int] = []
    writer = SimpleNamespace(where="", write=lambda step, *_: said.append(step), close=lambda: None)
    monkeypatch.setitem(writers.MAKERS, "tensorboard", lambda *_: writer)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step":0,"loss":1}\n{"step":1,"loss":1}\n{"step":2,"lo')
    view = with_writers(Seen(), config("tensorboard"), tmp_path)
    lines = tuple({"step": step, "loss": 1} for step in range(5))
    view.start()
    for shown in (lines[:1], (), lines[1:3], lines[3:]):
        view.show(Snapshot(phase="training", elapsed_s=1.0, lines=shown))
    view.stop()
    assert said == [2, 3, 4]


def test_wandb_has_them_with_the_configuration_and_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []
    run = SimpleNamespace(
        define_metric=lambda *names, **more: said.append((*names, more)),
        log=lambda values: said.append(values),
        finish=lambda: said.append("finish"),
        url="https://there/it-1",
    )

    def init(**more: Any) -> Any:
        said.append(more)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=dict))
    run_dir = tmp_path / "it-1"
    assert "metrics in wandb: https://there/it-1" in shown(run_dir, "wandb")
    settings = msgspec.to_builtins(config("wandb"))
    quiet = {"silent": True, "console": "off", "login_timeout": 10.0}
    assert said == [
        {"name": "it-1", "id": "it-1", "resume": "allow", "dir": str(run_dir), "config": settings, "settings": quiet},
        ("step", {}),
        ("*", {"step_metric": "step"}),
        {"step": 0, "reward/mean": 0.25},
        {"step": 1, "reward/mean": 0.75, "off_policy/max": 2.0},
        "finish",
    ]


def test_wandb_calls_a_run_by_its_name_wherever_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    run = SimpleNamespace(define_metric=lambda *_, **__: None, finish=lambda: None, log=lambda _: None, url="u")

    def init(name: str, id: str, **_: Any) -> Any:
        names.extend((name, id))
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=dict))
    (run_dir := tmp_path / "it-1").mkdir()
    monkeypatch.chdir(run_dir)
    shown(Path(), "wandb")
    assert names == ["it-1", "it-1"]


def test_a_writer_that_fails_is_told_of_once_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Config, __: Path) -> writers.Writer:
        raise OSError("no network")

    monkeypatch.setitem(writers.MAKERS, "wandb", broken)
    monkeypatch.setattr(writers, "FLUSH_TIMEOUT_S", 120.0)
    heard = shown(tmp_path, "wandb", "tensorboard")
    assert heard.count("metrics.writers: wandb stopped writing: OSError: no network") == 1
    assert list((tmp_path / "tensorboard").iterdir())


def test_a_writer_that_hangs_does_not_keep_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging:
        where = "nowhere"

        def write(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
            time.sleep(600)

        def close(self) -> None: ...

    monkeypatch.setattr(writers, "FLUSH_TIMEOUT_S", 0.05)
    monkeypatch.setitem(writers.MAKERS, "wandb", lambda *_: Hanging())
    heard = shown(tmp_path, "wandb")
    assert "writer wandb did not finish in time; the last metrics may be missing there" in heard
    assert heard[-1] == "stop"


def test_without_writers_the_view_is_the_view(tmp_path: Path) -> None:
    seen = Seen()
    assert with_writers(seen, config(), tmp_path) is seen
    assert numbers({"step": 3, "t": 1.0, "x": float("nan"), "y": "word", "z": 1}) == {"z": 1.0}
