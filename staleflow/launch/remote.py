"""One machine behind a remote shell: gives it its keys, starts it, keeps it, and ends it when this process ends.

    python -m staleflow.launch.remote JSON-OF-REACH

Keys come first on the connection whose open end is then the machine's lifeline. They lie in a folder of this connection
alone, which goes when the machine ends, however that happens: whoever else has this name of a run, or this home, or
is still draining after a lost link, has another one.
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

from staleflow.launch.ssh import BEAT_S, Reach
from staleflow.supervisor import lifeline
from staleflow.supervisor.stopping import StopSignals

UNREACHABLE = 255
"""How ssh ends when it is ssh that failed."""
RETRY_INTERVAL_S = 5.0
"""Between two tries to reach a machine."""
POLL_INTERVAL_S = 0.1


def main() -> int:
    """Until the machine ends by itself or this process is asked to end; the exit code of what ran there."""
    lifeline.hold()
    reach = msgspec.json.decode(sys.argv[1], type=Reach)
    with StopSignals() as stop:
        while True:
            code = _once(reach, stop)
            if code != UNREACHABLE or stop.first.is_set():
                return code if code >= 0 else 128 - code
            print(f"{reach.host} is not reached; next try in {RETRY_INTERVAL_S:g} s", flush=True)
            if stop.wait(RETRY_INTERVAL_S):
                return 0


def _once(reach: Reach, stop: StopSignals) -> int:
    keys = _packed(reach.key_files) if reach.keys_in else b""
    remote = subprocess.Popen((*reach.through, reach.host, whole(reach, len(keys))), stdin=subprocess.PIPE)
    assert remote.stdin is not None
    with suppress(BrokenPipeError):  # it has ended: its exit code says how
        remote.stdin.write(keys)
        remote.stdin.flush()
    beat_at = time.monotonic() + BEAT_S
    while remote.poll() is None:
        if time.monotonic() >= beat_at and not remote.stdin.closed:
            beat_at = time.monotonic() + BEAT_S
            with suppress(BrokenPipeError):
                os.write(remote.stdin.fileno(), b".")
        if stop.wait(POLL_INTERVAL_S) and not remote.stdin.closed:
            remote.stdin.close()  # the machine drains
        if stop.second.is_set():
            remote.kill()
        if stop.first.is_set():
            time.sleep(POLL_INTERVAL_S)
    return remote.returncode


def whole(reach: Reach, nbytes: int) -> str:
    """What the remote shell runs: it takes ``nbytes`` of keys, and not one more, into a folder that only their owner
    can enter (mode 0700), which it removes in the end."""
    if not reach.keys_in:
        return reach.command
    folder = f'"$HOME"/.staleflow/{shlex.quote(reach.keys_in)}'
    return (
        f'(umask 077 && mkdir -p "$HOME"/.staleflow) && keys=$(mktemp -d {folder}.XXXXXX) || exit 1; '
        f'dd bs=1 count={nbytes} 2>/dev/null | tar -xf - -C "$keys" && ({reach.command}); '
        'code=$?; rm -rf "$keys"; exit $code'
    )


def _packed(files: list[str]) -> bytes:
    held = BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        for path in map(Path, files):
            entry = tarfile.TarInfo(path.name)
            data = path.read_bytes()
            entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
            archive.addfile(entry, BytesIO(data))
    return held.getvalue()


if __name__ == "__main__":
    sys.exit(main())
