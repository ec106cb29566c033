"""One machine behind a remote shell: gives it its keys, starts it, keeps it, and ends it when this process ends.

python -m staleflow.launch.remote JSON-OF-REACH
"""

import shlex
import subprocess
import sys
import tarfile
import time
from io import BytesIO
from pathlib import Path

import msgspec

from staleflow.launch.ssh import Reach
from staleflow.supervisor import lifeline
from staleflow.supervisor.stopping import StopSignals

UNREACHABLE = 255
"""How ssh ends when it is ssh that failed."""
AGAIN_S = 5.0
"""Between two tries to reach a machine."""
LOOK_S = 0.1


def main() -> int:
    """Until the machine ends by itself or this process is asked to end; the exit code of what ran there."""
    lifeline.hold()
    reach = msgspec.json.decode(sys.argv[1], type=Reach)
    with StopSignals() as stop:
        while True:
            code = _once(reach, stop)
            if code != UNREACHABLE or stop.first.is_set():
                return code if code >= 0 else 128 - code
            print(f"{reach.host} is not reached; next try in {AGAIN_S:g} s", flush=True)
            if stop.wait(AGAIN_S):
                return 0


def _once(reach: Reach, stop: StopSignals) -> int:
    if reach.keys_in and (code := _hand_out_keys(reach)):
        return code
    remote = subprocess.Popen((*reach.through, reach.host, reach.command), stdin=subprocess.PIPE)
    assert remote.stdin is not None
    while remote.poll() is None:
        if stop.wait(LOOK_S) and not remote.stdin.closed:
            remote.stdin.close()  # the machine drains
        if stop.second.is_set():
            remote.kill()
        if stop.first.is_set():
            time.sleep(LOOK_S)
    return remote.returncode


def _hand_out_keys(reach: Reach) -> int:
    """Puts the files into a folder that only their owner can enter; the exit code of the remote shell."""
    folder = f'"$HOME"/{shlex.quote(reach.keys_in)}'
    command = f"umask 077 && mkdir -p {folder} && chmod 700 {folder} && tar -xf - -C {folder}"
    sent = subprocess.run((*reach.through, reach.host, command), input=_packed(reach.key_files), check=False)
    return sent.returncode


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
