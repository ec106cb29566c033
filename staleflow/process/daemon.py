"""A process of the service: loop, signals, log, exit code. The one place that catches any exception.

Exit codes: 0 done, or stopped by a signal and drained · 1 failed, with the reason in the log · 2 error of the operator
· 128 + signal at a second signal, immediately.
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
    """Set once the process is requested to stop; its main function then drains and returns."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.why = ""

    def set(self, why: str) -> None:
        """Request the stop; the first reason is kept."""
        self.why = self.why or why
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> str:
        """Wait for the stop request; return its reason."""
        await self._event.wait()
        return self.why


def run(main: Callable[[Stop], Awaitable[None]], name: str, run_dir: Path) -> int:
    """Run ``main`` until it returns; return the exit code. Signals are blocked until their handlers are installed."""
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
                log.info("%s exits: %s", name, over)
                return 0
            except Exception as error:
                if (damage := _damage(error)) is not None:
                    raise ConfigError("run directory", str(run_dir), str(damage)) from error
                log.exception("%s failed", name)
                return 1
            log.info("%s finished", name)
            return 0
    except ConfigError as error:
        print(f"staleflow {name}: {error}", file=sys.stderr)
        return 2
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        end_context()


def _damage(error: BaseException) -> StoreCorrupt | None:
    """Return a damaged store among the causes of an error: a restart would not fix it, a person must."""
    if isinstance(error, StoreCorrupt):
        return error
    inside: tuple[BaseException, ...] = getattr(error, "exceptions", ())
    return next((damage for one in inside if (damage := _damage(one)) is not None), None)


async def _supervised(main: Callable[[Stop], Awaitable[None]]) -> None:
    """Run ``main`` with signal handlers. An exception in a callback of the loop ends it like one of its own."""
    loop = asyncio.get_running_loop()
    stop = Stop()
    for number in SIGNALS:
        loop.add_signal_handler(number, _on_signal, stop, number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    task = asyncio.ensure_future(main(stop))
    failures: list[Exception] = []

    def on_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, Exception):
            failures.append(error)
            task.cancel()
        else:
            log.error("loop: %s", context.get("message"))

    loop.set_exception_handler(on_exception)
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
        log.warning("second signal, %s: exiting immediately", number.name)
        logging.shutdown()
        # Without unwinding: a hung drain must not be able to keep the process alive.
        os._exit(128 + number)
    log.info("%s: stopping", number.name)
    stop.set(number.name)
