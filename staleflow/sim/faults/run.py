"""Run one seed from its first fault to the verdict."""

import gc
import json
import tempfile
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from staleflow.process.host import raise_file_limit
from staleflow.servers.scheduler.prompts.submissions import ROWS
from staleflow.servers.scheduler.service import SETTLE_TIMEOUT_MS, TRAINER_TIMEOUT_MS
from staleflow.sim.faults.faults import Faults
from staleflow.sim.faults.plan import Plan, plan_of
from staleflow.sim.faults.reconcile import reconcile
from staleflow.sim.faults.world import World
from staleflow.store.base import key_number
from staleflow.trace.audit.report import audit

POLL_INTERVAL_S = 0.5
SETTLE_S = 12.0
"""Time after the last fault: long enough for leases to end, stages to be retried, and garbage to be found."""
END_S = 60.0
"""Time within which a run that is to end must end."""
DRAIN_S = END_S + (SETTLE_TIMEOUT_MS + TRAINER_TIMEOUT_MS) / 1000
"""The same for a drain: groups whose stages keep failing hold it up until the scheduler no longer waits for them."""
MIN_FAULTS = 15
MAX_S = 2_000.0
"""A run that its faults keep from progressing is judged after this, however few events it has."""
FINITE_END_S = 10_000.0
"""Time within which a run of finite epochs must end. The last prompts may all be ones that a stage always fails: each
must fail several times before the run is given up, at workers that are held and get one group a minute."""
STORY_LINES = 40


@dataclass(slots=True)
class Outcome:
    """Result of one seed."""

    seed: int
    asked: int
    """Lines of the trace after which the faults stop; needed to replay the run."""
    events: int = 0
    trace_hash: str = ""
    seconds: float = 0.0
    """Virtual time."""
    violations: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """(rule, detail), those of the audit first."""
    story: list[str] = field(default_factory=list[str])
    """Lines of the trace about the first violation."""
    faults: Counter[str] = field(default_factory=Counter[str])
    checks: Counter[str] = field(default_factory=Counter[str])
    """Number of checks of each rule."""
    counts: Counter[str] = field(default_factory=Counter[str])

    @property
    def ok(self) -> bool:
        return not self.violations

    @property
    def replay(self) -> str:
        """The command that replays this run."""
        return f"python -m staleflow.sim.faults {self.seed} --events {self.asked}"


def run_seed(seed: int, events: int, run_dir: Path | None = None) -> Outcome:
    """Run until the trace has about ``events`` lines, let the faults pass, end the run, and judge it.

    Its files go to ``run_dir``, which must be empty, or are deleted.
    """
    return run_plan(plan_of(seed), events, run_dir)


def run_plan(plan: Plan, events: int, run_dir: Path | None = None) -> Outcome:
    """Like ``run_seed``, for a plan that may differ from its seed's."""
    raise_file_limit()  # a slab that a process had mapped may stay mapped until the end of the run
    if run_dir is not None:
        run_dir.mkdir(parents=True, exist_ok=True)
        return _run(plan, events, run_dir)
    with tempfile.TemporaryDirectory(prefix="staleflow-faults-") as place:
        return _run(plan, events, Path(place))


def _run(plan: Plan, events: int, run_dir: Path) -> Outcome:
    world = World(plan, run_dir)
    faults = Faults(plan, world)
    with garbage_kept(), world.machine.installed():
        try:
            world.begin()
            faults.begin()
            _until(world, lambda: world.scene.finished or (world.seq() >= events and faults.number >= MIN_FAULTS))
            faults.on = False
            _until(world, lambda: world.closed() or (not world.active_faults and world.calm()))
            world.settle()
            _for(world, SETTLE_S)
            world.scene.finishing = True
            if not plan.finite:
                world.finish()
            closed = _until(world, world.closed, FINITE_END_S if plan.finite else DRAIN_S if plan.drained else END_S)
            _for(world, 15.0 if plan.killed_at_end else 5.0)
            if not closed and not world.history.stalls:
                world.history.stalls.append("the run does not end")
            world.ended = True
            return _judge(world, faults, events)
        finally:
            with world.machine.over():
                world.conductor.close()


@contextmanager
def garbage_kept() -> Generator[None]:
    """Disable garbage collection: a run leaves little garbage, and searching for it takes a quarter of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _until(world: World, holds: "Any", max_s: float = MAX_S) -> bool:
    """Let time advance until ``holds()``, or the world has ended; return whether it holds."""
    conductor, result = world.conductor, [False]
    end_s = conductor.now_s + max_s

    def poll() -> None:
        result[0] = holds()
        if not result[0]:
            conductor.after(POLL_INTERVAL_S, poll)

    poll()
    conductor.run(lambda: result[0] or world.ended or conductor.now_s >= end_s)
    return result[0]


def _for(world: World, seconds: float) -> None:
    end_s = world.conductor.now_s + seconds
    world.conductor.run(lambda: world.ended or world.conductor.now_s >= end_s)


def _judge(world: World, faults: Faults, events: int) -> Outcome:
    path = world.run_dir / "trace.jsonl"
    report = audit(path)
    lines = path.read_bytes().splitlines()
    lines_of_trace = [event for line in lines if (event := _decoded(line))]
    findings = reconcile(
        world.scene.journal,
        world.history,
        lines_of_trace,
        _stored(world),
        world.plan,
        flipped={key for node in world.of("trajectories") if node.disk for key in node.disk.flipped},
        rows=_rows(world),
    )
    outcome = Outcome(world.plan.seed, events, report.lines, report.last_hash, world.conductor.now_s)
    outcome.violations = [(one.rule.name, f"line {one.seq}: {one.why}") for one in report.violations]
    outcome.violations += [(rule.name, why) for rule, why in findings.violations]
    outcome.checks = report.checks + findings.checks
    outcome.faults = faults.counts
    journal, network = world.scene.journal, world.network.counts
    outcome.counts = Counter(world.scene.counts) + Counter({f"network: {k}": n for k, n in network.items()})
    outcome.counts += Counter({f"trace: {name}": n for name, n in report.events.items()})
    outcome.counts += Counter({f"push refused: {name}": n for name, n in journal.refused.items()})
    outcome.counts += Counter({f"looked: {name}": n for name, n in journal.checked.items()})
    outcome.counts += Counter({f"ended: {name}": n for name, n in journal.ends.items()})
    for node in world.of("scheduler", "trajectories"):
        if node.disk is not None:
            outcome.counts += Counter({f"disk: {name}": n for name, n in node.disk.counts.items()})
    outcome.counts += Counter({f"machine: {name}": n for name, n in world.machine.counts.items()})
    if outcome.violations:
        outcome.story = _story(
            outcome.violations[0][1], lines_of_trace, [line.decode(errors="replace") for line in lines]
        )
    return outcome


def _decoded(line: bytes) -> dict[str, Any]:
    """Return a line of the trace; an empty one for a line that cannot be read, which the audit reports."""
    try:
        return json.loads(line)  # type: ignore[no-any-return]
    except ValueError:
        return {}


def _rows(world: World) -> set[int]:
    """Return the numbers of the submitted rows in the scheduler's store."""
    disk = world.nodes["scheduler"].disk
    return set() if disk is None else set(map(key_number, disk.tables.get(ROWS, {})))


def _stored(world: World) -> dict[tuple[int, int], str]:
    """Return the sha of the payload stored in the shards, by (group, lease)."""
    stored: dict[tuple[int, int], str] = {}
    for node in world.of("trajectories"):
        stored |= {} if node.disk is None else node.disk.payload_shas()
    return stored


def _story(why: str, lines_of_trace: list[dict[str, Any]], lines: list[str]) -> list[str]:
    """Return the lines about the group or the line that the violation names; the last ones if it names none."""
    words = why.replace(",", " ").replace(":", " ").split()
    group = next((int(b) for a, b in pairwise(words) if a == "group" and b.isdigit()), None)
    seq = next((int(b) for a, b in pairwise(words) if a == "line" and b.isdigit()), None)
    if group is None and seq is not None and seq <= len(lines_of_trace):
        group = lines_of_trace[seq - 1].get("group")
    if group is not None:
        named = f'"group":{group},'
        return [line for line in lines if named in line][-STORY_LINES:]
    return lines[max((seq or len(lines)) - STORY_LINES, 0) : seq or len(lines)]
