"""Logging of one process: a file in the run directory, and standard error."""

import logging
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from staleflow.configs.errors import ConfigError
from staleflow.process.sanitize import printable, printable_lines


class _Formatter(logging.Formatter):
    converter = time.gmtime  # type: ignore[assignment]
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Format one line without control characters, because messages contain text of peers. Tracebacks keep their
        lines."""
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return printable_lines(super().formatException(ei))


class _File(logging.FileHandler):
    """A log file that tolerates a full disk: lost lines are still on standard error."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def logging_to(run_dir: Path, name: str) -> Generator[None]:
    """Log to ``<run_dir>/logs/<name>.log`` (appended) and standard error inside the block."""
    path = run_dir / "logs" / f"{name}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handlers: list[logging.Handler] = [_File(path, encoding="utf-8")]
    except OSError as error:
        raise ConfigError("run directory", run_dir, f"{path} must be writable: {error.strerror}") from None
    handlers.append(logging.StreamHandler(sys.stderr))
    formatter = _Formatter(f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s")
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.INFO)
    for handler in handlers:
        handler.setFormatter(formatter)
        root.addHandler(handler)
    try:
        yield
    finally:
        root.setLevel(before)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
