# pyright: basic, reportMissingImports=false
"""Write the metrics of a run to TensorBoard and W&B, under their names in ``metrics.jsonl``.

The writers form a view in front of the terminal's view: it forwards every call, and a thread per writer writes the
metrics. A writer that fails is reported once; the run and the other writers continue.
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

LOGIN_TIMEOUT_S = 10.0
"""Seconds that W&B may prompt for a key; the terminal belongs to the run."""
FLUSH_TIMEOUT_S = 20.0
"""Seconds to flush pending metrics at the end of a run."""


class Writer(Protocol):
    """Destination of metrics. Only the thread that created a writer may use it."""

    where: str
    """Where to view the metrics."""

    def write(self, step: int, unix_s: float, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


def with_writers(view: View, config: Config, run_dir: Path) -> View:
    """Return ``view`` with the configured writers behind it; ``view`` itself if there are none."""
    makers = [(name, MAKERS[name]) for name in config.metrics.writers]
    if not makers:
        return view
    written = len(NewLines(run_dir / "metrics.jsonl").take())
    return Written(view, {name: _bound(maker, config, run_dir) for name, maker in makers}, written)


def _bound(maker: "Maker", config: Config, run_dir: Path) -> Callable[[], Writer]:
    return lambda: maker(config, run_dir)


class Written:
    """View that also passes metrics to writers, each in its own thread."""

    def __init__(self, view: View, makers: Mapping[str, Callable[[], Writer]], written: int = 0) -> None:
        """``written``: number of lines from earlier sessions, whose writers have written them."""
        self._view = view
        self._written = written
        self._queues: list[queue.SimpleQueue[Mapping[str, Any] | None]] = []
        self._messages: queue.SimpleQueue[str] = queue.SimpleQueue()
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
        self._forward_messages()
        self._view.show(snapshot)

    def notify(self, text: str) -> None:
        self._view.notify(text)

    def stop(self) -> None:
        """Flush and stop the writers, then the view."""
        for lines in self._queues:
            lines.put(None)
        for thread in self._threads:
            thread.join(FLUSH_TIMEOUT_S)
            if thread.is_alive():
                self._view.notify(f"{thread.name} did not finish in time; the last metrics may be missing there")
        self._forward_messages()
        self._view.stop()

    def summary(self, summary: Summary) -> None:
        self._view.summary(summary)

    def _forward_messages(self) -> None:
        while not self._messages.empty():
            self._view.notify(self._messages.get())

    def _write(
        self, name: str, make: Callable[[], Writer], lines: "queue.SimpleQueue[Mapping[str, Any] | None]"
    ) -> None:
        try:
            writer = make()
            self._messages.put(f"metrics in {name}: {writer.where}")
            while (line := lines.get()) is not None:
                step = int(line.get("step", 0))
                if values := numbers(line):
                    writer.write(step, float(line.get("t", 0.0)), values)
            writer.close()
        except Exception as error:  # boundary: a third-party library that the run does not depend on
            self._messages.put(f"metrics.writers: {name} stopped writing: {type(error).__name__}: {error}")


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a line."""
    return {
        key: float(value)
        for key, value in line.items()
        if key not in PLACES and isinstance(value, int | float) and math.isfinite(value)
    }


class TensorBoard:
    """Writer of event files in the folder ``tensorboard`` of the run directory."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary as EventSummary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.where = f"tensorboard --logdir {run_dir / 'tensorboard'}"
        self._event, self._summary = Event, EventSummary
        self._to = EventFileWriter(str(run_dir / "tensorboard"))

    def write(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        message = self._summary(
            value=[self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        )
        self._to.add_event(self._event(step=step, wall_time=unix_s, summary=message))

    def close(self) -> None:
        self._to.close()


class WandB:
    """Writer to W&B, with one W&B run per run directory, which a resumed run finds by name.

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
            settings=wandb.Settings(silent=True, console="off", login_timeout=LOGIN_TIMEOUT_S),
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
