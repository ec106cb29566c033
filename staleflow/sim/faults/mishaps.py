"""Faults of components: workers that fail at everything, payload that no engine writes, older stores."""

import math
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from staleflow.sim.faults.payload import LONG
from staleflow.sim.faults.world import Interval, Node, World
from staleflow.sim.virtual import Process
from staleflow.store.memory import Tables

OLDER_S: Final = (2.0, 10.0)
"""Age of an older store."""

For = Callable[[float, Callable[[], object]], None]
"""Marks a fault as active for a number of seconds, then calls the function."""

MAX_HOLD_S: Final = 60.0
"""Longest hold of a worker that fails everything, at the scheduler or at a shard."""

DOUBLED: Final = ("rollout", "stage")
"""Roles of processes whose name a second process may use."""


class ComponentFaults:
    """Faults of workers and stores; each action returns whether it caused its fault."""

    def __init__(self, world: World, rng: random.Random, for_a_while: For) -> None:
        self._world = world
        self._rng = rng
        self._for = for_a_while

    def actions(self) -> dict[str, Callable[[], bool]]:
        return {
            "a rollout worker fails everything": partial(self._broken, "rollout"),
            "a stage worker fails everything": partial(self._broken, "stage"),
            "unequal contexts": self._short_context,
            "poisoned payload": self._poison,
            "the same name twice": self._twice,
            "an older store of a shard": self._older_shard,
            "a lost store of the scheduler": self._lost_scheduler,
            "an older store of the scheduler": self._older_scheduler,
            "a damaged checkpoint": self._damaged_checkpoint,
        }

    def _one_of_several(self, role: str) -> Node | None:
        """Return a running worker, provided that another healthy one of its kind runs."""
        scene = self._world.scene
        healthy = [
            node
            for node in self._world.of(role)
            if node.runs and node.name not in scene.broken and node.name not in scene.contexts
        ]
        chosen = self._rng.choice(healthy) if healthy else None
        kind = chosen.name.rpartition("-")[0] if chosen is not None else ""
        return chosen if sum(node.name.rpartition("-")[0] == kind for node in healthy) > 1 else None

    def _seconds(self) -> float:
        return self._rng.uniform(0.5, 2.5) * self._world.scene.lease_s

    # --- workers -------------------------------------------------------------------------------------------------

    def _broken(self, role: str) -> bool:
        world, node = self._world, self._one_of_several(role)
        if node is None:
            return False
        name, spell = node.name, Interval(node.name, world.conductor.now_s)
        world.scene.broken.add(name)
        if role == "rollout":
            world.history.broken.append(spell)

        def over() -> None:
            spell.until_s = world.conductor.now_s
            world.hold_until_s = spell.until_s + MAX_HOLD_S
            world.scene.broken.discard(name)

        self._for(self._seconds(), over)
        return True

    def _short_context(self) -> bool:
        scene, node = self._world.scene, self._one_of_several("rollout")
        if node is None:
            return False
        name = node.name
        scene.contexts[name] = LONG
        self._for(self._seconds(), lambda: scene.contexts.pop(name, None))
        return True

    def _poison(self) -> bool:
        scene = self._world.scene
        scene.poison = True
        self._for(self._seconds(), lambda: setattr(scene, "poison", False))
        return True

    def _twice(self) -> bool:
        """Start a worker under a name that is in use, as an operator may."""
        nodes = [node for node in self._world.of(*DOUBLED) if node.runs]
        if not nodes:
            return False
        process: Process = self._world.double(self._rng.choice(nodes))
        self._for(self._seconds(), lambda: self._world.conductor.kill(process))
        return True

    # --- stores --------------------------------------------------------------------------------------------------

    def _older_shard(self) -> bool:
        """Restore a shard's machine from a backup."""
        world, node = self._world, self._rng.choice(self._world.of("trajectories"))
        disk = node.disk
        assert disk is not None
        older, slabs = disk.copy(), disk.copy_slabs()

        def restored() -> None:
            if node.process is not None:
                world.conductor.kill(node.process)
            disk.put_back(older)
            disk.put_back_slabs(slabs)

        self._for(self._rng.uniform(*OLDER_S), restored)
        return True

    def _lost_scheduler(self) -> bool:
        return self._swap({})

    def _older_scheduler(self) -> bool:
        disk = self._world.nodes["scheduler"].disk
        assert disk is not None
        if not disk.tables:
            return False
        older, seq = disk.copy(), self._world.seq()
        self._world.conductor.after(self._rng.uniform(*OLDER_S), self._swap_older, older, seq)
        return True

    def _swap_older(self, older: Tables, seq: int) -> None:
        if self._traced() > seq and not self._world.ended and not self._world.scene.finishing:
            self._swap(older)

    def _traced(self) -> int:
        """Return the last line of the trace's file; a file cut to the end of an older ledger does not disprove that
        ledger."""
        lines = (self._world.run_dir / "trace.jsonl").read_bytes().split(b"\n")[:-1]
        return int(msgspec.json.decode(lines[-1])["seq"]) if lines else 0

    def _swap(self, other: Tables) -> bool:
        """Give the scheduler another store than it left. It must reject it until the operator has restored its own."""
        world, node = self._world, self._world.nodes["scheduler"]
        disk = node.disk
        assert disk is not None
        if node.swapped or not node.runs or node.process is None or not world.seq():
            return False
        world.conductor.kill(node.process)
        own, flipped = disk.copy(), set(disk.flipped)
        disk.put_back(other)
        node.swapped = True
        world.history.swapped += 1

        def over() -> None:
            if node.runs and node.process is not None:
                world.history.served_wrongly.append(f"{node.name} works at {world.conductor.now_s:.1f}")
                world.conductor.kill(node.process)
            disk.put_back(own)
            disk.flipped = flipped
            node.swapped = False

        self._for(self._seconds(), over)
        return True

    def _damaged_checkpoint(self) -> bool:
        """Change one byte of the newest checkpoint, while an older one exists, and kill its trainer."""
        world, folder = self._world, self._world.run_dir / "checkpoints"
        numbered = (path for path in folder.glob("*") if path.name.isdecimal())
        checkpoints = sorted(numbered, key=lambda path: int(path.name))
        if len(checkpoints) < 2 or not self._whole(checkpoints[-2]) or not self._whole(checkpoints[-1]):
            return False
        if int(checkpoints[-2].name) < self._oldest_kept():
            # a full shard keeps payload for the newest checkpoint only, so the run can resume from no other
            return False
        path = self._rng.choice([path for path in sorted(checkpoints[-1].iterdir()) if path.stat().st_size])
        data = bytearray(path.read_bytes())
        data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        path.write_bytes(data)
        (checkpoints[-1] / DAMAGED).touch()
        for node in world.of("trainer"):
            if node.process is not None and node.process.alive:
                world.conductor.kill(node.process)
        return True

    def _oldest_kept(self) -> float:
        """Return the oldest version that the run can roll back to; infinity while a trajectory server may lack room for
        more."""
        world = self._world
        if any(node.disk is not None and (node.disk.full or node.disk.crowded) for node in world.of("trajectories")):
            return math.inf
        lines = (world.run_dir / "trace.jsonl").read_bytes().splitlines()
        newest = next((line for line in reversed(lines) if b'"ev":"checkpoint"' in line), None)
        return 0 if newest is None else int(msgspec.json.decode(newest)["version"])

    def _whole(self, checkpoint: Path) -> bool:
        return not (checkpoint / DAMAGED).exists()


DAMAGED: Final = "damaged"
"""Name of a file that marks a damaged checkpoint."""
