"""torchrun for the ranks of one machine of several, as a child of a supervisor: it ends when its supervisor does.

python -m staleflow.launch.ranks OPTIONS-OF-TORCHRUN -m staleflow.cli attach train ...
"""

import signal
import subprocess
import sys
from types import FrameType

from staleflow.supervisor import lifeline


def main() -> int:
    """Runs torchrun with the words of this process; returns its exit code."""
    lifeline.hold()
    torchrun = subprocess.Popen((sys.executable, "-m", "torch.distributed.run", *sys.argv[1:]))

    def pass_on(number: int, frame: FrameType | None) -> None:
        torchrun.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    code = torchrun.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
