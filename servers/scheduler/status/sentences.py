"""Sentences that explain what a step waits for. Pure functions: a replay of the trace produces the same sentences."""

from collections.abc import Mapping, Sequence

from staleflow.protocols.wire.messages.status import Hold, Pin

MAX_NAMED = 2
"""Maximum number of groups or workers named in a sentence; the others are counted."""


def restricted(holds: Mapping[str, Hold]) -> str:
    """Name the first restricted instance with its reason, and count the others."""
    name, first = next(iter(holds.items()))
    limit = f"on hold for {seconds(first.held_s)}" if first.held_s else "limited to one group at a time"
    others = f" ({len(holds) - 1} more instances are restricted)" if len(holds) > 1 else ""
    return f"{name} is {limit}: its last {first.groups} groups failed: {first.detail}{others}"


def silent(name: str, silent_s: float, waits: str) -> str:
    """Explain that process ``name`` is silent. ``waits``: the consequence."""
    return f"{name} has been silent for {seconds(silent_s)}: {waits}"


def restarted(name: str, restarts: int, within_s: float) -> str:
    """Explain that the trainer ``name`` is in a crash loop."""
    return f"{name} was restarted {restarts} times in the last {seconds(within_s)}; its log has the reason"


def pinned(step: int, pins: Sequence[Pin], count: int, policy: str) -> str:
    """Explain that ``step`` has enough groups but waits for older ones: which, where, for how long, and the policy.

    ``pins``: the first of ``count`` pinning groups, at least one.
    """
    return f"step {step} waits for {_groups(pins, count)}, {_where(pins)}{_time(pins)}; policy: {policy}"


def starved(step: int, need: int, counts: Mapping[str, int], left_s: float | None = None) -> str:
    """Explain that ``step`` has too few groups. ``counts``: groups by state; ``left_s``: estimated seconds left."""
    parts = f"{_are(counts['leased'])} being generated, {_are(counts['pushed'])} in stages"
    parts += "" if left_s is None else f", about {seconds(left_s)} left"
    streamed = f" ({counts['claimed']} with the trainer)" if counts.get("claimed") else ""
    return f"step {step} waits for groups: {min(counts['occupied'], need)} of {need} are ready{streamed}, {parts}"


def seconds(value: float) -> str:
    """Format a duration for people: 20 s, 3 min or 2.5 h."""
    if value < 90:
        return f"{max(round(value), 1)} s"
    return f"{value / 60:.0f} min" if value < 5400 else f"{value / 3600:.1f} h"


def _are(count: int) -> str:
    return "1 is" if count == 1 else f"{count} are"


def _groups(pins: Sequence[Pin], count: int) -> str:
    low, high = min(pin.version for pin in pins), max(pin.version for pin in pins)
    of = f"of version {low}" if low == high else f"of versions {low} to {high}"
    if count == 1:
        return f"group {pins[0].group} {of}"
    return f"{count} groups {of} ({_some([str(pin.group) for pin in pins], count)})"


def _where(pins: Sequence[Pin]) -> str:
    places: list[str] = []
    if workers := list(dict.fromkeys(pin.worker for pin in pins if pin.worker)):
        lost = [pin.lost_within_s for pin in pins if pin.lost_within_s is not None]
        silent = f", which is silent: its lease ends within {lost[0]:g} s" if lost and len(workers) == 1 else ""
        places.append(f"on {_some(workers)}{silent}")
    if staged := [pin for pin in pins if not pin.worker]:
        stages = list(dict.fromkeys(stage for pin in staged for stage in pin.stages))
        places.append(f"in the stage{'s' if len(stages) > 1 else ''} {_some(stages)}" if stages else "in stages")
    return " and ".join(places)


def _time(pins: Sequence[Pin]) -> str:
    """Describe the remaining or elapsed time of the slowest group, which decides when the step can be sealed."""
    if any(pin.lost_within_s is not None for pin in pins):
        return ""
    left = [pin.left_s for pin in pins if pin.left_s is not None]
    if len(left) == len(pins):
        return f", about {seconds(max(left))} left"
    so_far = [pin.so_far_s for pin in pins if pin.so_far_s is not None and pin.so_far_s >= 1]
    return f", for {seconds(max(so_far))} so far" if so_far else ""


def _some(names: Sequence[str], count: int = 0) -> str:
    """Join the first names and count the rest. ``count``: total number, if larger than ``len(names)``."""
    count = max(count, len(names))
    if count <= MAX_NAMED:
        return " and ".join(names)
    return f"{', '.join(names[:MAX_NAMED])} and {count - MAX_NAMED} more"
