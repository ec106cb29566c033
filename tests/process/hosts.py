"""Hosts on one machine: network namespaces on a switch, each with its own address, boot id, host name and home.

Requires root and iproute2. The machine's own network stays untouched, and leaving the context removes all namespaces.
"""

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import psutil

SHELL = """\
#!/bin/sh
# SHELL HOST COMMAND: as ssh would, in the namespaces of that host. The other hosts' folders are not there.
exec ip netns exec {prefix}"$1" setsid --wait unshare --mount --uts sh -c '
    home={base}/$1
    mount --bind "$home/boot_id" /proc/sys/kernel/random/boot_id
    hostname "$(basename "$home" | tr . -)"
    export HOME="$home/home"
    mount --bind "$home/home" {base}/shared_name
    cd {base}/shared_name && exec sh -c "$2"
' sh "$1" "$2"
"""


def possible() -> bool:
    """Return True if this process may create network namespaces."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "unshare", "setsid"))):
        return False
    return (
        subprocess.run(["unshare", "--net", "--mount", "--uts", "true"], capture_output=True, check=False).returncode
        == 0
    )


class Hosts:
    """Hosts ``10.77.0.1``, ``10.77.0.2``, ... with files below ``base``. ``shell`` is a program that reaches them."""

    def __init__(self, base: Path, count: int) -> None:
        self.addresses = [f"10.77.0.{number + 1}" for number in range(count)]
        self.shell = base / "shell"
        self._base = base
        self._prefix = f"sf{secrets.token_hex(2)}-"
        self._switch = f"{self._prefix}switch"

    def __enter__(self) -> "Hosts":
        _do("ip", "netns", "add", self._switch)
        self._in_switch("ip", "link", "add", "switch", "type", "bridge")
        self._in_switch("ip", "link", "set", "switch", "up")
        (self._base / "shared_name").mkdir(parents=True)
        for number, address in enumerate(self.addresses):
            self._add(number, address)
        self.shell.write_text(SHELL.format(prefix=self._prefix, base=self._base))
        self.shell.chmod(0o755)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        spaces = [*(self._prefix + address for address in self.addresses), self._switch]
        for space in spaces:
            pids = subprocess.run(
                ["ip", "netns", "pids", space], capture_output=True, text=True, check=False
            ).stdout.split()
            left = [psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))]
            for process in left:
                process.kill()
            psutil.wait_procs(left, timeout=10)
            _do("ip", "netns", "del", space)

    def _add(self, number: int, address: str) -> None:
        home, space = self._base / address, self._prefix + address
        (home / "home").mkdir(parents=True)
        (home / "boot_id").write_text(f"{secrets.token_hex(16)}\n")
        _do("ip", "netns", "add", space)
        _do(
            "ip",
            "link",
            "add",
            "eth0",
            "netns",
            space,
            "type",
            "veth",
            "peer",
            "name",
            f"port{number}",
            "netns",
            self._switch,
        )
        self._in_switch("ip", "link", "set", f"port{number}", "master", "switch", "up")
        for words in (
            ("addr", "add", f"{address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            _do("ip", "-n", space, *words)

    def start(self, address: str, command: Sequence[str], output: Path) -> "subprocess.Popen[bytes]":
        """Start a program on a host."""
        words = " ".join(f"'{word}'" for word in command)
        with output.open("ab") as to:
            return subprocess.Popen(
                [str(self.shell), address, f"exec {words}"], stdin=subprocess.DEVNULL, stdout=to, stderr=to
            )

    def slow(self, address: str, *, mbit: int, delay_ms: int) -> None:
        """Limit both directions of a host's link; a kernel without netem limits the rate only."""
        ends = ((self._prefix + address, "eth0"), (self._switch, self._port(address)))
        netem = ("netem", "delay", f"{delay_ms}ms", "rate", f"{mbit}mbit")
        rate = ("tbf", "rate", f"{mbit}mbit", "burst", "32kbit", "latency", "400ms")
        for space, port in ends:
            begin = ("tc", "-n", space, "qdisc", "replace", "dev", port, "root")
            if subprocess.run([*begin, *netem], capture_output=True, check=False).returncode:
                _do(*begin, *rate)

    def cut(self, address: str, seconds: float) -> None:
        """Drop all traffic of a host for ``seconds``; neither side gets an error."""
        self._in_switch("ip", "link", "set", self._port(address), "nomaster")
        time.sleep(seconds)
        self._in_switch("ip", "link", "set", self._port(address), "master", "switch")

    def sent(self, address: str) -> int:
        """Bytes that a host has sent."""
        return self._count(address, "tx_bytes")

    def received(self, address: str) -> int:
        """Bytes that a host has received."""
        return self._count(address, "rx_bytes")

    def _count(self, address: str, counter: str) -> int:
        return int(
            _do("ip", "netns", "exec", self._prefix + address, "cat", f"/sys/class/net/eth0/statistics/{counter}")
        )

    def _port(self, address: str) -> str:
        return f"port{self.addresses.index(address)}"

    def _in_switch(self, *words: str) -> None:
        _do("ip", "netns", "exec", self._switch, *words)


def _do(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout
