"""Parse the progress bars that libraries print while they download or load. No IO."""

import re
from collections.abc import Sequence

_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_BAR_WITH_TOTAL = re.compile(
    r"(?P<what>.*?):?\s*(?P<share>\d{1,3})%(?: Completed)?\s*\|(?:.*\|)?\s*(?P<done>[^\s/]+)/(?P<full>[^\s\[]+)"
)
"""``model.safetensors:  34%|###   | 1.21G/3.55G [00:10<00:20, 110MB/s]``, as tqdm draws it."""
_BAR_WITHOUT_TOTAL = re.compile(r"(?P<what>.*?):?\s*(?P<done>\d[\d.]*[kKMGTP]?i?B?) \[\d+:\d\d, ")
"""The same for an unknown total: ``model.safetensors: 1.21GB [00:10, 110MB/s]``."""
_ANY_BAR = re.compile(r"\d%\||\d(\.\d+)?(it/s|s/it)\b|\?it/s")


def is_bar(line: str) -> bool:
    """Return whether a line belongs to a progress bar."""
    return bool(_ANY_BAR.search(line) or _BAR_WITH_TOTAL.match(line) or _BAR_WITHOUT_TOTAL.match(line))


def progress(lines: Sequence[str]) -> str:
    """Return the progress in the last line, such as ``model.safetensors, 34 %, 1.21G of 3.55G``.

    Return an empty string if the line is no progress bar, or if the bar is complete.
    """
    line = _ESCAPE.sub("", lines[-1]).strip() if lines else ""
    if match := _BAR_WITH_TOTAL.match(line):
        far = f"{match['share']} %, {match['done']} of {match['full']}"
        return "" if int(match["share"]) >= 100 else ", ".join(filter(None, (match["what"].strip(), far)))
    if match := _BAR_WITHOUT_TOTAL.match(line):
        return ", ".join(filter(None, (match["what"].strip(), f"{match['done']} so far")))
    return ""
