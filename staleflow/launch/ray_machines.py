# pyright: basic, reportMissingImports=false
"""Machines of a Ray cluster: a placement group with one bundle per machine, and a named actor in each bundle.

The actor starts and supervises ``staleflow.launch.machine``. Neither payload nor weights pass through Ray.

    python -m staleflow.launch.ray_machines JSON-OF-FLEET

This process is Ray's driver and a child of the supervisor on the launching machine. When it ends, the actors and their
machines end, too. If a node is lost, Ray restarts its actor on another node.
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
from staleflow.launch.placement import RENDEZVOUS_PORT_OFFSET, Place, machine_cpus, machine_words, places
from staleflow.net.addresses import reachable
from staleflow.net.keys import VARIABLE as KEY_VARIABLE
from staleflow.supervisor import lifeline
from staleflow.supervisor.children import GAVE_UP, Restarts
from staleflow.supervisor.drain import MACHINE_TIMEOUT_S
from staleflow.supervisor.lifeline import VARIABLE, Lifeline
from staleflow.supervisor.roles import Kind, Role
from staleflow.supervisor.stopping import StopSignals

INSTALL_RAY = install("ray")
POLL_INTERVAL_S = 0.5
NOT_STARTED = -1000
"""Pseudo exit code: this actor has not started a machine yet."""
MOVING = 3
"""Exit code of a placeholder that replaces a machine briefly, so that it restarts with the new rendezvous address."""
PLACEMENT_LOG_INTERVAL_S = 30.0
"""Seconds between two messages about a placement that Ray cannot make yet."""


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of the driver, passed on its command line as JSON; they must not contain secrets."""

    name: str
    address: str
    """Address of the Ray cluster."""
    scheduler: str
    """Address that the scheduler binds; if it is a wildcard, machines connect to this node's address in the cluster."""
    port: int
    bundles: list[dict[str, float]]
    places: list[Place]
    """Place of the machine in each bundle."""
    key_files: list[list[str]]


def check() -> None:
    """Raise ``ConfigError`` unless ray is installed."""
    check_package("launch", "ray", "ray", INSTALL_RAY)


def fleet(config: Config, address: str = "auto") -> Fleet:
    """Return the fleet of the driver. ``config`` is the run's, with ``[launch]``."""
    all_places = places(config)
    return Fleet(
        name=config.name,
        address=address,
        scheduler=config.scheduler.bind,
        port=config.launch.port,
        bundles=[_bundle(config, place) for place in all_places],
        places=all_places,
        key_files=[[str(path) for path in files_for(config, place)] for place in all_places],
    )


def _bundle(config: Config, place: Place) -> dict[str, float]:
    cpus = float(machine_cpus(config, place.part))
    return {"CPU": cpus, **({"GPU": float(place.gpus)} if place.gpus else {})}


def machines(fleet: Fleet) -> Role:
    """Return the role of the driver. It counts as the trainer, because it contains it and must be drained like it."""
    words = (sys.executable, "-m", "staleflow.launch.ray_machines", msgspec.json.encode(fleet).decode())
    return Role(name="ray", kind=Kind.TRAINER, command=words)


class Actor:
    """Ray actor that starts a machine on its node and reports its state."""

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
        """Return the address of this node in the Ray cluster."""
        import ray

        return str(ray.util.get_node_ip_address())

    def node(self) -> str:
        """Return Ray's identifier of this node."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def start(self, words: Sequence[str]) -> None:
        """Start the machine; stop the previous one first."""
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
        """Return the exit code of the machine; None while it runs, ``NOT_STARTED`` if this actor is new."""
        return NOT_STARTED if self._process is None else self._process.poll()

    def stop(self) -> None:
        """Drain the machine and wait until it has exited."""
        if self._lifeline is not None and self._process is not None:
            self._lifeline.close()
            self._process.wait()
            self._lifeline = None

    def leave(self) -> None:
        """Stop the machine and delete its keys from this node. An actor that is killed leaves the keys behind."""
        self.stop()
        self._folder.cleanup()


class Driver:
    """Owner of the actors; starts and restarts their machines."""

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
        """Monotonic time of each pending restart, by index of the machine."""

    def place(self, stop: StopSignals) -> bool:
        """Place each machine on a node of its own. Return False if a signal arrives before Ray has placed them."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray, fleet = self._ray, time.monotonic() - PLACEMENT_LOG_INTERVAL_S
        group = placement_group(self._fleet.bundles, strategy="STRICT_SPREAD", name=self._fleet.name)
        while not ray.wait([group.ready()], timeout=POLL_INTERVAL_S)[0]:
            if stop.wait(0.0):
                return False
            if time.monotonic() - fleet >= PLACEMENT_LOG_INTERVAL_S:
                fleet = time.monotonic()
                nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
                room = [{key: node.get(key, 0) for key in self._fleet.bundles[0]} for node in nodes]
                print_line(f"Ray waits for nodes: wanted {self._fleet.bundles}, one a node; the cluster has {room}")
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

    def poll(self) -> int | None:
        """Start the machines that do not run. Return the exit code once all have ended, else None."""
        from ray.exceptions import RayActorError

        codes = list[int | None]()
        try:
            self._update_rendezvous()
            for at, actor in enumerate(self._actors):
                code = self._ray.get(actor.code.remote())
                if code is not None and code not in (0, 2):
                    if not self._restart_if_due(at, code):
                        print_line(f"{self._fleet.places[at].name} keeps dying, last with exit code {code}")
                        return 2
                    code = None
                codes.append(code)
        except RayActorError as error:
            print_line(f"an actor was lost, Ray restarts it: {' '.join(str(error).split())[:200]}")
            time.sleep(POLL_INTERVAL_S)
            return None
        if 2 in codes:
            return 2
        return 0 if all(code == 0 for code in codes) else None

    def _restart_if_due(self, at: int, code: int) -> bool:
        """Restart a machine when its back-off is over. Return False if it ended too often.

        A machine that was never started, or that must move, starts at once.
        """
        now = time.monotonic()
        if code not in (NOT_STARTED, MOVING) and at not in self._restart_at:
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
        """Start a machine. ``code`` is the exit code of the previous one."""
        place, actor = self._fleet.places[at], self._actors[at]
        self._ray.get(actor.start.remote(machine_words(place, self._connect, self._meet)))
        where = f"{self._ray.get(actor.host.remote())}, node {self._ray.get(actor.node.remote())}"
        print_line(f"{place.name} started at {where}" + (f"; it had exited with {code}" if code != NOT_STARTED else ""))

    def _update_rendezvous(self) -> None:
        """Determine the rendezvous of the ranks, on the first trainer machine; restart all of them if it has moved."""
        parts = [place.part for place in self._fleet.places]
        first = parts.index("trainer")
        if self._fleet.places[first].machines == 1:
            return
        meet = f"{self._ray.get(self._actors[first].host.remote())}:{self._fleet.port + RENDEZVOUS_PORT_OFFSET}"
        if self._meet not in ("", meet):
            trainers = [actor for part, actor in zip(parts, self._actors, strict=True) if part == "trainer"]
            self._ray.get([actor.start.remote(("-c", f"raise SystemExit({MOVING})")) for actor in trainers])
        self._meet = meet

    def stop(self) -> None:
        """Drain all machines."""
        from ray.exceptions import RayError

        try:
            self._ray.get([actor.leave.remote() for actor in self._actors], timeout=MACHINE_TIMEOUT_S - 5.0)
        except RayError as error:
            print_line(f"not every machine confirmed its end: {' '.join(str(error).split())[:200]}")


def print_line(text: str) -> None:
    """Write one line to standard output, unbuffered."""
    os.write(1, f"{text}\n".encode())


def main() -> int:
    """Run until the machines have ended or a signal arrives; return the exit code."""
    import ray

    lifeline.watch_supervisor()
    fleet = msgspec.json.decode(sys.argv[1], type=Fleet)
    with StopSignals() as stop:
        ray.init(
            address=fleet.address, namespace=f"staleflow-{fleet.name}", log_to_driver=True, logging_level="warning"
        )
        driver = Driver(fleet, ray)
        try:
            if not driver.place(stop):
                return 0
            while not stop.wait(POLL_INTERVAL_S):
                if (code := driver.poll()) is not None:
                    return code
            return 0
        finally:
            driver.stop()
            ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
