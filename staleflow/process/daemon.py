"""A process of the service: a loop, signals, a log, an exit code. The one place where any exception is caught.

Exit codes: 0 done, or stopped by a signal and drained · 1 failed, with the reason in the log · 2 the operator's error ·
128 + signal at a second signal, at once.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import uvloop

from staleflow.configs.errors import ConfigError
from staleflow.net.errors import RunOver
from staleflow.net.zmq_stream import end_context
from staleflow.process.host import reuse_memory
from staleflow.process.logs import logging_to
from staleflow.store.base import StoreCorrupt

log = logging.getLogger(__name__)

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """Set once the process is asked to end; whoever runs drains and returns."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.why = ""

    def set(self, why: str) -> None:
        """Ask; the first reason is kept."""
        self.why = self.why or why
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> str:
        """Return the reason, once there is one."""
        await self._event.wait()
        return self.why


def run(main: Callable[[Stop], Awaitable[None]], name: str, run_dir: Path) -> int:
    """Run ``main`` until it returns; return the exit code. A signal that comes early waits for its handler."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    reuse_memory()
    try:
        with logging_to(run_dir, name):
            try:
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    runner.run(_supervised(main))
            except ConfigError:
                raise
            except RunOver as over:
                log.info("%s leaves: %s", name, over)
                return 0
            except Exception as error:
                if (damage := _damage(error)) is not None:
                    raise ConfigError("run directory", str(run_dir), str(damage)) from error
                log.exception("%s ends with an error", name)
                return 1
            log.info("%s ends", name)
            return 0
    except ConfigError as error:
        print(f"staleflow {name}: {error}", file=sys.stderr)
        return 2
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        end_context()


def _damage(error: BaseException) -> StoreCorrupt | None:
    """A damaged store among what went wrong: to start again would not mend it, a person has to look."""
    if isinstance(error, StoreCorrupt):
        return error
    inside: tuple[BaseException, ...] = getattr(error, "exceptions", ())
    return next((damage for one in inside if (damage := _damage(one)) is not None), None)


async def _supervised(main: Callable[[Stop], Awaitable[None]]) -> None:
    """Run ``main`` under the signals; an exception in a callback of the loop ends it as one of its own would."""
    loop = asyncio.get_running_loop()
    stop = Stop()
    for number in SIGNALS:
        loop.add_signal_handler(number, _on_signal, stop, number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    task = asyncio.ensure_future(main(stop))
    failures: list[Exception] = []

    def on_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, Exception):
            failures.append(error)
            task.cancel()
        else:
            log.error("loop: %s", context.get("message"))

    loop.set_exception_handler(on_failure)
    try:
        await task
    except asyncio.CancelledError:
        if not failures:
            raise
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
    if failures:
        raise failures[0]


def _on_signal(stop: Stop, number: signal.Signals) -> None:
    if stop.is_set():
        log.warning("second signal, %s: leaving at once", number.name)
        logging.shutdown()
        os._exit(128 + number)
    log.info("%s: draining", number.name)
    stop.set(number.name)
