"""Verify that any bytes give a message or a refusal and nothing else: the codec and every server's message boundary.

    python -m bench.fuzz                                  100,000 messages, as ``make test`` does
    python -m bench.fuzz --messages 10000000 --seed 1     the long one; prints the table of bench/results

Malformed messages are made from messages that are valid at the moment (``fuzz_messages``). A share of them runs under a
line tracer. A message joins the corpus for later messages if it reaches a line of a server that no earlier message
reached, or gets a new kind of reply.
"""

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.fuzz_messages import Mutator, Raw, Said
from bench.fuzz_parameters import ParameterTarget
from bench.fuzz_scheduler import SchedulerTarget
from bench.fuzz_shard import ShardTarget
from bench.fuzz_target import UNREADABLE, Finding, Target, read
from bench.progress import tracked
from staleflow.sim.faults.run import garbage_kept

SHARES = {"codec": 0.7, "scheduler": 0.1, "shard": 0.1, "parameters": 0.1}
"""Share of all messages."""
SEEDS_EVERY = 64
"""Messages made from the same state of the server."""
TRACED_EVERY = 16
MAX_CORPUS = 400
MAX_HEADER = 4_096
"""Maximum bytes of a message in the corpus: repeated doubling would only make messages grow."""
ROOMS = ("/servers/", "/protocols/", "/staleflow/net/", "/staleflow/store/")


@dataclass(slots=True)
class Report:
    """Statistics of one target."""

    messages: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter[str])
    lines: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    """Lines of the product that traced messages reached."""

    @property
    def unreadable(self) -> int:
        return self.outcomes[UNREADABLE]


class CodecTarget:
    """The decoder from bytes to messages, alone; its seeds are all messages that a server receives at its beginning."""

    def __init__(self, seeds: Sequence[Said]) -> None:
        self._seeds = seeds

    def seeds(self) -> Sequence[Said]:
        return self._seeds

    def offer(self, raw: Raw) -> str:
        message = read(raw)
        return UNREADABLE if message is None else type(message).__name__

    async def settle(self) -> None: ...

    async def close(self) -> None: ...


async def _opened(name: str, folder: Path, random: Random) -> Target:
    match name:
        case "scheduler":
            return SchedulerTarget(folder, random)
        case "shard":
            shard = ShardTarget(folder, random)
            await shard.begin()
            return shard
        case "parameters":
            parameters = ParameterTarget(folder, random)
            await parameters.begin()
            return parameters
        case _:
            seeds: list[Said] = []
            for server in ("scheduler", "shard", "parameters"):
                other = await _opened(server, folder / server, random)
                seeds += other.seeds()
                await other.close()
            return CodecTarget(seeds)


class Fuzzer:
    """One target, its corpus and its report."""

    def __init__(self, name: str, target: Target, random: Random) -> None:
        self._name, self._target, self._random = name, target, random
        self._mutator = Mutator(random)
        self._corpus: list[Said] = []
        self.report = Report()

    async def run(self, messages: int) -> None:
        """Offer that many messages; ``Finding`` names the first one that violates the property."""
        started = time.perf_counter()
        while self.report.messages < messages:
            seeds = [*self._target.seeds(), *self._corpus]
            for _ in range(min(SEEDS_EVERY, messages - self.report.messages)):
                self._one(self._random.choice(seeds))
            await self._settled()
        self.report.seconds = time.perf_counter() - started

    def _one(self, said: Said) -> None:
        random, report = self._random, self.report
        choice = random.random()
        raw = self._mutator.plain(said) if choice < 0.1 else self._mutator.changed(said)
        if choice > 0.99:
            raw = self._mutator.noise(said.peer)
        report.messages += 1
        reached = len(report.lines)
        try:
            if report.messages % TRACED_EVERY:
                outcome = self._target.offer(raw)
            else:
                outcome = _traced(report.lines, lambda: self._target.offer(raw))
        except Exception as error:
            raise Finding(f"{self._name}, message {report.messages}: {error!r} at {raw.header.hex()}") from error
        report.outcomes[outcome] += 1
        new = report.outcomes[outcome] == 1 or len(report.lines) > reached
        if new and len(raw.header) < MAX_HEADER and (result := read(raw)) is not None:
            self._corpus.append(Said(raw.peer, result, raw.frames))
            if len(self._corpus) > MAX_CORPUS:
                del self._corpus[random.randrange(MAX_CORPUS)]

    async def _settled(self) -> None:
        try:
            await self._target.settle()
        except Exception as error:
            raise Finding(f"{self._name}, after message {self.report.messages}: {error!r}") from error


def _traced(lines: set[tuple[str, int]], offer: Callable[[], str]) -> str:
    """Run under a tracer that notes the lines of the product, without what a garbage collection would run."""

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            lines.add((frame.f_code.co_filename, frame.f_lineno))
        return local

    def trace(frame: FrameType, _: str, __: Any) -> Any:
        return local if any(room in frame.f_code.co_filename for room in ROOMS) else None

    before = sys.gettrace()
    with garbage_kept():
        sys.settrace(trace)
        try:
            return offer()
        finally:
            sys.settrace(before)


async def fuzz(name: str, messages: int, seed: int, folder: Path) -> Report:
    """Fuzz one target with that many messages."""
    random = Random(f"{name} {seed}")
    target = await _opened(name, folder, random)
    fuzzer = Fuzzer(name, target, random)
    await fuzzer.run(messages)
    await target.close()
    return fuzzer.report


def main() -> None:
    """Fuzz every target, one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=SHARES, action="append")
    asked = parser.parse_args()
    logging.disable()
    table = Table("target", "messages", "unreadable", "read", "kinds of outcome", "lines reached", "messages/s")
    for name in tracked("targets", asked.target or SHARES):
        share = 1.0 if asked.target else SHARES[name]
        with tempfile.TemporaryDirectory(prefix="sf-") as folder:
            report = asyncio.run(fuzz(name, round(asked.messages * share), asked.seed, Path(folder) / name))
        counts = (report.messages, report.unreadable, report.messages - report.unreadable, len(report.outcomes))
        rate = report.messages / report.seconds
        table.add_row(name, *(f"{count:,}" for count in counts), f"{len(report.lines):,}", f"{rate:,.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
