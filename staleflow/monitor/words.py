"""Numbers as people read them."""

from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"
INSECURE = "INSECURE: bound beyond this machine without keys; anybody may read, change and end this run"


def clock(seconds: float) -> str:
    """1:02:03, or 2:03 below an hour."""
    minutes, rest = divmod(max(int(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(value: float | None, digits: int = 2) -> str:
    """A dash for what is not known yet."""
    return "-" if value is None else f"{value:,.{digits}f}"


def whole(value: float | None) -> str:
    """As ``number``, without digits after the point."""
    return number(value, 0)


def curve(values: Sequence[float], width: int) -> str:
    """The last ``width`` values as little bars, from the smallest to the largest of them."""
    shown = list(values)[-width:]
    if len(shown) < 2:
        return ""
    low, high = min(shown), max(shown)
    if high == low:
        return BARS[0] * len(shown)
    return "".join(BARS[round((value - low) / (high - low) * (len(BARS) - 1))] for value in shown)


def meter(parts: Sequence[int], full: int, width: int) -> list[int]:
    """Cells of each part of a bar of ``width`` cells that holds ``full``; never more than fit."""
    cells: list[int] = []
    used, counted = 0, 0
    for part in parts:
        counted += part
        upto = min(round(counted / max(full, 1) * width), width)
        cells.append(upto - used)
        used = upto
    return cells
