"""torchrun for the ranks of one machine of several, as a child of a supervisor: it ends when its supervisor does, and
each rank with it.

python -m staleflow.launch.ranks OPTIONS-OF-TORCHRUN -m staleflow.cli attach train ...
"""

import os
import signal
import subprocess
import sys
from types import FrameType

from staleflow.supervisor import lifeline
from staleflow.supervisor.launch import SAVING_S

SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Environment: seconds that ranks have to end when torchrun is asked to; else 30."""


def main() -> int:
    """Runs torchrun with the words of this process; returns its exit code."""
    lifeline.hold()
    environment = {SHUTDOWN: f"{SAVING_S:.0f}", **os.environ, lifeline.TORCHRUN: str(os.getpid())}
    torchrun = subprocess.Popen((sys.executable, "-m", "torch.distributed.run", *sys.argv[1:]), env=environment)

    def pass_on(number: int, frame: FrameType | None) -> None:
        torchrun.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    code = torchrun.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
