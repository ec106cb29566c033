# pyright: basic, reportMissingImports=false
"""The numbers of a run in TensorBoard and W&B, by the names that ``metrics.jsonl`` has for them.

A view like any other, in front of the one that a person looks at: it hands on what it is told, and a thread of its own
writes the numbers. A writer that fails is told of once, and costs its numbers only.
"""

import math
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from staleflow.configs.schema import Config
from staleflow.metrics.names import PLACES
from staleflow.report.settings import settings
from staleflow.supervisor.summary import Summary
from staleflow.supervisor.view import Snapshot, View
from staleflow.supervisor.watch import NewLines

LOGIN_S = 10.0
"""W&B may ask for a key for so long; the screen is the run's."""
LAST_WORDS_S = 20.0
"""At the end of a run, for what is not written yet."""


class Writer(Protocol):
    """Belongs to the thread that made it."""

    where: str
    """Where its numbers are looked at."""

    def write(self, step: int, unix_s: float, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


def with_writers(view: View, config: Config, run_dir: Path) -> View:
    """``view`` itself when the configuration names no writer."""
    makers = [(name, MAKERS[name]) for name in config.metrics.writers]
    if not makers:
        return view
    written = len(NewLines(run_dir / "metrics.jsonl").take())
    return Written(view, {name: _bound(maker, config, run_dir) for name, maker in makers}, written)


def _bound(maker: "Maker", config: Config, run_dir: Path) -> Callable[[], Writer]:
    return lambda: maker(config, run_dir)


class Written:
    """A view with writers behind it."""

    def __init__(self, view: View, makers: Mapping[str, Callable[[], Writer]], written: int = 0) -> None:
        """``written``: as many lines are of sessions before, whose writers had them."""
        self._view = view
        self._written = written
        self._queues: list[queue.SimpleQueue[Mapping[str, Any] | None]] = []
        self._told: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        for name, make in makers.items():
            lines: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
            thread = threading.Thread(target=self._write, args=(name, make, lines), name=f"writer {name}", daemon=True)
            self._queues.append(lines)
            self._threads.append(thread)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()
        self._view.start()

    def show(self, snapshot: Snapshot) -> None:
        for line in snapshot.lines[self._written :]:
            for lines in self._queues:
                lines.put(line)
        self._written = max(self._written - len(snapshot.lines), 0)
        self._tell()
        self._view.show(snapshot)

    def notify(self, text: str) -> None:
        self._view.notify(text)

    def stop(self) -> None:
        """Give the writers their last words."""
        for lines in self._queues:
            lines.put(None)
        for thread in self._threads:
            thread.join(LAST_WORDS_S)
            if thread.is_alive():
                self._view.notify(f"{thread.name} does not come to an end; it may lack the last numbers")
        self._tell()
        self._view.stop()

    def summary(self, summary: Summary) -> None:
        self._view.summary(summary)

    def _tell(self) -> None:
        while not self._told.empty():
            self._view.notify(self._told.get())

    def _write(
        self, name: str, make: Callable[[], Writer], lines: "queue.SimpleQueue[Mapping[str, Any] | None]"
    ) -> None:
        try:
            writer = make()
            self._told.put(f"{name} has the numbers: {writer.where}")
            while (line := lines.get()) is not None:
                step = int(line.get("step", 0))
                if values := numbers(line):
                    writer.write(step, float(line.get("t", 0.0)), values)
            writer.close()
        except Exception as error:  # boundary: somebody else's library, and the run does not need it
            self._told.put(f"metrics.writers: {name} writes no more: {type(error).__name__}: {error}")


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """What of a line can be drawn."""
    return {
        key: float(value)
        for key, value in line.items()
        if key not in PLACES and isinstance(value, int | float) and math.isfinite(value)
    }


class TensorBoard:
    """Event files in the run directory's ``tensorboard``."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary as Said  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.where = f"tensorboard --logdir {run_dir / 'tensorboard'}"
        self._event, self._said = Event, Said
        self._to = EventFileWriter(str(run_dir / "tensorboard"))

    def write(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        said = self._said(value=[self._said.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._to.add_event(self._event(step=step, wall_time=unix_s, summary=said))

    def close(self) -> None:
        self._to.close()


class WandB:
    """One run of W&B a run directory, found again by its name when the run is resumed.

    Project, mode and key come from that package's own environment (``WANDB_PROJECT``, ``WANDB_MODE``, ...).
    """

    def __init__(self, config: Config, run_dir: Path) -> None:
        import wandb

        name = run_dir.resolve().name
        self._to = wandb.init(
            name=name,
            id=name,
            resume="allow",
            dir=str(run_dir),
            config=settings(config),
            settings=wandb.Settings(silent=True, console="off", login_timeout=LOGIN_S),
        )
        self.where = self._to.url or f"wandb sync {Path(self._to.dir).parent}"
        self._to.define_metric("step")
        self._to.define_metric("*", step_metric="step")

    def write(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        self._to.log({"step": step, **values})

    def close(self) -> None:
        self._to.finish()


Maker = Callable[[Config, Path], Writer]
MAKERS: dict[str, Maker] = {"tensorboard": TensorBoard, "wandb": WandB}
