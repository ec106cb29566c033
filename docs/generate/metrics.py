"""The page of every number that a run writes down."""

from collections.abc import Iterator
from itertools import groupby

from docs.generate.made import MADE
from staleflow.metrics.names import METRICS, PLACES, prometheus

ABOUT = {
    "is_weight": "The importance weights of the step's tokens, trainer over engine.",
    "length": "In tokens.",
    "off_policy": "Ages in versions: the step, or the newest version, minus the oldest version of a group.",
    "perf": "What comes through.",
    "reward": "What the reward function said.",
    "rollout": "The engines, at the moment of the step's end.",
    "staleness": "The promise and its price.",
    "time": "Where the seconds of a step went.",
    "trainer": "The trainer.",
}


def metrics() -> Iterator[str]:
    yield "# Metrics"
    yield ""
    yield MADE
    yield ""
    yield "One line of `metrics.jsonl` a train step, in the run directory; the same names with `staleflow_` in front"
    yield "and `_` for `/` in Prometheus. A number that a step does not have is left out; every line has"
    yield f"{', '.join(f'`{name}`' for name in PLACES)}."
    yield "`staleflow explain off_policy/max` says what one is."
    yield ""
    for room, names in groupby(sorted(METRICS, key=lambda name: (_room(name), name)), key=_room):
        yield f"## `{room}/`" if room else "## Of the step"
        yield ""
        if room in ABOUT:
            yield ABOUT[room]
            yield ""
        yield "| metric | unit | | in Prometheus |"
        yield "|---|---|---|---|"
        for name in names:
            yield f"| `{name}` | {METRICS[name].unit} | {METRICS[name].meaning} | `{prometheus(name)}` |"
        yield ""


def _room(name: str) -> str:
    return name.partition("/")[0] if "/" in name else ""
