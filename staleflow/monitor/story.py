"""The story of one group: every line of a trace about it, as a person would tell it.

``events_about`` looks at bytes before it decodes: most lines of a trace are about other groups.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from staleflow.configs.errors import ConfigError
from staleflow.monitor.words import amount, plural, span, worker_name
from staleflow.process.sanitize import all_printable
from staleflow.trace.reader import complaint, decoded

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """One line of the story."""

    after_s: float
    """Since the first."""
    event: str
    words: str
    tone: str = ""
    """good, bad or nothing."""


def events_about(path: Path, group: int) -> list[dict[str, Any]]:
    """Lines of the trace about ``group``, and of the batches that it was sealed in, in order; a rollback is one about
    the batches that it takes back.

    ``ConfigError`` when the file cannot be read, or a line that seems to be about the group is not an event. A last
    line without its end is being written: it is left out.
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
    batches: dict[int, int] = {}  # and their steps
    for raw in lines:
        of_batch = any(b'"batch":%d,' % batch in raw for batch in batches)
        back = bool(batches) and b'"ev":"rollback"' in raw
        if not of_batch and not back and not any(mark in raw for mark in marks):
            continue
        try:
            line = decoded(raw)
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
    """What ``events_about`` found, told."""
    told: list[Chapter] = []
    begun: Line | None = None
    mono_ns = unix_ns = 0
    after_s = 0.0
    for line in map(all_printable, events):
        begun = begun or line
        if told:  # a later incarnation may have another monotonic clock
            passed_ns = line["m"] - mono_ns if line["m"] >= mono_ns else max(line["t"] - unix_ns, 0)
            after_s += passed_ns / 1e9
        mono_ns, unix_ns = line["m"], line["t"]
        words, tone = _WORDS.get(line["ev"], _other)(line, group)
        told.append(Chapter(after_s=after_s, event=line["ev"], words=words, tone=tone))
    return tuple(told)


def headline(events: Iterable[Line], group: int) -> str:
    """The whole story in one sentence."""
    events = tuple(map(all_printable, events))
    if not events:
        return f"group {group}: the trace never mentions it"
    leases = sum(line["ev"] == "reserve" for line in events)
    trained = _trained(events)
    last = next((line for line in reversed(events) if line["ev"] not in ("deliver", "reject")), events[-1])
    whole_s = (events[-1]["t"] - events[0]["t"]) / 1e9
    if trained is not None:
        end = f"trained by step {trained}"
    elif last["ev"] in ("release", "drop"):
        end = f"{'given up' if last['ev'] == 'release' else 'dropped'}: {last['why']}"
    else:
        state = {"reserve": "being generated", "push": "in its stages", "occupy": "may train", "seal": "sealed"}
        state["rollback"] = state["occupy"]
        end = state.get(str(last["ev"]), str(last["ev"]))
    return f"group {group}: {end}, {plural(leases, 'lease')}, {span(whole_s)}"


def _trained(events: Iterable[Line]) -> int | None:
    """The step that trained the group, unless that was taken back, or it was lost later on."""
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


def _reserve(line: Line, _: int) -> tuple[str, str]:
    deadline = "" if line["deadline"] is None else f", to be trained by step {line['deadline']} at the latest"
    spare = ", as a spare" if line["spare"] else ""
    return f"leased to {_who(line)} at version {line['version']} (lease {line['lease']}){deadline}{spare}", ""


def _push(line: Line, _: int) -> tuple[str, str]:
    segments = line["segments"]
    tokens = sum(segment["tokens"] for segment in segments)
    parts = ", ".join(f"{segment['tokens']:,} of version {segment['version']}" for segment in segments)
    by = f": {parts}" if len(segments) > 1 else f" of version {segments[0]['version']}" if segments else ""
    cut = ", cut short" if line["truncated"] else ""
    where = f"{amount(line['bytes'])} at shard {line['shard']}"
    return f"{_who(line)} pushed {plural(tokens, 'token')}{by}{cut}; {where}", "good"


def _occupy(_: Line, __: int) -> tuple[str, str]:
    return "every stage is done: it may train", "good"


def _release(line: Line, _: int) -> tuple[str, str]:
    lost = f", {plural(line['tokens'], 'token')} thrown away" if line["tokens"] else ""
    return f"given up: {line['why']} (lease {line['lease']}){lost}", "bad"


def _drop(line: Line, _: int) -> tuple[str, str]:
    return f"dropped: {line['why']}, {plural(line['tokens'], 'token')} thrown away", "bad"


def _seal(line: Line, group: int) -> tuple[str, str]:
    version = next((member["version"] for member in line["members"] if member["group"] == group), line["step"])
    behind = plural(line["step"] - version, "version")
    return f"sealed for step {line['step']} in batch {line['batch']}, {behind} old", "good"


def _promote(line: Line, group: int) -> tuple[str, str]:
    if line["group"] == group:
        instead = f" instead of group {line['demoted']}" if line.get("demoted") is not None else ""
        return f"a spare no more: it is counted{instead}", "good"
    return f"a spare from now on: group {line['group']} was faster", ""


def _claim(line: Line, _: int) -> tuple[str, str]:
    return f"handed to the streaming trainer for step {line['step']}", "good"


def _unseal(line: Line, _: int) -> tuple[str, str]:
    return f"batch {line['batch']} is none any more: {line['why']}", "bad"


def _rollback(line: Line, _: int) -> tuple[str, str]:
    return f"rolled back to version {line['to_version']}: its batch is none any more", "bad"


def _deliver(line: Line, _: int) -> tuple[str, str]:
    again = f", attempt {line['attempt']}" if line["attempt"] > 1 else ""
    return f"batch {line['batch']} goes to rank {line['rank']} of the trainer{again}", ""


def _consume(line: Line, _: int) -> tuple[str, str]:
    return f"trained: step {line['step']} is done, version {line['step'] + 1} exists", "good"


def _reject(line: Line, _: int) -> tuple[str, str]:
    times = f", {line['count']} times" if line["count"] > 1 else ""
    return f"{_who(line)} was refused a {line['op']}: {line['code']}{times}", "bad"


def _other(line: Line, _: int) -> tuple[str, str]:
    return " ".join(f"{key} {line[key]}" for key in ("worker", "lease", "version", "why", "step") if key in line), ""


def _who(line: Line) -> str:
    return worker_name(str(line.get("worker", "")))


_WORDS: dict[str, Callable[[Line, int], tuple[str, str]]] = {
    "reserve": _reserve,
    "push": _push,
    "occupy": _occupy,
    "release": _release,
    "drop": _drop,
    "seal": _seal,
    "promote": _promote,
    "claim": _claim,
    "unseal": _unseal,
    "rollback": _rollback,
    "deliver": _deliver,
    "consume": _consume,
    "reject": _reject,
}
