"""How far a process is, by the progress bars that it prints: what libraries draw while they download or load. Pure."""

import re
from collections.abc import Sequence

_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_KNOWN = re.compile(
    r"(?P<what>.*?):?\s*(?P<share>\d{1,3})%(?: Completed)?\s*\|(?:.*\|)?\s*(?P<done>[^\s/]+)/(?P<full>[^\s\[]+)"
)
"""``model.safetensors:  34%|###   | 1.21G/3.55G [00:10<00:20, 110MB/s]``, as tqdm draws it."""
_OPEN = re.compile(r"(?P<what>.*?):?\s*(?P<done>\d[\d.]*[kKMGTP]?i?B?) \[\d+:\d\d, ")
"""The same where nobody knows how much there is: ``model.safetensors: 1.21GB [00:10, 110MB/s]``."""
_ANY = re.compile(r"\d%\||\d(\.\d+)?(it/s|s/it)\b|\?it/s")


def is_bar(line: str) -> bool:
    """Whether a line is one of a progress bar."""
    return bool(_ANY.search(line) or _KNOWN.match(line) or _OPEN.match(line))


def told(lines: Sequence[str]) -> str:
    """What the last line says if it is a bar that has not come to its end: ``model.safetensors, 34 %, 1.21G of 3.55G``;
    else nothing."""
    line = _ESCAPE.sub("", lines[-1]).strip() if lines else ""
    if found := _KNOWN.match(line):
        far = f"{found['share']} %, {found['done']} of {found['full']}"
        return "" if int(found["share"]) >= 100 else ", ".join(filter(None, (found["what"].strip(), far)))
    if found := _OPEN.match(line):
        return ", ".join(filter(None, (found["what"].strip(), f"{found['done']} so far")))
    return ""
