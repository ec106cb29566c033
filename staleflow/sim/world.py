"""A whole run in virtual time: the shipped scheduler and rollout workers, simulated engines, shards and trainer.

All processes send the real messages to the real ``Service``; only sockets, tokens and clock are simulated. Messages
that arrive at one instant are one drain of the service, as they are one drain of its socket.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from staleflow.configs.schema import Config
from staleflow.configs.simulation import Occurrence
from staleflow.net.limits import TransportLimits
from staleflow.protocols.consistency import effects
from staleflow.protocols.consistency.ids import GroupId, LeaseId, WorkerId
from staleflow.protocols.wire.messages import Attach, GetStatus, Reply, SchedulerStatus
from staleflow.servers.scheduler.ledger.interpreter import TABLES
from staleflow.servers.scheduler.lengths.expected import Lengths
from staleflow.servers.scheduler.main import CYCLE_DELAY_S, open_service
from staleflow.sim.asking import Ask, Stalled, nothing
from staleflow.sim.book import Book, SimRecipe
from staleflow.sim.charges import Charges
from staleflow.sim.check import check, fleet
from staleflow.sim.engine import SimEngine
from staleflow.sim.instance import Peers, SimInstance
from staleflow.sim.payload import StoredPayload
from staleflow.sim.preemption import Preemptions
from staleflow.sim.queues import Drains, WiredEndpoint
from staleflow.sim.rewards import RewardWorkers
from staleflow.sim.sample import Sample
from staleflow.sim.shard import SimShard
from staleflow.sim.trainer import SimTrainer
from staleflow.sim.virtual import Conductor
from staleflow.sim.workload import Workload
from staleflow.store.memory import MemoryStore

TICK_INTERVAL_S = 1.0
SILENCE_S = TransportLimits().silence_s


class World:
    """All processes of one run."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        config = replace(config, eval=[])  # simulated engines write random tokens: there is nothing to evaluate
        self.config = config
        self.timeline = Conductor(0.0)
        self.workload = Workload(config)
        self.charges = charges = Charges.of(config)
        check(config, self.workload, charges)
        self.lives: list[SimInstance] = []
        """Every worker that ever lived, in order."""
        self.book = Book(self.workload)
        recipe = SimRecipe.with_book(config, self.book)
        self.pushed: dict[LeaseId, list[Sample]] = {}
        """The samples of every group that a shard accepted."""
        self.released: set[LeaseId] = set()
        """Leases that ended without a push."""
        self.discarded = 0
        """Tokens that were pushed and then discarded, except filtered ones."""
        self.filtered = 0
        """Tokens that the filter discarded."""
        self._current: dict[int, SimInstance] = {}
        """The current worker of each engine number."""
        self._progress, self._progress_s = (0, 0), 0.0
        self._stall_timeout_s = stall_timeout_s(charges)
        self._service, self._interpreter = open_service(
            config,
            run_dir,
            MemoryStore(TABLES),
            self.timeline,
            f"{config.name}-simulated",
            KnownLengths(self.workload.expected) if config.simulation.known_lengths else None,
            wake_later=partial(self.timeline.after, CYCLE_DELAY_S),
        )
        wire = charges.costs.wire
        self.scheduler = Drains(self.timeline, charges.costs.scheduler, self._service.on_call)
        self._endpoint = WiredEndpoint(self.scheduler.receive, self.timeline, wire)
        self._interpreter.listen(effects.Released, self._on_released)
        self._interpreter.listen(effects.Dropped, self._on_dropped)
        self.rewards = RewardWorkers(self.timeline, charges)
        self.shards = [
            SimShard(
                shard,
                self.workload,
                self.timeline,
                self._ask(f"trajectories-{shard}"),
                charges=charges,
                rewards=self.rewards,
                describes=config.coordination.ranker == "learned",
                samples=self.book.samples,
                pushed=self.pushed,
            )
            for shard in range(config.trajectories.shards)
        ]
        self._failures: list[BaseException] = []
        """Errors that ended workers."""
        self._shard_endpoints = [WiredEndpoint(shard.on_call, self.timeline, wire) for shard in self.shards]
        self._peers = Peers(
            scheduler=self._endpoint,
            shards=self._shard_endpoints,
            recipe=recipe,
            load_s=charges.load_s(),
            report_s=config.simulation.report_s,
            failed=self._failures.append,
        )
        self._payload = StoredPayload(self.timeline, self.shards, self.pushed, wire)
        self.trainer = SimTrainer(self.timeline, self._ask("trainer"), charges, self._payload)
        self.fleet = fleet(config)
        self._preemptions = Preemptions(config, self.timeline, self._lose, self._join_again)

    @property
    def shard_busy_s(self) -> float:
        """CPU seconds of the busiest trajectory server."""
        return max(shard.core.busy_s for shard in self.shards)

    @property
    def wire_busy_s(self) -> float:
        """Seconds of the busiest connection, in one direction."""
        return max(self._payload.busy_s, *(one.busy_s for one in (self._endpoint, *self._shard_endpoints)))

    def run(self, seconds: float | None = None) -> None:
        """Run from the first to the last line of the trace; the trainer stops after ``seconds``."""
        late = {event.engine for event in self.config.simulation.events if event.what == "join"}
        for shard in self.shards:
            shard.attach()
        self._ask("parameters")(
            Attach(worker=WorkerId("parameters"), name="parameters", role="parameters", endpoint="sim://parameters"),
        )
        for number in range(len(self.fleet)):
            if number not in late:
                self._join(number)
        self.timeline.at(0.0, self.trainer.attach)  # the engines attach first, at the same instant
        for event in self.config.simulation.events:
            self.timeline.at(event.at_s, partial(self._apply_event, event))
        if seconds is not None:
            self.timeline.at(seconds, self.trainer.stop)
        self._tick()
        self.timeline.run(lambda: self._service.phase.closed or bool(self._failures), self._settle)
        if self._failures:
            raise self._failures[0]

    def close(self) -> None:
        """End the remaining workers and close the trace."""
        self.timeline.close()
        self._interpreter.trace.close()

    def _settle(self) -> bool:
        started = self.scheduler.start()
        if not self.scheduler.handled:
            return started
        self.scheduler.handled = False
        self._service.flush()
        return True

    def _tick(self) -> None:
        self._service.tick(self._endpoint.peers)
        self.scheduler.charge_second(len(self._endpoint.peers), len(self._current))
        self._start_wanted()
        self.timeline.after(TICK_INTERVAL_S, self._tick)
        self._check_progress()

    def _check_progress(self) -> None:
        """Raise ``Stalled`` if no engine has had work, and no event is scheduled, for a long time."""
        now_s, progress = self.timeline.now_s, (len(self.pushed), len(self.trainer.trained))
        busy = progress != self._progress or any(instance.engine.working for instance in self._current.values())
        coming = self._preemptions.returning or any(event.at_s > now_s for event in self.config.simulation.events)
        if busy or coming:
            self._progress, self._progress_s = progress, now_s
        elif now_s - self._progress_s > self._stall_timeout_s:
            self._ask("monitor")(GetStatus(), self._stalled)

    def _stalled(self, reply: Reply) -> None:
        assert isinstance(reply, SchedulerStatus)
        raise Stalled(f"nothing has happened for {self._stall_timeout_s:.0f} s of virtual time: {reply.why}")

    def _ask(self, name: str) -> Ask:
        return lambda body, on_reply=nothing, frames=(): self._endpoint.call(name, body, on_reply, frames)

    # --- engines ---------------------------------------------------------------------------------------------

    def _join(self, number: int) -> None:
        kind = self.fleet[min(number, len(self.fleet) - 1)]
        worker = WorkerId(f"rollout-{number}.{len(self.lives)}")
        engine = SimEngine(
            self.timeline,
            self.charges.step_cost(kind.speed, kind.compute),
            slots=kind.slots,
            kv_capacity=kind.kv_tokens,
            on_update=self.config.rollout.on_update,
        )
        pull_s = self.charges.pull_s(remote=kind.remote)
        name, peers = f"rollout-{number}", self._peers
        instance = SimInstance(worker, name, engine, self.timeline, peers, pull_s=pull_s, price=kind.price)
        instance.on_end(partial(self._ended, number, instance))
        self.lives.append(instance)
        self._current[number] = instance
        if kind.preemptible:
            self._preemptions.started(number, instance)

    def _join_again(self, number: int) -> None:
        if number not in self._current:
            self._join(number)

    def _start_wanted(self) -> None:
        """Start the engines that the scheduler wants, as a supervisor does; others leave by themselves."""
        for name in () if self._service.phase.ending else self._service.wanted:
            number = int(name.removeprefix("rollout-"))
            if number not in self._current:
                self._join(number)

    def _ended(self, number: int, instance: SimInstance) -> None:
        """Forget an engine that the scheduler has let go."""
        if self._current.get(number) is instance:
            instance.stop()
            del self._current[number]

    def _apply_event(self, event: Occurrence) -> None:
        """Apply an event to an engine; ignore one that its state does not allow."""
        instance = self._current.get(event.engine)
        match event.what:
            case "join":
                if instance is None:
                    self._join(event.engine)
            case "leave":
                if instance is not None:
                    del self._current[event.engine]
                    instance.leave()
            case "crash":
                if instance is not None:
                    self._lose(event.engine, instance)
            case "hang":
                if instance is not None:
                    instance.hang()
            case "return":
                if instance is None:
                    self._join(event.engine)
                else:
                    instance.resume()

    def _lose(self, number: int, instance: SimInstance) -> None:
        """Kill an engine that has not left by itself."""
        if self._current.get(number) is instance:
            del self._current[number]
        if instance.alive:
            instance.crash()
            self.timeline.after(SILENCE_S, lambda: self._gone(instance.worker))

    def _gone(self, worker: WorkerId) -> None:
        self._endpoint.leave(worker)
        self._service.on_gone(worker)

    # --- discarded tokens ------------------------------------------------------------------------------------

    def _on_released(self, effect: effects.Released) -> None:
        if not effect.pushed:
            self.released.add(effect.lease)
        if effect.why is effects.ReleaseWhy.FILTERED:
            self.filtered += effect.tokens
        else:
            self.discarded += effect.tokens

    def _on_dropped(self, effect: effects.Dropped) -> None:
        self.discarded += effect.tokens


def stall_timeout_s(charges: Charges) -> float:
    """Return the seconds without progress after which a run is stalled: far more than any activity of it takes."""
    config = charges.config
    simulation, group_size = config.simulation, config.rollout.group_size
    longest = simulation.prompt_tokens + config.rollout.max_new_tokens
    batch_size = config.trainer.batch_size
    delays_s = charges.pull_s(remote=True) + charges.load_s() + charges.longest_reward_s()
    delays_s += (
        simulation.report_s + simulation.tool_s + charges.publish_s() + charges.between_s() + charges.written_s()
    )
    train_s = charges.train_s(batch_size, batch_size * group_size * longest)
    return 60.0 + 20.0 * delays_s + 2.0 * (config.scheduler.lease_s + train_s)


class KnownLengths(Lengths):
    """A ranker that knows all that can be known, as the upper limit of ranking: ``expected`` returns the lengths."""

    def __init__(self, expected: Callable[[int], float]) -> None:
        super().__init__("none")
        self._of = expected

    def expected_of(self, groups: Sequence[GroupId]) -> list[float]:
        return [self._of(group) for group in groups]
