"""Run one machine through a remote shell: copy its keys, start it, keep it alive, and stop it with this process.

    python -m staleflow.launch.remote JSON-OF-REACH

The keys are sent first, on the standard input that afterwards serves as the machine's lifeline. Each connection stores
them in its own temporary folder and deletes it when the machine ends. Runs of the same name, machines that share a home
directory, and processes that still drain after a lost link therefore do not disturb each other.
"""

import os
import shlex
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import msgspec

from staleflow.launch.ssh import HEARTBEAT_INTERVAL_S, Reach
from staleflow.supervisor import lifeline
from staleflow.supervisor.stopping import StopSignals

SSH_FAILED = 255
"""Exit code of ssh if the connection itself failed."""
RETRY_INTERVAL_S = 5.0
"""Seconds between two attempts to reach a machine."""
POLL_INTERVAL_S = 0.1


def main() -> int:
    """Run until the machine ends or this process receives a signal; return the exit code of the remote command."""
    lifeline.watch_supervisor()
    reach = msgspec.json.decode(sys.argv[1], type=Reach)
    with StopSignals() as stop:
        while True:
            code = _run_once(reach, stop)
            if code != SSH_FAILED or stop.first.is_set():
                return code if code >= 0 else 128 - code
            print(f"{reach.host} is unreachable; retrying in {RETRY_INTERVAL_S:g} s", flush=True)
            if stop.wait(RETRY_INTERVAL_S):
                return 0


def _run_once(reach: Reach, stop: StopSignals) -> int:
    keys = _tar(reach.key_files) if reach.keys_in else b""
    remote = subprocess.Popen((*reach.through, reach.host, remote_command(reach, len(keys))), stdin=subprocess.PIPE)
    assert remote.stdin is not None
    with suppress(BrokenPipeError):  # the connection has ended: its exit code shows why
        remote.stdin.write(keys)
        remote.stdin.flush()
    beat_at = time.monotonic() + HEARTBEAT_INTERVAL_S
    while remote.poll() is None:
        if time.monotonic() >= beat_at and not remote.stdin.closed:
            beat_at = time.monotonic() + HEARTBEAT_INTERVAL_S
            with suppress(BrokenPipeError):
                os.write(remote.stdin.fileno(), b".")
        if stop.wait(POLL_INTERVAL_S) and not remote.stdin.closed:
            remote.stdin.close()  # the machine drains
        if stop.second.is_set():
            remote.kill()
        if stop.first.is_set():
            time.sleep(POLL_INTERVAL_S)
    return remote.returncode


def remote_command(reach: Reach, nbytes: int) -> str:
    """Return the command of the remote shell, which receives the keys, runs ``reach.command`` and deletes the keys.

    The shell reads exactly ``nbytes`` of keys: all later bytes on standard input are heartbeats for the command. The
    folder of the keys has mode 0700.
    """
    if not reach.keys_in:
        return reach.command
    folder = f'"$HOME"/.staleflow/{shlex.quote(reach.keys_in)}'
    return (
        f'(umask 077 && mkdir -p "$HOME"/.staleflow) && keys=$(mktemp -d {folder}.XXXXXX) || exit 1; '
        f'dd bs=1 count={nbytes} 2>/dev/null | tar -xf - -C "$keys" && ({reach.command}); '
        'code=$?; rm -rf "$keys"; exit $code'
    )


def _tar(files: list[str]) -> bytes:
    buffer = BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in map(Path, files):
            entry = tarfile.TarInfo(path.name)
            data = path.read_bytes()
            entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
            archive.addfile(entry, BytesIO(data))
    return buffer.getvalue()


if __name__ == "__main__":
    sys.exit(main())
