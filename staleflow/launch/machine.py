"""Run the processes of one machine: start them, restart those that die, and exit when the run ends.

    python -m staleflow.launch.machine rollout --connect ADDRESS --machine 0 --machines 4 --gpus 8
    python -m staleflow.launch.machine trainer --connect ADDRESS --machine 0 --machines 2 --gpus 8 --meet HOST:PORT

Slurm, Ray or ssh start this module on each machine; everything else comes from the scheduler. The output of the
processes goes to their logs and, line by line, to standard output as long as it accepts data. Exit codes: 0 if the run
has ended or a signal arrived; 2 if a process rejected its configuration; 1 if a process could not be started or kept
dying.
"""

import argparse
import os
import select
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import get_args

from staleflow.configs.errors import ConfigError
from staleflow.configs.launch import Relays
from staleflow.configs.loading.load import read_run
from staleflow.configs.schema import Config
from staleflow.launch.network import host_of, interface_of, own_address, tcp
from staleflow.launch.placement import PARTS, Place, rollout_roles, trainer_roles
from staleflow.launch.wanted_watch import WantedWatch
from staleflow.net.errors import Refused, RunOver, Unavailable
from staleflow.supervisor import lifeline
from staleflow.supervisor.children import Child
from staleflow.supervisor.drain import MACHINE_TIMEOUT_S, drain
from staleflow.supervisor.elastic import Spares
from staleflow.supervisor.joining import has_ended, join_run
from staleflow.supervisor.lifeline import Lifeline
from staleflow.supervisor.roles import Role
from staleflow.supervisor.stopping import StopSignals
from staleflow.supervisor.watch import Tail

JOIN_TIMEOUT_S = 600.0
"""Seconds to wait for the scheduler's first answer; it may still be starting, or the model being built."""
END_CHECK_TIMEOUT_S = 20.0
"""After a process exits by itself: seconds without an answer after which the scheduler counts as ended with its run."""
POLL_INTERVAL_S = 0.2
WRITE_TIMEOUT_S = 0.2
"""Seconds in which standard output must accept a line; on a dead link nothing drains the pipe, and it fills up."""
GLOO = "GLOO_SOCKET_IFNAME"
"""Environment variable: the network interface for ranks on CPUs. Gloo's default is the interface of the host name."""


class Machine:
    """The processes of one machine."""

    def __init__(self, roles: Sequence[Role], folder: Path, connect: str, role: str) -> None:
        self._lifeline = Lifeline()
        self._connect = connect
        self._role = role
        self._folder = folder
        self._spares = Spares([role for role in roles if role.spare])
        self._watch = WantedWatch(connect) if any(role.elastic for role in roles) else None
        self._children = list[Child]()
        self._tails = list[Tail]()
        for first in roles:
            if not first.spare:
                self._add(first)
        self._ended = list[Child]()

    def _add(self, role: Role) -> Child:
        child = Child(role, self._folder, self._lifeline)
        self._children.append(child)
        self._tails.append(Tail(self._folder / "logs" / f"{role.name}.out", from_end=True))
        return child

    def _start(self, child: Child) -> bool:
        try:
            child.start()
        except OSError as error:
            print_line(f"{child.name} could not be started: {error}")
            return False
        print_line(f"{child.name} started")
        return True

    def run(self) -> int:
        """Run until the run ends, a signal arrives, or a process fails; return the exit code. Main thread only."""
        with StopSignals() as stop, self._watch or nullcontext():
            try:
                if not all(self._start(child) for child in self._children):
                    return 1
                while not stop.wait(POLL_INTERVAL_S):
                    self._forward_output()
                    code = self._restart_dead()
                    if code is None:
                        code = self._follow_scheduler()
                    if code is not None:
                        return code
                return 0
            finally:
                try:
                    drain(self._children, self._forward_output, print_line, stop.second)
                    self._forward_output()
                finally:
                    self._lifeline.close()

    def _follow_scheduler(self) -> int | None:
        """Start the rollout workers that the scheduler wants. Return the exit code if there is nothing left to do."""
        if self._watch is None:
            return None
        if self._watch.ended and not self._children:
            return 0
        wanted = () if self._watch.ended else self._watch.wanted
        for role in self._spares.take(wanted):
            if not self._start(self._add(role)):
                return 1
        return None

    def _restart_dead(self) -> int | None:
        for child in list(self._children):
            if child.restart_at is not None:
                if message := child.restart_if_due():
                    print_line(message)
            elif child.exit_code is None or child in self._ended:
                continue
            elif (code := self._handle_exit(child)) is not None:
                return code
        return 0 if self._children and len(self._ended) == len(self._children) else None

    def _handle_exit(self, child: Child) -> int | None:
        code = child.exit_code
        child.sweep()
        if code == 2:
            print_line(f"{child.name} rejected its configuration")
            return 2
        if self._watch is not None and code == 0:
            self._watch.poll_now()
            if not self._watch.ended and self._spares.keep(child.role, self._watch.wanted):
                self._children.remove(child)
                print_line(f"{child.name} has left (rollout workers wanted: {len(self._watch.wanted)})")
                return None
        if code == 0 and has_ended(self._connect, self._role, timeout_s=END_CHECK_TIMEOUT_S):
            self._ended.append(child)
            return None
        if child.start_error:
            print_line(f"{child.name} could not be restarted")
            return 1
        if code == 0 and not child.plan_restart():
            self._ended.append(child)
            return None
        if code != 0:
            print_line(f"{child.name} died with {code}")
            if not child.plan_restart():
                print_line(f"{child.name} keeps dying")
                return 1
        return None

    def _forward_output(self) -> None:
        for tail in self._tails:
            for line in tail.take().decode("utf-8", "replace").splitlines():
                if not print_line(line):
                    return


def print_line(text: str) -> bool:
    """Write one line to standard output, in atomic pieces of at most ``PIPE_BUF`` bytes.

    Return False if it cannot be written in time. The reader may be gone; the processes here must then still be
    supervised and drained, so this never blocks for long and never raises.
    """
    line = f"{text}\n".encode()
    try:
        for start in range(0, len(line), select.PIPE_BUF):
            if not select.select((), (1,), (), WRITE_TIMEOUT_S)[1]:
                return False
            os.write(1, line[start : start + select.PIPE_BUF])
    except OSError:
        return False
    return True


def roles_of(config: Config, folder: Path, connect: str, place: Place, meet: str) -> list[Role]:
    """Return the processes of this machine.

    Raise ``ConfigError`` if the ranks of several machines do not share a run directory for their checkpoint.
    """
    here = own_address(host_of(connect))
    if place.part == "rollout":
        return rollout_roles(config, folder, connect, place, tcp(here, "*"))
    if place.machines > 1 and folder.parent == Path("runs"):
        allowed = "ranks on several machines write one checkpoint: the run directory must be on a disk of all of them"
        raise ConfigError("run directory", str(folder.resolve()), allowed)
    return trainer_roles(config, folder, connect, place, meet, here)


def join_with_retry(connect: str, role: str) -> tuple[Config, Path]:
    """Join the run once its scheduler answers; return its configuration, pools of rollout workers included, and its
    directory here. Raise ``Unavailable`` after ``JOIN_TIMEOUT_S``."""
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while True:
        try:
            _, folder = join_run(connect, role, timeout_s=5.0)
            return read_run(folder), folder  # joining as a rollout worker returns the configuration of one worker
        except Unavailable:
            if time.monotonic() > deadline:
                raise


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line, join the run and run this machine's processes."""
    lifeline.watch_supervisor(MACHINE_TIMEOUT_S)
    parser = argparse.ArgumentParser(prog="python -m staleflow.launch.machine", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--connect", required=True, metavar="ADDRESS", help="address of the scheduler")
    parser.add_argument("--machine", type=int, default=0, metavar="N", help="index of this machine in its part, from 0")
    parser.add_argument("--machines", type=int, default=1, metavar="N", help="number of machines in its part")
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help="GPUs to use; 0: all")
    parser.add_argument("--meet", default="", metavar="HOST:PORT", help="where ranks of several machines meet")
    parser.add_argument("--relays", choices=get_args(Relays), default="auto", help="as launch.relays")
    parser.add_argument("--mb-per-s", type=float, default=0.0, metavar="MB", help="rate limit of a relay; 0: none")
    given = parser.parse_args(words)
    place = Place(
        part=given.part,
        number=given.machine,
        machines=given.machines,
        gpus=given.gpus,
        relays=given.relays,
        mb_per_s=given.mb_per_s,
    )
    role = "train" if given.part == "trainer" else "rollout"
    try:
        config, folder = join_with_retry(given.connect, role)
        if interface := interface_of(own_address(host_of(given.connect))):
            os.environ.setdefault(GLOO, interface)
        return Machine(roles_of(config, folder, given.connect, place, given.meet), folder, given.connect, role).run()
    except RunOver as over:
        print_line(f"staleflow: {over}")
        return 0
    except ConfigError as error:
        print_line(f"staleflow: {error}")
        return 2
    except (Unavailable, Refused) as error:
        print_line(f"staleflow: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
