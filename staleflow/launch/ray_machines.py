# pyright: basic, reportMissingImports=false
"""Machines of a Ray cluster: a placement group with a bundle a machine, and in each a named actor that starts
``staleflow.launch.machine`` there and looks after it. Nothing else goes through Ray, no payload and no weights.

    python -m staleflow.launch.ray_machines JSON-OF-FLEET

This process is Ray's driver, a child of the supervisor on the machine that launches. When it ends, so do the actors,
and with them their machines. An actor whose node is lost is started by Ray on another one.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from staleflow.configs.loading.extras import install
from staleflow.configs.loading.presence import check_package
from staleflow.configs.schema import Config
from staleflow.launch.keys import files_for
from staleflow.launch.network import tcp
from staleflow.launch.placement import MEET, Place, machine_cpus, machine_words, places
from staleflow.net.addresses import reachable
from staleflow.net.keys import VARIABLE as KEY_VARIABLE
from staleflow.supervisor import lifeline
from staleflow.supervisor.children import GAVE_UP, Restarts
from staleflow.supervisor.drain import MACHINE_S
from staleflow.supervisor.lifeline import VARIABLE, Lifeline
from staleflow.supervisor.roles import Kind, Role
from staleflow.supervisor.stopping import StopSignals

RAY = install("ray")
POLL_INTERVAL_S = 0.5
ABSENT = -1000
"""Instead of an exit code: there was no machine."""
MOVES = 3
"""Exit code of what takes a machine's place for a moment, so that it starts again and meets the others elsewhere."""
PLACED_S = 30.0
"""Between two words about a placement that Ray cannot make yet."""


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver is told; on its command line as JSON, so it holds no secret."""

    name: str
    address: str
    """Of the Ray cluster."""
    scheduler: str
    """Where it is bound; at every interface: it is reached at this node's address in the Ray cluster."""
    port: int
    bundles: list[dict[str, float]]
    places: list[Place]
    """Of the machine in each bundle."""
    key_files: list[list[str]]


def check() -> None:
    """``ConfigError`` unless ray is installed."""
    check_package("launch", "ray", "ray", RAY)


def fleet(config: Config, address: str = "auto") -> Fleet:
    """``config``: the run's, with ``[launch]``."""
    found = places(config)
    return Fleet(
        name=config.name,
        address=address,
        scheduler=config.scheduler.bind,
        port=config.launch.port,
        bundles=[_bundle(config, place) for place in found],
        places=found,
        key_files=[[str(path) for path in files_for(config, place)] for place in found],
    )


def _bundle(config: Config, place: Place) -> dict[str, float]:
    cpus = float(machine_cpus(config, place.part))
    return {"CPU": cpus, **({"GPU": float(place.gpus)} if place.gpus else {})}


def machines(fleet: Fleet) -> Role:
    """The driver, to be started beside the servers; last words are those of the trainer in it."""
    words = (sys.executable, "-m", "staleflow.launch.ray_machines", msgspec.json.encode(fleet).decode())
    return Role(name="ray", kind=Kind.TRAINER, command=words)


class Actor:
    """In a process of Ray's on the machine: starts it, and says how it is."""

    def __init__(self, keys: dict[str, bytes]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="staleflow-")  # mode 0700
        for name, data in keys.items():
            path = Path(self._folder.name) / name
            path.touch(mode=0o600)
            path.write_bytes(data)
        self._keyed = bool(keys)
        self._lifeline: Lifeline | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def host(self) -> str:
        """The address of this node in the Ray cluster."""
        import ray

        return str(ray.util.get_node_ip_address())

    def node(self) -> str:
        """Ray's name of this node."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def start(self, words: Sequence[str]) -> None:
        """Starts the machine, in place of one that there may be."""
        self.stop()
        self._lifeline = Lifeline()
        environment = {**os.environ, VARIABLE: str(self._lifeline.read_fd)}
        if self._keyed:
            environment[KEY_VARIABLE] = self._folder.name
        self._process = subprocess.Popen(
            (sys.executable, *words),
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=(self._lifeline.read_fd,),
            start_new_session=True,
        )

    def code(self) -> int | None:
        """Its exit code; None while it runs. ``ABSENT``: nothing was started by this actor, which is a new one."""
        return ABSENT if self._process is None else self._process.poll()

    def stop(self) -> None:
        """The machine drains; waits until it has ended."""
        if self._lifeline is not None and self._process is not None:
            self._lifeline.close()
            self._process.wait()
            self._lifeline = None

    def leave(self) -> None:
        """As ``stop``, for good: its keys go from this machine, too. An actor that is killed leaves them."""
        self.stop()
        self._folder.cleanup()


class Driver:
    """Holds the actors and starts what they must start."""

    def __init__(self, fleet: Fleet, ray: Any) -> None:
        self._fleet = fleet
        self._ray = ray
        self._meet = ""
        here = tcp(str(ray.util.get_node_ip_address()), 0)
        self._connect = reachable(fleet.scheduler, here)
        self._actors: list[Any] = []
        self._restarts = [Restarts() for _ in fleet.places]
        self._started_at = [0.0 for _ in fleet.places]
        self._restart_at = dict[int, float]()
        """By number of the machine, of those that wait to be started again."""

    def placed(self, stop: StopSignals) -> bool:
        """Places the machines on a node each; False if somebody stops it meanwhile."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray, told = self._ray, time.monotonic() - PLACED_S
        group = placement_group(self._fleet.bundles, strategy="STRICT_SPREAD", name=self._fleet.name)
        while not ray.wait([group.ready()], timeout=POLL_INTERVAL_S)[0]:
            if stop.wait(0.0):
                return False
            if time.monotonic() - told >= PLACED_S:
                told = time.monotonic()
                nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
                room = [{key: node.get(key, 0) for key in self._fleet.bundles[0]} for node in nodes]
                say(f"Ray waits for nodes: wanted {self._fleet.bundles}, one a node; the cluster has {room}")
        actor = ray.remote(Actor)
        for at, bundle in enumerate(self._fleet.bundles):
            keys = {Path(path).name: Path(path).read_bytes() for path in self._fleet.key_files[at]}
            where = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=at)
            placing = actor.options(
                name=self._fleet.places[at].name,
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                max_restarts=-1,
                scheduling_strategy=where,
            )
            self._actors.append(placing.remote(keys))
        return True

    def look(self) -> int | None:
        """Starts what is not running; the exit code once there is nothing to wait for."""
        from ray.exceptions import RayActorError

        codes = list[int | None]()
        try:
            self._meet_again()
            for at, actor in enumerate(self._actors):
                code = self._ray.get(actor.code.remote())
                if code is not None and code not in (0, 2):
                    if not self._start_again(at, code):
                        say(f"{self._fleet.places[at].name} ended again and again, last with {code}")
                        return 2
                    code = None
                codes.append(code)
        except RayActorError as error:
            say(f"an actor is lost, Ray starts it anew: {' '.join(str(error).split())[:200]}")
            time.sleep(POLL_INTERVAL_S)
            return None
        if 2 in codes:
            return 2
        return 0 if all(code == 0 for code in codes) else None

    def _start_again(self, at: int, code: int) -> bool:
        """When its time has come. False: it ended too often. A machine that was not there, or has to move, comes at
        once."""
        now = time.monotonic()
        if code not in (ABSENT, MOVES) and at not in self._restart_at:
            worked_s = 0.0 if code == GAVE_UP else now - self._started_at[at]
            if (delay_s := self._restarts[at].after(worked_s)) is None:
                return False
            self._restart_at[at] = now + delay_s
        if now >= self._restart_at.get(at, now):
            self._start(at, code)
            self._started_at[at] = now
            self._restart_at.pop(at, None)
        return True

    def _start(self, at: int, code: int) -> None:
        """``code``: how the machine ended before."""
        place, actor = self._fleet.places[at], self._actors[at]
        self._ray.get(actor.start.remote(machine_words(place, self._connect, self._meet)))
        where = f"{self._ray.get(actor.host.remote())}, node {self._ray.get(actor.node.remote())}"
        say(f"{place.name} started at {where}" + (f"; it had ended with {code}" if code != ABSENT else ""))

    def _meet_again(self) -> None:
        """Ranks of several machines meet at the first one; when that has moved, all of them start anew."""
        parts = [place.part for place in self._fleet.places]
        first = parts.index("trainer")
        if self._fleet.places[first].machines == 1:
            return
        meet = f"{self._ray.get(self._actors[first].host.remote())}:{self._fleet.port + MEET}"
        if self._meet not in ("", meet):
            trainers = [actor for part, actor in zip(parts, self._actors, strict=True) if part == "trainer"]
            self._ray.get([actor.start.remote(("-c", f"raise SystemExit({MOVES})")) for actor in trainers])
        self._meet = meet

    def stop(self) -> None:
        """All machines drain."""
        from ray.exceptions import RayError

        try:
            self._ray.get([actor.leave.remote() for actor in self._actors], timeout=MACHINE_S - 5.0)
        except RayError as error:
            say(f"not every machine has said that it ended: {' '.join(str(error).split())[:200]}")


def say(text: str) -> None:
    """One line on standard output."""
    os.write(1, f"{text}\n".encode())


def main() -> int:
    """Until the machines have ended or this process is asked to end; the exit code."""
    import ray

    lifeline.hold()
    told = msgspec.json.decode(sys.argv[1], type=Fleet)
    with StopSignals() as stop:
        ray.init(address=told.address, namespace=f"staleflow-{told.name}", log_to_driver=True, logging_level="warning")
        driver = Driver(told, ray)
        try:
            if not driver.placed(stop):
                return 0
            while not stop.wait(POLL_INTERVAL_S):
                if (code := driver.look()) is not None:
                    return code
            return 0
        finally:
            driver.stop()
            ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
