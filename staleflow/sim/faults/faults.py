"""The faults: the effect of each kind on the world, and its end."""

import os
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from staleflow.sim.faults.disk import Loss
from staleflow.sim.faults.mishaps import ComponentFaults
from staleflow.sim.faults.network import GRAIN_S
from staleflow.sim.faults.plan import LOST, REBOOT, SLABS, Plan
from staleflow.sim.faults.world import Interval, Node, World
from staleflow.sim.virtual import current

FAULT_PHASE_S = 60.0
FAULT_PAUSE_S = 25.0
"""Faults run for ``FAULT_PHASE_S``, then pause for this long: no run may stand still during a pause."""
NEXT_VERSION_S = 3.0
"""Time to wait for the next version."""
SERVERS = ("scheduler", "trajectories", "parameters")
WORKERS = ("rollout", "rollout", "stage", "trainer")


class Faults:
    """Causes the faults of a plan while ``on``."""

    def __init__(self, plan: Plan, world: World) -> None:
        self.counts: Counter[str] = Counter()
        self.number = 0
        self.on = True
        self._pause_s = world.conductor.now_s + FAULT_PHASE_S
        self._plan = plan
        self._world = world
        self._servers = (*SERVERS, "relay") if plan.relays else SERVERS
        self._workers = (*WORKERS, "prompts") if plan.submitted else WORKERS
        self._rng = random.Random(f"staleflow faults of {plan.seed}")
        self._actions: dict[str, Callable[[], bool]] = {
            "kill": self._kill,
            "kill at a commit": self._kill_at_commit,
            "kill at a rename": self._kill_at_rename,
            "stop shortly": partial(self._stop, 0.1, 2.0),
            "stop for longer than a lease": partial(self._stop, 1.2, 2.5),
            "terminate": self._terminate,
            "power failure": self._power_failure,
            "torn trace": self._torn_trace,
            "lose messages": partial(self._weather, "loss"),
            "double messages": partial(self._weather, "double"),
            "reorder messages": partial(self._weather, "reorder"),
            "delay messages": self._delay,
            "slow link": self._slow,
            "partition": partial(self._partition, both=True),
            "one-way partition": partial(self._partition, both=False),
            "disconnect": self._disconnect,
            "full disk": partial(self._disk, "full", 4.0),
            "crowded disk": partial(self._disk, "crowded", 4.0),
            "broken disk": self._broken_disk,
            "slow disk": self._slow_disk,
            "full disk of the weights": self._full_weights,
            "flip a byte of a payload": partial(self._flip, ("payloads",)),
            "flip a byte of a column": partial(self._flip, ("columns", "records")),
            "flip a byte of the weights": self._flip_weights,
            "two trainers": self._two_trainers,
            "clock jump": self._clock_jump,
            "malformed message": self._malformed,
            LOST: self._lose_disk,
            SLABS: self._lose_slabs,
            REBOOT: self._reboot,
        }
        self._actions |= ComponentFaults(world, self._rng, self._for).actions()

    def begin(self) -> None:
        """Schedule the first fault, after the run has started."""
        self._world.conductor.after(2.0, self._next)

    def _next(self) -> None:
        if not self.on:
            return
        now_s = self._world.conductor.now_s
        if now_s > self._pause_s:
            self._pause_s = now_s + FAULT_PAUSE_S + FAULT_PHASE_S
            self._world.conductor.after(FAULT_PAUSE_S, self._next)
            return
        kind = self._rng.choice(self._plan.kinds)
        if self._actions[kind]():
            self.number += 1
            self.counts[kind] += 1
        self._world.conductor.after(self._rng.expovariate(1 / self._plan.every_s), self._next)

    # --- for a while -----------------------------------------------------------------------------------------

    def _for(self, seconds: float, over: Callable[[], object]) -> None:
        """Count a fault as active for ``seconds``, then call ``over``."""
        self._world.active_faults += 1

        def passes() -> None:
            self._world.active_faults -= 1
            over()

        self._world.conductor.after(seconds, passes)

    def _some(self, *roles: str) -> Node | None:
        nodes = [node for node in self._world.of(self._rng.choice(roles)) if node.runs]
        return self._rng.choice(nodes) if nodes else None

    # --- processes -------------------------------------------------------------------------------------------

    def _kill(self) -> bool:
        node = self._some(*self._servers, *self._workers)
        if node is None or node.process is None:
            return False
        self.counts[f"killed: {node.role}"] += 1
        self._world.conductor.kill(node.process)
        return True

    def _kill_at_commit(self) -> bool:
        node = self._some("scheduler", "trajectories")
        if node is None or node.disk is None:
            return False
        node.disk.kill_at = self._rng.choice(("before", "after"))
        return True

    def _kill_at_rename(self) -> bool:
        """Kill the parameter server in the middle of a version, or a trainer in the middle of a checkpoint."""
        world = self._world
        if self._rng.random() < 0.5:
            world.machine.kill_at_rename = (world.run_dir / "parameters", lambda: world.nodes["parameters"].process)
        else:
            world.machine.kill_at_rename = (world.run_dir / "checkpoints", current)
        return True

    def _stop(self, min_leases: float, max_leases: float) -> bool:
        """Send SIGSTOP, and SIGCONT after a number of leases."""
        node = self._some(*self._servers, *self._workers)
        if node is None or node.process is None:
            return False
        process = node.process
        self.counts[f"stopped: {node.role}"] += 1
        self._world.conductor.stop(process)
        scale_s = self._world.scene.lease_s if min_leases > 1 else 1.0
        silent = self._world.silence(process)
        paused = Interval(node.name, self._world.conductor.now_s)
        if node.role == "scheduler":
            self._world.history.paused.append(paused)

        def over() -> None:
            paused.until_s = min(paused.until_s, self._world.conductor.now_s)  # earlier if it was killed meanwhile
            if silent is not None:
                silent.until_s = self._world.conductor.now_s
            self._world.conductor.resume(process)

        self._for(self._rng.uniform(min_leases, max_leases) * scale_s, over)
        return True

    def _terminate(self) -> bool:
        """Send SIGTERM."""
        node = self._some(*self._servers, *self._workers)
        if node is None or node.stop is None:
            return False
        stop = node.stop
        node.process.loop.call_soon(stop.set, "SIGTERM")  # type: ignore[union-attr]
        return True

    def _power_failure(self) -> bool:
        """Kill every server at once. The trace's file keeps its synced part, and perhaps a little more."""
        world = self._world
        for node in world.of(*SERVERS):
            if node.process is not None and node.process.alive:
                world.conductor.kill(node.process)
        path = world.run_dir / "trace.jsonl"
        swapped = world.nodes["scheduler"].swapped  # then the trace is the evidence that the ledger is an older one
        if world.plan.config.scheduler.durability == "power" and path.exists() and not swapped:
            synced = world.machine.synced(path)
            with path.open("r+b") as file:
                file.truncate(self._rng.randint(synced, path.stat().st_size))
        return True

    def _torn_trace(self) -> bool:
        """Kill the scheduler between its commit and the write to its file, in the middle of a line."""
        world, node = self._world, self._world.nodes["scheduler"]
        if node.disk is None or not node.runs or node.process is None:
            return False
        process, path = node.process, world.run_dir / "trace.jsonl"
        if not path.exists():
            return False
        node.disk.kill_at = "after"

        def tear() -> None:
            with path.open("ab") as file:
                file.write(b'{"schema":1,"run":"torn'[: self._rng.randrange(1, 23)])

        process.on_end.insert(0, tear)
        return True

    def _two_trainers(self) -> bool:
        world = self._world
        others = [node for node in world.of("trainer") if not node.wanted and not node.runs]
        return world.take_over(others[0] if others else world.add_trainer())

    # --- the network -----------------------------------------------------------------------------------------

    def _weather(self, what: str) -> bool:
        weather, share = self._world.network.weather, self._rng.choice((0.02, 0.1, 0.4))
        setattr(weather, what, share)
        self._for(self._rng.uniform(0.5, 6.0), lambda: setattr(weather, what, 0.0))
        return True

    def _delay(self) -> bool:
        weather = self._world.network.weather
        weather.delay_s = self._rng.choice((0.01, 0.1, 0.4))

        def over() -> None:
            weather.delay_s = GRAIN_S

        self._for(self._rng.uniform(0.5, 6.0), over)
        return True

    def _slow(self) -> bool:
        weather, node = self._world.network.weather, self._some(*self._servers, *self._workers)
        if node is None:
            return False
        weather.slow[node.name] = self._rng.choice((0.05, 0.5, 1.5))
        self._for(self._rng.uniform(1.0, 10.0), lambda: weather.slow.pop(node.name, None))
        return True

    def _partition(self, *, both: bool) -> bool:
        """Cut some processes off from others; sometimes one of them from all."""
        weather, rng = self._world.network.weather, self._rng
        names = list(self._world.nodes)
        share = rng.choice((1 / len(names), 0.3, 0.5))
        side = [name for name in names if rng.random() < share] or [rng.choice(names)]
        other_side = [name for name in names if name not in side]
        cut = {(a, b) for a in side for b in other_side}
        if both or rng.random() < 0.5:
            cut = cut | {(b, a) for a, b in cut} if both else {(b, a) for a, b in cut}
        weather.cut |= cut

        def over() -> None:
            weather.cut -= cut

        self._for(rng.uniform(0.5, 2.5) * self._world.scene.lease_s, over)
        return True

    def _disconnect(self) -> bool:
        node = self._some(*self._servers, *self._workers)
        if node is not None:
            self._world.network.disconnect(node.name)
        return node is not None

    def _malformed(self) -> bool:
        return self._world.send_malformed(self._rng)

    # --- disks -----------------------------------------------------------------------------------------------

    def _disk(self, what: str, max_s: float) -> bool:
        node = self._some("scheduler", "trajectories")
        if node is None or node.disk is None:
            return False
        disk = node.disk
        setattr(disk, what, True)
        self._for(self._rng.uniform(0.3, max_s), lambda: setattr(disk, what, False))
        return True

    def _broken_disk(self) -> bool:
        """Break the scheduler's disk only: a shard whose disk returns errors ends, which equals a kill."""
        disk = self._world.nodes["scheduler"].disk
        assert disk is not None
        disk.broken = True
        self._for(self._rng.uniform(0.3, 3.0), lambda: setattr(disk, "broken", False))
        return True

    def _slow_disk(self) -> bool:
        node = self._some("scheduler", "trajectories")
        if node is None or node.disk is None:
            return False
        disk = node.disk
        disk.sync_s = self._rng.choice((0.005, 0.03))
        self._for(self._rng.uniform(0.5, 5.0), lambda: setattr(disk, "sync_s", 0.0))
        return True

    def _lose_disk(self) -> bool:
        """Replace the machine of a shard: its store is empty."""
        node = self._some("trajectories")
        if node is None or node.disk is None or node.process is None:
            return False
        self._world.conductor.kill(node.process)
        node.disk.lose()
        return True

    def _lose_slabs(self) -> bool:
        """Delete or cut files of a shard's slabs, one or all, while it runs or while it is down."""
        node = self._rng.choice(self._world.of("trajectories"))
        disk = node.disk
        if disk is None or not (files := disk.slab_files()):
            return False
        losses: tuple[Loss, ...] = ("deleted", "deleted", "emptied", "cut")
        loss = self._rng.choice(losses)
        if node.process is not None and self._rng.random() < 0.5:
            self._world.conductor.kill(node.process)
        for path in files if self._rng.random() < 0.3 else [self._rng.choice(files)]:
            disk.lose_slab(path, loss)
        return True

    def _reboot(self) -> bool:
        """Restart the host of the servers, without its slab files where those were in memory."""
        self._world.reboot()
        if self._rng.random() < 0.5:
            for disk in [node.disk for node in self._world.of("trajectories") if node.disk is not None]:
                for path in disk.slab_files():
                    disk.lose_slab(path, "deleted")
        return True

    def _full_weights(self) -> bool:
        machine = self._world.machine
        machine.full_folder = self._world.run_dir / "parameters"
        self._for(self._rng.uniform(0.3, 4.0), lambda: setattr(machine, "full_folder", None))
        return True

    def _flip(self, tables: tuple[str, ...]) -> bool:
        node = self._some("trajectories")
        return node is not None and node.disk is not None and node.disk.flip(tables) is not None

    def _flip_weights(self) -> bool:
        """Change one byte of a version on disk: an existing one, or the next one before any instance has loaded it."""
        if self._rng.random() < 0.5:
            until_s = self._world.conductor.now_s + NEXT_VERSION_S
            self._flip_next({*self._versions()}, until_s, self._world.machine.num_renames)
            return True
        mine = [self._weights / name for name in self._versions()]
        files = [*mine, *sorted(self._world.run_dir.glob("relays/*/*.bin"))]
        if files:
            self._flip_file(self._rng.choice(files))
        return bool(files)

    def _flip_next(self, existing: set[str], until_s: float, renames: int) -> None:
        """Damage the first new version. Only a rename makes one visible: list the folder after renames alone."""
        conductor, machine = self._world.conductor, self._world.machine
        changed = machine.num_renames != renames
        new = [name for name in self._versions() if name not in existing] if changed else []
        if new:
            self._flip_file(self._weights / new[-1])
        elif conductor.now_s < until_s and not self._world.ended:
            conductor.after(0.001, self._flip_next, existing, until_s, machine.num_renames)

    @property
    def _weights(self) -> Path:
        return self._world.run_dir / "parameters"

    def _versions(self) -> list[str]:
        """Return the files of the parameter server, by name."""
        try:
            return [name for name in sorted(os.listdir(self._weights)) if name.endswith(".bin")]
        except FileNotFoundError:
            return []

    def _flip_file(self, path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        path.chmod(0o644)
        path.write_bytes(data)
        path.chmod(0o444)

    def _clock_jump(self) -> bool:
        self._world.clock.jump_ns += self._rng.choice((-3600, -5, 5, 86_400)) * 1_000_000_000
        return True
