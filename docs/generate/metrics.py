"""The metrics reference: one row for each metric."""

from collections.abc import Iterator
from itertools import groupby

from docs.generate.made import MADE
from staleflow.metrics.names import FAMILIES, METRICS, PLACES, prometheus

ABOUT = {
    "is_weight": "The importance weights of the step's tokens, trainer over engine.",
    "length": "Lengths, in tokens.",
    "off_policy": "Ages in versions: the step, or the newest version, minus the oldest version of a group.",
    "perf": "Throughput.",
    "reward": "Results of the reward function.",
    "router": "The router of a mixture of experts.",
    "rollout": "State of the engines at the end of the step.",
    "staleness": "The staleness bound and its cost.",
    "time": "Time spent in each part of a step.",
    "trainer": "State of the trainer.",
}


def metrics() -> Iterator[str]:
    yield "# Metrics"
    yield ""
    yield MADE
    yield ""
    yield "`metrics.jsonl` in the run directory has one line for each train step. Prometheus has the same names with"
    yield "the prefix `staleflow_` and `_` instead of `/`. A step omits metrics that it does not have; every line has"
    yield f"{', '.join(f'`{name}`' for name in PLACES)}."
    yield "`staleflow explain NAME` describes a metric, for example `staleflow explain off_policy/max`."
    yield ""
    for group, names in groupby(sorted(METRICS, key=lambda name: (_prefix(name), name)), key=_prefix):
        yield f"## `{group}/`" if group else "## Step"
        yield ""
        if group in ABOUT:
            yield ABOUT[group]
            yield ""
        yield "| metric | unit | | in Prometheus |"
        yield "|---|---|---|---|"
        for name in names:
            yield f"| `{name}` | {METRICS[name].unit} | {METRICS[name].meaning} | `{prometheus(name)}` |"
        yield ""
    yield "## Names of your own"
    yield ""
    yield "| metric | |"
    yield "|---|---|"
    for name, metric in FAMILIES.items():
        yield f"| `{name}` | {metric.meaning} |"
    yield ""


def _prefix(name: str) -> str:
    return name.partition("/")[0] if "/" in name else ""
