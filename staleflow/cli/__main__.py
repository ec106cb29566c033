"""``python -m staleflow.cli``: how the supervisor starts each role.

The process ends at once when its role has: everything is durable by then, and tearing down torch takes seconds of the
time in which a run must have ended.
"""

import os
import sys

from staleflow.cli.main import main

code = main()
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)
