"""All processes of one simulated run: servers, workers, a trainer, and a supervisor that restarts them."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from msgspec.structs import replace

from staleflow.clients.prompt_client import AsyncPromptClient
from staleflow.clients.prompts import Encode
from staleflow.clients.rollout import main as rollout
from staleflow.clients.rollout.engines.base import AsyncEngine
from staleflow.clients.stage import main as stage_main
from staleflow.clients.trainer import main as trainer
from staleflow.clients.trainer.client import TrainerClient
from staleflow.clients.trainer.errors import Fenced
from staleflow.configs.loading.load import addresses, config_sha
from staleflow.configs.schema import Config
from staleflow.configs.stages import stages
from staleflow.net.client import Client, worker_id
from staleflow.net.errors import ConfigError, Refused, RunOver, Unavailable
from staleflow.net.limits import TransportLimits
from staleflow.process.daemon import Stop
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Step, TrainerTerm, Version, WorkerId
from staleflow.protocols.wire.codec import encode_request
from staleflow.protocols.wire.messages import (
    Done,
    Drain,
    GetBatch,
    GetGroups,
    GetManifest,
    GetStatus,
    InstanceStats,
    ModelLimits,
    Operations,
    RegisterCheckpoint,
    RegisterOccupy,
    RelayStatus,
    Report,
    Request,
    SchedulerStatus,
    Status,
)
from staleflow.servers.parameters import main as parameters
from staleflow.servers.parameters.relay import main as relay_main
from staleflow.servers.scheduler import main as scheduler
from staleflow.servers.scheduler.ledger.interpreter import TABLES
from staleflow.servers.trajectories import main as trajectories
from staleflow.sim.faults.disk import Disk, SimWrite
from staleflow.sim.faults.engine import VirtualEngine
from staleflow.sim.faults.learner import Learner
from staleflow.sim.faults.lockstep import Lockstep
from staleflow.sim.faults.machine import Machine, SimClock
from staleflow.sim.faults.network import Network
from staleflow.sim.faults.payload import ROWS, VOCABULARY, row_of
from staleflow.sim.faults.plan import NEAR, Plan
from staleflow.sim.faults.scene import Scene
from staleflow.sim.faults.stage import opened_stage
from staleflow.sim.faults.witness import Witness
from staleflow.sim.virtual import Conductor, Process, current
from staleflow.store.base import StoreError
from staleflow.trace.writer import stored_head

RESTART_DELAY_S = 0.3
PART_ROWS = 40
"""Number of rows of a submission."""
REPEATED_SHARE = 0.2
"""Share of the submissions that repeat an earlier one."""
SUBMIT_TIMEOUT_S = 5.0
POLL_INTERVAL_S = 0.1
BAD_PROMPTS_S = 30.0
MAX_FAILURES = 20
"""Number of servers that failed by themselves, after which a run is over."""


@dataclass(slots=True)
class Node:
    """A name that should always have a process."""

    name: str
    role: str
    main: Callable[[Process, Stop], Coroutine[Any, Any, None]]
    process: Process | None = None
    stop: Stop | None = None
    wanted: bool = True
    """True if the process is restarted when it ends."""
    lives: int = 0
    disk: Disk | None = None
    swapped: bool = False
    """True if its store is not the one it left, so that it must reject it."""

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.runs

    @property
    def failed(self) -> bool:
        return self.process is not None and self.process.error is not None


@dataclass(slots=True)
class Interval:
    """A time interval in which a condition held."""

    what: str
    since_s: float
    until_s: float = float("inf")


@dataclass(slots=True)
class History:
    """Observations of the world: when processes were down, and which failed by themselves."""

    silent: list[Interval] = field(default_factory=list[Interval])
    """Intervals in which rollout workers were dead or stopped."""
    serving: list[Interval] = field(default_factory=list[Interval])
    """Intervals in which the scheduler could work."""
    paused: list[Interval] = field(default_factory=list[Interval])
    """Intervals in which the scheduler's process was stopped."""
    broken: list[Interval] = field(default_factory=list[Interval])
    """Intervals in which a rollout worker failed at everything, with its name."""
    served_wrongly: list[str] = field(default_factory=list[str])
    """Servers that worked on a store that was not theirs."""
    finished_s: float = 0.0
    """Time at which the end of the run was acknowledged; 0 if it was not."""
    swapped: int = 0
    """Number of stores that were replaced for a while."""
    failures: list[str] = field(default_factory=list[str])
    """Servers that ended with an error of their own."""
    stalls: list[str] = field(default_factory=list[str])


class World:
    """One run. ``run`` it, then read ``scene.journal``, ``history`` and the trace."""

    def __init__(self, plan: Plan, run_dir: Path) -> None:
        self.plan = plan
        self.run_dir = run_dir
        self.rng = random.Random(f"staleflow world {plan.seed}")
        self.conductor = Conductor()
        self.network = Network(self.conductor, self.rng)
        self.machine = Machine(self.conductor, self.rng, plan.host_of)
        self.clock = SimClock(self.conductor)
        self.history = History()
        self.scene = Scene(
            seed=plan.seed,
            config=plan.config,
            where=addresses(plan.config, run_dir),
            conductor=self.conductor,
            network=self.network,
            rng=self.rng,
            host_of=plan.host_of,
            lent=self.machine.lent,
            untrainable=plan.untrainable,
            false_reports=plan.false_reports,
            on_finished=self._on_finished,
            flipped=lambda key: any(
                node.disk is not None and key in node.disk.flipped for node in self.of("trajectories")
            ),
        )
        self.nodes: dict[str, Node] = {}
        self._workers: dict[Process, Witness] = {}
        self._relays = tuple(f"tcp://192.0.2.{number + 1}:7200" for number in range(plan.relays))
        """Addresses of the relays, which all hosts reach."""
        self.active_faults = 0
        """Number of active faults."""
        self.hold_until_s = 0.0
        """Time until which workers that failed everything may be on hold."""
        self.ended = False
        self._why: object = ""
        """The scheduler's last explanation of what its trainer waits for."""
        self._progress = 0
        self._calm_since_s = float("inf")
        self._progress_s = 0.0
        self._populate()

    # --- processes -------------------------------------------------------------------------------------------

    def _populate(self) -> None:
        self._add("scheduler", "scheduler", self._scheduler, disk=True)
        for shard in range(self.plan.config.trajectories.shards):
            self._add(f"trajectories-{shard}", "trajectories", partial(self._shard, shard), disk=True)
        self._add("parameters", "parameters", self._parameters)
        for number in range(self.plan.engines):
            self._add(f"rollout-{number}", "rollout", partial(self._rollout, f"rollout-{number}"))
        for stage in stages(self.plan.config):
            for number in range(self.plan.stages):
                name = f"{stage}-{number}"
                self._add(name, "stage", partial(self._stage, name, stage))
        if self.plan.submitted:
            self._add("prompts-0", "prompts", partial(self._prompts, "prompts-0"))
        self._add("trainer", "trainer", partial(self._trainer, "trainer"))
        self._add("monitor", "monitor", self._monitor)
        for number in range(self.plan.relays):
            self._add(f"relay-{number}", "relay", partial(self._relay, f"relay-{number}", self._relays[number]))

    def _add(
        self, name: str, role: str, main: Callable[[Process, Stop], Coroutine[Any, Any, None]], *, disk: bool = False
    ) -> None:
        slabs = self.run_dir / name / "slabs" if role == "trajectories" else None
        self.nodes[name] = Node(name, role, main, disk=Disk(self.conductor, self.rng, slabs) if disk else None)

    def of(self, *roles: str) -> list[Node]:
        return [node for node in self.nodes.values() if node.role in roles]

    def start(self, node: Node) -> None:
        """Start a process for a node, unless it has one."""
        if self.ended or not node.wanted or (node.process is not None and node.process.alive):
            return
        node.lives += 1

        async def main() -> None:
            stop = node.stop = Stop()
            await node.main(process, stop)

        process = node.process = self.conductor.spawn(node.name, main)
        process.on_end.append(lambda: self._on_end(node, process))

    def _on_end(self, node: Node, process: Process) -> None:
        serving = self.history.serving
        if node.role == "scheduler" and serving and serving[-1].until_s == float("inf"):
            serving[-1].until_s = self.conductor.now_s
        if node.role == "scheduler":
            for interval in self.history.paused:  # the scheduler that is started next is not paused
                interval.until_s = min(interval.until_s, self.conductor.now_s)
        error, server = process.error, node.disk is not None or node.role in ("parameters", "relay")
        if error is not None:
            kind = f"{node.role}: {type(error).__name__}"
            self.scene.journal.ends[kind] += 1
            expected = isinstance(
                error, RunOver if server else (ConfigError, RunOver, Refused, Unavailable, *trainer.ENDS)
            )
            self.scene.counts["a trainer was fenced"] += isinstance(error, Fenced)
            if node.role == "trainer" and isinstance(error, RunOver):
                self.scene.finished = True
            if node.disk is not None and node.disk.lost and _is_store_error(error):
                self.scene.counts["a shard missed a slab file"] += 1  # it ends, and gives up the payload of that slab
                expected = True
            if not (expected or (node.swapped and isinstance(error, ConfigError))):
                self.history.failures.append(f"{node.name} at {self.conductor.now_s:.3f}: {_describe(error)}")
                self.ended = len(self.history.failures) >= MAX_FAILURES
        delay_s = RESTART_DELAY_S if node.role != "rollout" or self.rng.random() < 0.5 else self.scene.lease_s
        self.conductor.after(delay_s * (0.3 + 2 * self.rng.random()), self.start, node)

    def add_trainer(self) -> Node:
        """Add another name for a trainer, without starting it."""
        name = f"trainer-{len(self.of('trainer'))}"
        self._add(name, "trainer", partial(self._trainer, name))
        self.nodes[name].wanted = False
        return self.nodes[name]

    def take_over(self, newer: Node) -> bool:
        """Start another trainer while the present one continues, until it is fenced."""
        for node in self.of("trainer"):
            node.wanted = node is newer
        self.start(newer)
        return True

    def double(self, node: Node) -> Process:
        """Start a second process under the name of a running worker."""

        async def main() -> None:
            await node.main(process, Stop())

        def ended() -> None:
            error = process.error
            if error is not None and not isinstance(error, (ConfigError, RunOver, Refused, Unavailable)):
                self.history.failures.append(f"{node.name}, twice, at {self.conductor.now_s:.3f}: {_describe(error)}")

        process = self.conductor.spawn(node.name, main)
        self.machine.unsupervised.add(process)
        process.on_end.append(ended)
        return process

    def reboot(self) -> None:
        """End every process on the servers' host, which has another boot id from then on."""
        for process in self.conductor.alive():
            if self.plan.host_of(process.name) == NEAR:
                self.conductor.kill(process)
        self.machine.boots += 1

    def send_malformed(self, rng: random.Random) -> bool:
        """Send malformed or misplaced messages to a server."""
        where = self.scene.where
        servers = (where.scheduler, where.scheduler, *where.trajectories, where.parameters, *self._relays)
        address = rng.choice(servers)
        good = encode_request(7, GetStatus())
        garbage = rng.randbytes(rng.randrange(40)), good[: rng.randrange(len(good))], good + b"\0"
        headers = (*garbage, *_misplaced_messages(rng))

        async def main() -> None:
            transport = self.network.transport(process)
            link = transport.connect(address, b"stranger/1", limits=TransportLimits(), on_message=_ignore)
            link.start()
            for header in headers:
                link.send((header,))
            await asyncio.sleep(1.0)
            link.close()

        process = self.conductor.spawn("stranger", main)
        return True

    # --- their mains -----------------------------------------------------------------------------------------

    async def _scheduler(self, process: Process, stop: Stop) -> None:
        disk = self.nodes["scheduler"].disk
        assert disk is not None
        store = disk.opener(process)(
            self.run_dir / "scheduler", tables=TABLES, map_bytes=1, durability=self.plan.config.scheduler.durability
        )
        await scheduler.serve_until(
            stop,
            self.plan.config,
            self.run_dir,
            store,
            clock=self.clock,
            transport=self.network.transport(process),
        )

    async def _shard(self, shard: int, process: Process, stop: Stop) -> None:
        disk = self.nodes[f"trajectories-{shard}"].disk
        assert disk is not None
        await trajectories.serve_until(
            stop,
            self.plan.config,
            self.run_dir,
            shard,
            opened=disk.opener(process),
            transport=self.network.transport(process),
            slabs=self.plan.slabs,
        )

    async def _parameters(self, process: Process, stop: Stop) -> None:
        await parameters.serve_until(stop, self.plan.config, self.run_dir, transport=self.network.transport(process))

    async def _relay(self, name: str, bind: str, process: Process, stop: Stop) -> None:
        await relay_main.serve_until(
            stop,
            self.plan.config,
            self.run_dir,
            name,
            self.scene.where.scheduler,
            bind,
            self.plan.mb_per_s,
            transport=self.network.transport(process),
        )

    async def _rollout(self, name: str, process: Process, stop: Stop) -> None:
        scene = self.scene
        witness = self._workers[process] = Witness(scene, process, self.network.transport(process))
        process.on_end.append(partial(self._on_silence, process))

        async def opened(config: Config, run_dir: Path) -> tuple[AsyncEngine, Encode]:
            return VirtualEngine(scene, name, slots=config.rollout.max_inflight), rollout.text_bytes

        await rollout.work_until(
            stop, scene.config, self.run_dir, name, scene.where.scheduler, opened=opened, transport=witness
        )

    def _on_silence(self, process: Process) -> None:
        self.silence(process)

    def silence(self, process: Process) -> Interval | None:
        """Start an interval of silence of a rollout worker; return None for other processes."""
        witness = self._workers.get(process)
        if witness is None or not witness.worker:
            return None
        interval = Interval(witness.worker, max(self.conductor.now_s, process.last_arrival_s))
        self.history.silent.append(interval)
        return interval

    async def _stage(self, name: str, stage: str, process: Process, stop: Stop) -> None:
        await stage_main.work_until(
            stop,
            self.scene.config,
            name,
            self.scene.where.scheduler,
            stage,
            opened=opened_stage(self.scene, stage, name),
            transport=self.network.transport(process),
        )

    async def _trainer(self, name: str, process: Process, stop: Stop) -> None:
        scene, thread = self.scene, Lockstep(process)
        config = scene.config
        if scene.last_step:
            config = replace(config, trainer=replace(config.trainer, steps=scene.last_step))
        client = TrainerClient(
            scene.where.scheduler,
            name=name,
            config_sha=config_sha(scene.config),
            transport=Witness(scene, process, self.network.transport(process)),
            background=thread,
        )
        client.model = ModelLimits(vocabulary=VOCABULARY)
        learner = Learner(scene, thread)
        await trainer.work_until(
            stop, client, lambda stopping: trainer.train(config, self.run_dir, client, learner, stopping), thread.run
        )

    async def _prompts(self, name: str, process: Process, stop: Stop) -> None:
        """Submit one part of the prompts after another, each until it is acknowledged, and some of them again."""
        submissions, transport = self.scene.journal.submissions, self.network.transport(process)
        rng = random.Random(f"parts {self.plan.seed}, {self.clock.now_ns()}")
        async with AsyncPromptClient(self.scene.where.scheduler, name=name, transport=transport) as client:
            while not stop.is_set():
                part = max((number for number, _ in submissions), default=-1) + 1
                if part and rng.random() < REPEATED_SHARE:
                    part = rng.randrange(part)
                rows = [row_of(number % ROWS) for number in range(part * PART_ROWS, (part + 1) * PART_ROWS)]
                try:
                    numbers = await client.submit(rows, id=f"part-{part}", timeout_s=SUBMIT_TIMEOUT_S)
                except Unavailable:
                    continue
                if client.ended:
                    await asyncio.sleep(SUBMIT_TIMEOUT_S)
                else:
                    submissions.append((part, numbers))

    async def _monitor(self, process: Process, stop: Stop) -> None:
        """Request the status of every server periodically."""
        worker, where = worker_id("monitor"), self.scene.where
        clients = [
            Client(address, worker=worker, transport=self.network.transport(process))
            for address in (where.scheduler, *where.trajectories, where.parameters, *self._relays)
        ]
        while not stop.is_set():
            for client in clients:
                try:
                    answer = await client.ask(GetStatus(), Status, timeout_s=2.0)
                    self.scene.counts["status"] += 1
                    if isinstance(answer, SchedulerStatus):
                        self._why = answer.why
                    if isinstance(answer, RelayStatus):
                        self.scene.counts["a relay below a relay"] += "/" in answer.parent
                except Unavailable:
                    self.scene.counts["no status"] += 1
            await asyncio.sleep(3.0)

    # --- time ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start all processes."""
        for node in self.nodes.values():
            self.start(node)
        self.conductor.after(POLL_INTERVAL_S, self._check_progress)

    def seq(self) -> int:
        """Return the number of lines of the committed trace."""
        disk = self.nodes["scheduler"].disk
        assert disk is not None
        return stored_head(SimWrite(disk.tables, [])).seq if "trace" in disk.tables else 0

    def settle(self) -> None:
        """Disarm pending faults, and exempt damage that no process has met yet."""
        self.machine.kill_at_rename = None
        for node in self.nodes.values():
            if node.disk is not None:
                node.disk.kill_at = ""

    def finish(self) -> None:
        """End the run: by a drain, or after one more step, for which the trainer stops and restarts with a last
        step."""
        scene = self.scene
        scene.finishing = True
        if self.plan.drained:
            self.conductor.spawn("operator", self._drain)
            return
        scene.last_step = max((one.version for one in scene.journal.committed), default=0) + 1
        for node in self.of("trainer"):
            if node.process is not None and node.process.alive and node.stop is not None:
                node.process.loop.call_soon(node.stop.set, "SIGTERM")

    async def _drain(self) -> None:
        client = Client(
            self.scene.where.scheduler, worker=worker_id("operator"), transport=self.network.transport(current())
        )
        await client.ask(Drain(why="the simulation ends"), Done, timeout_s=None)

    def _on_finished(self) -> None:
        """Note when the end of the run is acknowledged; if the plan wants it, kill the scheduler and start it again."""
        node, finished_s = self.nodes["scheduler"], self.history.finished_s
        self.history.finished_s = finished_s or self.conductor.now_s
        if finished_s or not self.plan.killed_at_end or node.process is None:
            return
        self.conductor.kill(node.process)

        def start() -> None:
            node.wanted = True
            self.start(node)
            node.wanted = False

        self.conductor.after(1.0, start)

    def closed(self) -> bool:
        """Return whether the trainer has finished the run; then no process is restarted."""
        if self.scene.finished:
            for node in self.nodes.values():
                node.wanted = False
        return self.scene.finished

    def calm(self, *, failing: tuple[str, ...] = ()) -> bool:
        """Return whether all processes are healthy, and no worker is still held back for its failures.

        ``failing``: roles whose processes may be down after an error of their own."""
        undisturbed = not self.active_faults and self.conductor.now_s >= self.hold_until_s
        return undisturbed and all(
            node.runs or (node.role in failing and node.failed) for node in self.nodes.values() if node.wanted
        )

    def _check_progress(self) -> None:
        """Check whether the scheduler works, and whether the run progresses while no fault is active."""
        now_s = self.conductor.now_s
        serving, node = self.history.serving, self.nodes["scheduler"]
        assert node.disk is not None
        works = node.runs and not (node.disk.full or node.disk.broken)
        if works and (not serving or serving[-1].until_s != float("inf")):
            serving.append(Interval("scheduler", now_s))
        elif not works and serving and serving[-1].until_s == float("inf"):
            serving[-1].until_s = now_s - POLL_INTERVAL_S
        progress = len(self.scene.journal.committed)
        if progress != self._progress:
            self._progress, self._progress_s = progress, now_s
        if not self.calm(failing=("trainer",)):  # one that fails again and again is a run that stands still
            self._calm_since_s = float("inf")
        elif self._calm_since_s == float("inf"):
            self._calm_since_s = now_s
        if now_s - max(self._progress_s, self._calm_since_s) > self.stall_timeout_s and not self.scene.finishing:
            self.history.stalls.append(f"nothing was trained from {self._progress_s:.1f} to {now_s:.1f}: {self._why}")
            self.ended = True
        if not self.ended:
            self.conductor.after(POLL_INTERVAL_S, self._check_progress)

    @property
    def stall_timeout_s(self) -> float:
        """The longest time that a run without active faults may stand still.

        A prompt that no stage can judge is retried for some seconds, and several may follow each other in the last
        place of a batch.
        """
        return 3 * self.scene.lease_s + BAD_PROMPTS_S


def _misplaced_messages(rng: random.Random) -> list[bytes]:
    """Return well-formed messages from senders that may not send them."""
    group, lease, worker = GroupId(rng.randrange(500)), LeaseId(rng.randrange(2_000)), WorkerId("stranger")
    term = TrainerTerm(rng.randrange(3))
    bodies: tuple[Request, ...] = (
        Report(worker=worker, ack=rng.randrange(9), held=[lease], stats=InstanceStats()),
        Operations(ops=[RegisterOccupy(group=group, lease=lease)]),
        GetBatch(trainer_term=term, step=Step(rng.randrange(500))),
        RegisterCheckpoint(trainer_term=term, lineage=Lineage(0), version=Version(rng.randrange(500))),
        GetGroups(groups=[group], shas=["0" * 64]),
        GetManifest(worker=worker, lineage=Lineage(9), version=Version(9)),
    )
    return [encode_request(10 + number, body) for number, body in enumerate(bodies)]


def _ignore(head: list[bytes], frames: list[memoryview], oversize: bool) -> None:
    """Ignore a reply to a stranger."""


def _is_store_error(error: BaseException) -> bool:
    """Return whether a store, and nothing else, ended the process."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_store_error, cast("BaseExceptionGroup[BaseException]", error).exceptions))
    return isinstance(error, StoreError)


def _describe(error: BaseException) -> str:
    """Describe an error, and those inside a group of errors."""
    if isinstance(error, BaseExceptionGroup):
        inside = cast("BaseExceptionGroup[BaseException]", error).exceptions
        return "; ".join(map(_describe, inside))
    traceback, place = error.__traceback__, ""
    while traceback is not None:
        place = f"{Path(traceback.tb_frame.f_code.co_filename).name}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return f"{error!r} at {place}"
