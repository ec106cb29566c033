"""Audit hook for every process of a run whose PYTHONPATH has this folder: log each event that turns data into code.

Each event is one line in the file that AUDIT_TO names: the command's verb, the event, and the file and function that
caused it.
"""

import os
import sys

_EVENTS = frozenset({"pickle.find_class", "marshal.loads", "exec", "compile"})
_TO = os.open(os.environ["AUDIT_TO"], os.O_WRONLY | os.O_CREAT | os.O_APPEND) if "AUDIT_TO" in os.environ else -1


def _hook(event: str, _: object) -> None:
    if event not in _EVENTS:
        return
    try:
        code = sys._getframe(1).f_code  # pyright: ignore[reportPrivateUsage]
    except ValueError:  # no calling frame: the interpreter itself, for code of the command line
        return
    verb = "-".join(sys.orig_argv[3:6])
    os.write(_TO, f"{verb}\t{event}\t{code.co_filename}\t{code.co_name}\n".encode())


if _TO >= 0:
    sys.addaudithook(_hook)
