"""Noteworthy lines of a trace as a person would say them, with a tone: good, warn, bad or nothing."""

from collections.abc import Callable, Mapping
from typing import Any

from staleflow.monitor.words import amount, plural, worker_name
from staleflow.store.disk_errors import trouble

Line = Mapping[str, Any]


def told(line: Line) -> tuple[str, str]:
    """Words and tone of one line; a kind that is not known here is named as it is."""
    say = _WORDS.get(str(line.get("ev")))
    return (str(line.get("ev")), "") if say is None else say(line)


def _open(line: Line) -> tuple[str, str]:
    return f"the scheduler is up: bound {line['max_staleness']}, batches of {line['batch_size']}", "good"


def _auth(line: Line) -> tuple[str, str]:
    return f"{line['peer']} was turned away{_times(line)}: {line['why']}", "bad"


def _attach(line: Line) -> tuple[str, str]:
    return f"{_who(line)} attaches" + (f": {line['why']}" if line["why"] else ""), ""


def _detach(line: Line) -> tuple[str, str]:
    silent = line["why"] == "silent"
    return f"{_who(line)} {'is silent' if silent else 'leaves'}" + (
        f": {line['why']}" if line["why"] and not silent else ""
    ), "warn"


def _publish(line: Line) -> tuple[str, str]:
    return f"version {line['version']} is published, {amount(line['bytes'])}", "good"


def _pull(line: Line) -> tuple[str, str]:
    return f"{_who(line)} could not load version {line['version']}", "bad"


def _join(line: Line) -> tuple[str, str]:
    return (
        f"{worker_name(line['trainer'])} joins at version {line['checkpoint']['version']}, term {line['trainer_term']}",
        "",
    )


def _rollback(line: Line) -> tuple[str, str]:
    return f"rolled back to version {line['to_version']}: lineage {line['lineage']} begins", "bad"


def _release(line: Line) -> tuple[str, str]:
    return f"group {line['group']} is given up: {line['why']}", "warn"


def _drop(line: Line) -> tuple[str, str]:
    return f"group {line['group']} is dropped: {line['why']}, {plural(line['tokens'], 'token')}", "warn"


def _seal(line: Line) -> tuple[str, str]:
    masked = f", {line['masked_tokens']:,} masked" if line["masked_tokens"] else ""
    return f"step {line['step']} has its batch: {plural(line['tokens'], 'token')}{masked}", ""


def _unseal(line: Line) -> tuple[str, str]:
    return f"batch {line['batch']} is taken apart: {line['why']}", "bad"


def _checkpoint(line: Line) -> tuple[str, str]:
    return f"a checkpoint is safe; the oldest that is kept is of version {line['version']}", "good"


def _reject(line: Line) -> tuple[str, str]:
    return f"{_who(line)} was refused a {line['op']}{_times(line)}: {line['code']}", "warn"


def _overload(line: Line) -> tuple[str, str]:
    if line["on"]:
        return f"the {trouble(line['resource'])} ({100 * line['used']:.0f} % of the map used): new work waits", "bad"
    return "there is room again", "good"


def _close(line: Line) -> tuple[str, str]:
    return f"the scheduler closes: {line['why']}", ""


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
