"""``python -m staleflow.cli``: the command with which the supervisor starts each role.

The process calls ``os._exit`` when its role ends. Everything is durable by then, and the regular teardown of torch
takes seconds, which count against the time limit for ending a run.
"""

import os
import sys

from staleflow.cli.main import main

code = main()
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)
