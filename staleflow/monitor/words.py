"""Format numbers, durations and sizes for people."""

import math
from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"
INSECURE = "INSECURE: bound beyond this machine without keys; any host can read, change and stop this run"


def clock(seconds: float) -> str:
    """Format seconds as 1:02:03, or as 2:03 below an hour."""
    minutes, rest = divmod(max(int(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(value: float | None, digits: int = 2) -> str:
    """Format a number; None becomes a dash."""
    return "-" if value is None else f"{value:,.{digits}f}"


def whole(value: float | None) -> str:
    """Format a number without decimals; None becomes a dash."""
    return number(value, 0)


def curve(values: Sequence[float], width: int) -> str:
    """Draw the last ``width`` finite values as bars, scaled between their minimum and maximum."""
    shown = [value for value in values if math.isfinite(value)][-width:]
    if len(shown) < 2:
        return ""
    low, high = min(shown), max(shown)
    if high == low:
        return BARS[0] * len(shown)
    return "".join(BARS[round((value - low) / (high - low) * (len(BARS) - 1))] for value in shown)


def meter(parts: Sequence[int], full: int, width: int) -> list[int]:
    """Return the cells of each part in a stacked bar of ``width`` cells for ``full``; the sum is at most ``width``."""
    cells: list[int] = []
    used, counted = 0, 0
    for part in parts:
        counted += part
        upto = min(round(counted / max(full, 1) * width), width)
        cells.append(upto - used)
        used = upto
    return cells


def plural(count: int, noun: str) -> str:
    """Format a count with its noun: 1 group, 2,345 groups."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def worker_name(worker: str) -> str:
    """Return the name of a worker without the nonce of its process, which changes at each restart."""
    return worker.rpartition(".")[0] or worker


def amount(nbytes: float) -> str:
    """Format bytes: 512 B, 12.3 KB, 4.0 GB."""
    for unit in ("B", "KB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def short(value: float | None) -> str:
    """Format a number in at most five characters: 7, 950, 1.2k, 34k, 5.6M."""
    if value is None:
        return "-"
    for unit in ("", "k", "M", "G"):
        if abs(value) < 999.5:
            return f"{value:.1f}{unit}" if unit and abs(value) < 9.95 else f"{value:.0f}{unit}"
        value /= 1000
    return f"{value:.0f}T"


def percent(share: float | None) -> str:
    """Format a share from 0 to 1 as a percentage."""
    return "-" if share is None else f"{100 * share:.0f} %"


def span(seconds: float) -> str:
    """Format a duration: 0.42 s, 12.3 s, 4:05."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    return f"{seconds:.1f} s" if seconds < 100 else clock(seconds)


def bar(value: float, full: float, width: int) -> str:
    """Draw ``value`` of ``full`` as a bar of at most ``width`` cells; at least an eighth if above 0."""
    if value <= 0 or full <= 0 or width <= 0:
        return ""
    eighths = max(min(round(value / full * width * 8), width * 8), 1)
    whole_cells, rest = divmod(eighths, 8)
    return "█" * whole_cells + (" ▏▎▍▌▋▊▉"[rest] if rest else "")
