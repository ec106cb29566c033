"""Describe notable events of a trace in words, with a tone: good, warn, bad or none."""

from collections.abc import Mapping
from typing import Any

from staleflow.monitor.words import amount, plural, worker_name
from staleflow.store.disk_errors import trouble

Line = Mapping[str, Any]


def describe(line: Line) -> tuple[str, str]:
    """Return the words and the tone for one event; an event of an unknown kind is described by its name."""
    why = line.get("why", "")
    match line.get("ev"):
        case "open":
            return f"scheduler started: bound {line['max_staleness']}, batches of {line['batch_size']}", "good"
        case "auth":
            return f"{line['peer']} was rejected{_times(line)}: {why}", "bad"
        case "attach":
            return f"{_who(line)} attached" + (f": {why}" if why else ""), ""
        case "detach" if why == "silent":
            return f"{_who(line)} is silent", "warn"
        case "detach":
            return f"{_who(line)} left" + (f": {why}" if why else ""), "warn"
        case "publish":
            return f"version {line['version']} published, {amount(line['bytes'])}", "good"
        case "pull":
            return f"{_who(line)} could not load version {line['version']}", "bad"
        case "join":
            version, term = line["checkpoint"]["version"], line["trainer_term"]
            return f"{worker_name(line['trainer'])} joined at version {version}, term {term}", ""
        case "rollback":
            return f"rolled back to version {line['to_version']}: lineage {line['lineage']} starts", "bad"
        case "release":
            return f"group {line['group']} released: {why}", "warn"
        case "drop":
            return f"group {line['group']} dropped: {why}, {plural(line['tokens'], 'token')}", "warn"
        case "seal":
            masked = f", {line['masked_tokens']:,} masked" if line["masked_tokens"] else ""
            return f"batch of step {line['step']} sealed: {plural(line['tokens'], 'token')}{masked}", ""
        case "unseal":
            return f"batch {line['batch']} unsealed: {why}", "bad"
        case "checkpoint":
            return f"checkpoint saved; the oldest kept one is version {line['version']}", "good"
        case "reject":
            return f"{_who(line)}: {line['op']} rejected{_times(line)}: {line['code']}", "warn"
        case "overload" if line["on"]:
            used = f"{100 * line['used']:.0f} % of the map used"
            return f"the {trouble(line['resource'])} ({used}): new work waits", "bad"
        case "overload":
            return "space is available again", "good"
        case "close":
            return f"the scheduler closed the trace: {why}", ""
        case other:
            return str(other), ""


def _times(line: Line) -> str:
    return f", {line['count']} times" if line["count"] > 1 else ""


def _who(line: Line) -> str:
    return worker_name(str(line["worker"]))
