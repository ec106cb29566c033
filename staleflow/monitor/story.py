"""The story of one group: every event of a trace that concerns it, described in words.

``events_about`` searches the raw bytes before it decodes a line, because most lines concern other groups.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from staleflow.configs.errors import ConfigError
from staleflow.monitor.words import amount, plural, span, worker_name
from staleflow.process.sanitize import all_printable
from staleflow.trace.reader import as_written, complaint

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """One event of the story."""

    after_s: float
    """Seconds since the first event."""
    event: str
    words: str
    tone: str = ""
    """good, bad, or empty."""


def events_about(path: Path, group: int) -> list[dict[str, Any]]:
    """Return the events about ``group`` and about the batches that contained it, in order.

    These include rollbacks that revoked such a batch. A last line without a newline is still being written and is
    skipped. Raise ``ConfigError`` if the file cannot be read, or if a line that mentions the group is no event.
    """
    try:
        with path.open("rb") as file:
            return list(_about(file, group))
    except msgspec.DecodeError as error:
        raise ConfigError("trace", str(path), f"a line {complaint(error)}") from error
    except OSError as error:
        raise ConfigError("trace", str(path), f"it cannot be read: {error.strerror}") from error


def _about(lines: Iterable[bytes], group: int) -> Iterator[dict[str, Any]]:
    marks = [b'"group":%d%b' % (group, end) for end in (b",", b"}")]
    marks.append(b'"demoted":%d,' % group)
    batches: dict[int, int] = {}  # batch -> step
    for raw in lines:
        of_batch = any(b'"batch":%d,' % batch in raw for batch in batches)
        back = bool(batches) and b'"ev":"rollback"' in raw
        if not of_batch and not back and not any(mark in raw for mark in marks):
            continue
        try:
            line = as_written(raw)
        except msgspec.DecodeError:
            if raw.endswith(b"\n"):
                raise
            return
        members = [member["group"] for member in line["members"]] if line["ev"] == "seal" else []
        if group in members:
            batches[line["batch"]] = line["step"]
        elif line["ev"] == "rollback" and line["to_version"] <= max(batches.values(), default=-1):
            batches = {batch: step for batch, step in batches.items() if step < line["to_version"]}
        elif not of_batch and group not in (line.get("group"), line.get("demoted")):
            continue
        yield line


def story(events: Iterable[Line], group: int) -> tuple[Chapter, ...]:
    """Describe the events that ``events_about`` returned."""
    chapters: list[Chapter] = []
    first: Line | None = None
    mono_ns = unix_ns = 0
    after_s = 0.0
    for line in map(all_printable, events):
        first = first or line
        if chapters:  # the monotonic clock may differ between incarnations of the scheduler
            passed_ns = line["m"] - mono_ns if line["m"] >= mono_ns else max(line["t"] - unix_ns, 0)
            after_s += passed_ns / 1e9
        mono_ns, unix_ns = line["m"], line["t"]
        words, tone = _described(line, group)
        chapters.append(Chapter(after_s=after_s, event=line["ev"], words=words, tone=tone))
    return tuple(chapters)


def headline(events: Iterable[Line], group: int) -> str:
    """Return a one-line summary of the story."""
    events = tuple(map(all_printable, events))
    if not events:
        return f"group {group}: the trace does not contain it"
    leases = sum(line["ev"] == "reserve" for line in events)
    trained = _trained(events)
    last = next((line for line in reversed(events) if line["ev"] not in ("deliver", "reject")), events[-1])
    whole_s = (events[-1]["t"] - events[0]["t"]) / 1e9
    if trained is not None:
        end = f"trained by step {trained}"
    elif last["ev"] in ("release", "drop"):
        end = f"{'released' if last['ev'] == 'release' else 'dropped'}: {last['why']}"
    else:
        state = {"reserve": "being generated", "push": "in its stages", "occupy": "ready to train", "seal": "sealed"}
        state["rollback"] = state["occupy"]
        end = state.get(str(last["ev"]), str(last["ev"]))
    return f"group {group}: {end}, {plural(leases, 'lease')}, {span(whole_s)}"


def _trained(events: Iterable[Line]) -> int | None:
    """Return the step that trained the group; None if that step was rolled back or the group was lost afterwards."""
    trained: int | None = None
    for line in events:
        match line["ev"]:
            case "consume":
                trained = line["step"]
            case "rollback" if trained is not None and line["to_version"] > trained:
                pass
            case "rollback" | "release" | "drop":
                trained = None
            case _:
                pass
    return trained


def _described(line: Line, group: int) -> tuple[str, str]:
    """Return the words and the tone for an event about ``group``."""
    who, why = worker_name(str(line.get("worker", ""))), line.get("why", "")
    match line["ev"]:
        case "reserve":
            deadline = "" if line["deadline"] is None else f", deadline step {line['deadline']}"
            spare = ", as a spare" if line["spare"] else ""
            return f"leased to {who} at version {line['version']} (lease {line['lease']}){deadline}{spare}", ""
        case "push":
            return f"{who} pushed {_pushed(line)}", "good"
        case "occupy":
            return "all stages finished: ready to train", "good"
        case "release":
            lost = f", {plural(line['tokens'], 'token')} discarded" if line["tokens"] else ""
            return f"released: {why} (lease {line['lease']}){lost}", "bad"
        case "drop":
            return f"dropped: {why}, {plural(line['tokens'], 'token')} discarded", "bad"
        case "seal":
            version = next((member["version"] for member in line["members"] if member["group"] == group), line["step"])
            behind = plural(line["step"] - version, "version")
            return f"sealed for step {line['step']} in batch {line['batch']}, {behind} old", "good"
        case "promote" if line["group"] == group:
            instead = f" instead of group {line['demoted']}" if line.get("demoted") is not None else ""
            return f"promoted from spare to counted group{instead}", "good"
        case "promote":
            return f"demoted to spare: group {line['group']} was faster", ""
        case "claim":
            return f"handed to the streaming trainer for step {line['step']}", "good"
        case "unseal":
            return f"batch {line['batch']} unsealed: {why}", "bad"
        case "rollback":
            return f"rolled back to version {line['to_version']}: its batch is void", "bad"
        case "deliver":
            attempt = f", attempt {line['attempt']}" if line["attempt"] > 1 else ""
            return f"batch {line['batch']} delivered to rank {line['rank']} of the trainer{attempt}", ""
        case "consume":
            return f"trained: step {line['step']} is done, version {line['step'] + 1} exists", "good"
        case "reject":
            times = f", {line['count']} times" if line["count"] > 1 else ""
            return f"{line['op']} of {who} rejected: {line['code']}{times}", "bad"
        case _:
            facts = (f"{key} {line[key]}" for key in ("worker", "lease", "version", "why", "step") if key in line)
            return " ".join(facts), ""


def _pushed(line: Line) -> str:
    """Describe a push: its tokens by version, its size and its shard."""
    segments = line["segments"]
    tokens = sum(segment["tokens"] for segment in segments)
    parts = ", ".join(f"{segment['tokens']:,} of version {segment['version']}" for segment in segments)
    by = f": {parts}" if len(segments) > 1 else f" of version {segments[0]['version']}" if segments else ""
    cut = ", cut short" if line["truncated"] else ""
    return f"{plural(tokens, 'token')}{by}{cut}; {amount(line['bytes'])} at shard {line['shard']}"
