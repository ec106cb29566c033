"""Run torchrun for the ranks of one machine of several; torchrun and its ranks end together with the supervisor.

python -m staleflow.launch.ranks OPTIONS-OF-TORCHRUN -m staleflow.cli attach train ...
"""

import os
import signal
import subprocess
import sys
from types import FrameType

from staleflow.supervisor import lifeline
from staleflow.supervisor.launch import CHECKPOINT_DRAIN_TIMEOUT_S

SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Environment variable of torchrun: seconds that ranks have to exit after SIGTERM; torchrun's default is 30."""


def main() -> int:
    """Run torchrun with the arguments of this process and return its exit code."""
    lifeline.watch_supervisor()
    environment = {SHUTDOWN: f"{CHECKPOINT_DRAIN_TIMEOUT_S:.0f}", **os.environ, lifeline.TORCHRUN: str(os.getpid())}
    torchrun = subprocess.Popen((sys.executable, "-m", "torch.distributed.run", *sys.argv[1:]), env=environment)

    def forward(number: int, frame: FrameType | None) -> None:
        torchrun.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    code = torchrun.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
