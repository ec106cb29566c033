"""Describe notable events of a trace in words, with a tone: good, warn, bad or none."""

from collections.abc import Callable, Mapping
from typing import Any

from staleflow.monitor.words import amount, plural, worker_name
from staleflow.store.disk_errors import trouble

Line = Mapping[str, Any]


def describe(line: Line) -> tuple[str, str]:
    """Return the words and the tone for one event; an event of an unknown kind is described by its name."""
    describe_kind = _WORDS.get(str(line.get("ev")))
    return (str(line.get("ev")), "") if describe_kind is None else describe_kind(line)


def _open(line: Line) -> tuple[str, str]:
    return f"scheduler started: bound {line['max_staleness']}, batches of {line['batch_size']}", "good"


def _auth(line: Line) -> tuple[str, str]:
    return f"{line['peer']} was rejected{_times(line)}: {line['why']}", "bad"


def _attach(line: Line) -> tuple[str, str]:
    return f"{_who(line)} attached" + (f": {line['why']}" if line["why"] else ""), ""


def _detach(line: Line) -> tuple[str, str]:
    silent = line["why"] == "silent"
    return f"{_who(line)} {'is silent' if silent else 'left'}" + (
        f": {line['why']}" if line["why"] and not silent else ""
    ), "warn"


def _publish(line: Line) -> tuple[str, str]:
    return f"version {line['version']} published, {amount(line['bytes'])}", "good"


def _pull(line: Line) -> tuple[str, str]:
    return f"{_who(line)} could not load version {line['version']}", "bad"


def _join(line: Line) -> tuple[str, str]:
    version, term = line["checkpoint"]["version"], line["trainer_term"]
    return (
        f"{worker_name(line['trainer'])} joined at version {version}, term {term}",
        "",
    )


def _rollback(line: Line) -> tuple[str, str]:
    return f"rolled back to version {line['to_version']}: lineage {line['lineage']} starts", "bad"


def _release(line: Line) -> tuple[str, str]:
    return f"group {line['group']} released: {line['why']}", "warn"


def _drop(line: Line) -> tuple[str, str]:
    return f"group {line['group']} dropped: {line['why']}, {plural(line['tokens'], 'token')}", "warn"


def _seal(line: Line) -> tuple[str, str]:
    masked = f", {line['masked_tokens']:,} masked" if line["masked_tokens"] else ""
    return f"batch of step {line['step']} sealed: {plural(line['tokens'], 'token')}{masked}", ""


def _unseal(line: Line) -> tuple[str, str]:
    return f"batch {line['batch']} unsealed: {line['why']}", "bad"


def _checkpoint(line: Line) -> tuple[str, str]:
    return f"checkpoint saved; the oldest kept one is version {line['version']}", "good"


def _reject(line: Line) -> tuple[str, str]:
    return f"{_who(line)}: {line['op']} rejected{_times(line)}: {line['code']}", "warn"


def _overload(line: Line) -> tuple[str, str]:
    if line["on"]:
        return f"the {trouble(line['resource'])} ({100 * line['used']:.0f} % of the map used): new work waits", "bad"
    return "space is available again", "good"


def _close(line: Line) -> tuple[str, str]:
    return f"the scheduler closed the trace: {line['why']}", ""


def _times(line: Line) -> str:
    return f", {line['count']} times" if line["count"] > 1 else ""


def _who(line: Line) -> str:
    return worker_name(str(line["worker"]))


_WORDS: dict[str, Callable[[Line], tuple[str, str]]] = {
    "open": _open,
    "auth": _auth,
    "attach": _attach,
    "detach": _detach,
    "publish": _publish,
    "pull": _pull,
    "join": _join,
    "rollback": _rollback,
    "release": _release,
    "drop": _drop,
    "seal": _seal,
    "unseal": _unseal,
    "checkpoint": _checkpoint,
    "reject": _reject,
    "overload": _overload,
    "close": _close,
}
