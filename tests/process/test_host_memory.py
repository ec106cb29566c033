"""A process reuses the memory of large messages, so later messages cause few page faults."""

import subprocess
import sys

import pytest

_FAULTS = """
import resource
from staleflow.process.host import reuse_memory
{first}
def messages(count):
    for _ in range(count):
        [bytearray(FRAME) for _ in range(FRAMES)]
FRAME, FRAMES = 160 << 10, 64
messages(3)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
messages(10)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(first: str) -> int:
    """Page faults of ten messages of 64 frames of 160 KB, after a warm-up with similar messages."""
    told = subprocess.run([sys.executable, "-c", _FAULTS.format(first=first)], capture_output=True, check=True)
    return int(told.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="another allocator")
def test_what_large_messages_gave_back_is_used_again() -> None:
    assert faults("reuse_memory()") < 100
