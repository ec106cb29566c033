"""One machine of a run: starts its processes, starts again what dies, and ends with the run.

    python -m staleflow.launch.machine rollout --connect ADDRESS --machine 0 --machines 4 --gpus 8
    python -m staleflow.launch.machine trainer --connect ADDRESS --machine 0 --machines 2 --gpus 8 --meet HOST:PORT

Whoever starts machines (Slurm, Ray, ssh) starts this on each. Everything else comes from the scheduler. What its
processes print goes to standard output, a line at a time, besides their logs, while somebody takes it. Exit code 0: the
run has ended, or a signal came; 2: a process refuses to start; 1: one could not be started, or died again and again.
"""

import argparse
import os
import select
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from staleflow.configs.errors import ConfigError
from staleflow.configs.launch import Relays
from staleflow.configs.schema import Config
from staleflow.launch.network import host_of, interface_of, own_address, tcp
from staleflow.launch.placement import PARTS, Place, rollout_roles, trainer_roles
from staleflow.net.errors import Refused, RunOver, Unavailable
from staleflow.supervisor import lifeline
from staleflow.supervisor.children import Child
from staleflow.supervisor.drain import MACHINE_S, drain
from staleflow.supervisor.joining import has_ended, joined
from staleflow.supervisor.lifeline import Lifeline
from staleflow.supervisor.roles import Role
from staleflow.supervisor.stopping import StopSignals
from staleflow.supervisor.tail import Tail

JOIN_S = 600.0
"""In which the scheduler must answer: it may still be starting, or the model be built."""
ENDED_S = 20.0
"""After a process has left by itself: a scheduler that does not answer for so long has ended with its run."""
POLL_INTERVAL_S = 0.2
ROOM_S = 0.2
"""In which standard output must take a line: on a link that is silent nobody reads it, and it is full one day."""
GLOO = "GLOO_SOCKET_IFNAME"
"""Environment: the interface on which ranks on CPUs meet; else gloo takes the one of this machine's host name."""


class Machine:
    """The processes of one machine."""

    def __init__(self, roles: Sequence[Role], folder: Path, connect: str, word: str) -> None:
        self._lifeline = Lifeline()
        self._connect = connect
        self._word = word
        self._children = [Child(role, folder, self._lifeline) for role in roles]
        self._tails = [Tail(folder / "logs" / f"{role.name}.out") for role in roles]
        self._ended = list[Child]()

    def run(self) -> int:
        """Until the run ends, somebody stops it, or it cannot go on; the exit code. Main thread only."""
        with StopSignals() as stop:
            try:
                for child in self._children:
                    try:
                        child.start()
                    except OSError as error:
                        say(f"{child.name} could not be started: {error}")
                        return 1
                    say(f"{child.name} started")
                while not stop.wait(POLL_INTERVAL_S):
                    self._tell()
                    if (code := self._look_after()) is not None:
                        return code
                return 0
            finally:
                try:
                    drain(self._children, self._tell, say, stop.second)
                    self._tell()
                finally:
                    self._lifeline.close()

    def _look_after(self) -> int | None:
        for child in self._children:
            if child.restart_at is not None:
                if said := child.restart_if_due():
                    say(said)
            elif child.exit_code is None or child in self._ended:
                continue
            elif (code := self._died(child)) is not None:
                return code
        return 0 if len(self._ended) == len(self._children) else None

    def _died(self, child: Child) -> int | None:
        code = child.exit_code
        child.sweep()
        if code == 2:
            say(f"{child.name} refuses to start")
            return 2
        if code == 0 and has_ended(self._connect, self._word, timeout_s=ENDED_S):
            self._ended.append(child)
            return None
        if child.unstarted:
            say(f"{child.name} could not be started again and again")
            return 1
        if code == 0 and not child.plan_restart():
            self._ended.append(child)
            return None
        if code != 0:
            say(f"{child.name} died with {code}")
            if not child.plan_restart():
                say(f"{child.name} died again and again")
                return 1
        return None

    def _tell(self) -> None:
        for tail in self._tails:
            for line in tail.take():
                if not say(line):
                    return


def say(text: str) -> bool:
    """One line on standard output, whole even when others print too. False when nobody takes it: whoever reads may be
    gone, and what runs here is looked after and drained all the same."""
    line = f"{text}\n".encode()
    try:
        for start in range(0, len(line), select.PIPE_BUF):
            if not select.select((), (1,), (), ROOM_S)[1]:
                return False
            os.write(1, line[start : start + select.PIPE_BUF])
    except OSError:
        return False
    return True


def roles_of(config: Config, folder: Path, connect: str, place: Place, meet: str) -> list[Role]:
    """Processes of this machine. ``ConfigError`` where its ranks could not keep their checkpoints together."""
    here = own_address(host_of(connect))
    if place.part == "rollout":
        return rollout_roles(config, folder, connect, place, tcp(here, "*"))
    if place.machines > 1 and folder.parent == Path("runs"):
        allowed = "ranks on several machines write one checkpoint: the run directory must be on a disk of all of them"
        raise ConfigError("run directory", str(folder.resolve()), allowed)
    return trainer_roles(config, folder, connect, place, meet, here)


def until_joined(connect: str, word: str) -> tuple[Config, Path]:
    """The run, once its scheduler answers. ``Unavailable`` after ``JOIN_S``."""
    deadline = time.monotonic() + JOIN_S
    while True:
        try:
            return joined(connect, word, timeout_s=5.0)
        except Unavailable:
            if time.monotonic() > deadline:
                raise


def main(words: Sequence[str] | None = None) -> int:
    """As the module says."""
    lifeline.hold(MACHINE_S)
    parser = argparse.ArgumentParser(prog="python -m staleflow.launch.machine", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--connect", required=True, metavar="ADDRESS", help="of the scheduler")
    parser.add_argument("--machine", type=int, default=0, metavar="N", help="number among those of its part, from 0")
    parser.add_argument("--machines", type=int, default=1, metavar="N", help="of its part")
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help="that it may use; 0: whatever there is")
    parser.add_argument("--meet", default="", metavar="HOST:PORT", help="where ranks of several machines meet")
    parser.add_argument("--relays", choices=get_args(Relays), default="auto", help="whether one is here: launch.relays")
    parser.add_argument("--mb-per-s", type=float, default=0.0, metavar="MB", help="that a relay asks for; 0: no bound")
    given = parser.parse_args(words)
    place = Place(
        part=given.part,
        number=given.machine,
        machines=given.machines,
        gpus=given.gpus,
        relays=given.relays,
        mb_per_s=given.mb_per_s,
    )
    word = "train" if given.part == "trainer" else "rollout"
    try:
        config, folder = until_joined(given.connect, word)
        if interface := interface_of(own_address(host_of(given.connect))):
            os.environ.setdefault(GLOO, interface)
        return Machine(roles_of(config, folder, given.connect, place, given.meet), folder, given.connect, word).run()
    except RunOver as over:
        say(f"staleflow: {over}")
        return 0
    except ConfigError as error:
        say(f"staleflow: {error}")
        return 2
    except (Unavailable, Refused) as error:
        say(f"staleflow: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
