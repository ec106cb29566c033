"""What a run came to: from the metrics, the scheduler's last status and our own audit of the trace.

``summary.json`` in the run directory has these fields and nothing else.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from staleflow.configs.durable import write_durably
from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config
from staleflow.runtime.metric_lines import metric_lines
from staleflow.runtime.trace import read_events

LOST = ("aborted", "expired")
"""Releases of groups that failed or whose worker was lost; the others are policy."""
RUN = "staleflow run"


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The end of ``staleflow run``, as a table and as ``summary.json``."""

    name: str
    run_dir: str
    model: str = ""
    """Directory of the newest checkpoint, as ``save_pretrained`` writes it; empty while there is none."""
    outcome: str
    """finished, interrupted or failed."""
    error: str = ""
    steps: int = 0
    steps_wanted: int
    reward_start: float | None = None
    reward_end: float | None = None
    reward_of: str = "training groups"
    """What the two rewards are of: held-out prompts where there are any."""
    off_policy_mean: float | None = None
    off_policy_max: int | None = None
    """Consuming step minus oldest version, over every group trained."""
    max_staleness: int
    bound: str
    violations: int | None = None
    """Of the whole trace by our own audit; None when there is no trace."""
    tokens_trained: int = 0
    tokens_generated: int = 0
    tokens_per_s: float = 0.0
    """Trained, over this session's wall time from the first step on."""
    wall_s: float = 0.0
    """Of this session."""
    restarts: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    groups_lost: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """Groups whose worker or stage failed, by reason; they were generated again."""
    groups_filtered: int = 0
    failed_steps: int = 0
    """Steps whose loss or gradient was not finite."""

    @property
    def good(self) -> bool:
        return self.outcome == "finished" and not self.error and not self.violations


class Pace:
    """Tokens trained a second of this session, from the first weights on to the last step. Pure: time comes in."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None
        self._last = (0.0, 0)

    def see(self, status: Mapping[str, Any], now_s: float) -> None:
        """Takes in one status of the scheduler."""
        if int(status.get("version", -1)) < 0:
            return
        totals: Mapping[str, Any] = status.get("totals") or {}
        trained = int(totals.get("tokens_trained") or 0)
        self._first = self._first or (now_s, trained)
        if trained > self._last[1]:
            self._last = (now_s, trained)

    @property
    def tokens_per_s(self) -> float:
        if self._first is None or self._last[0] <= self._first[0]:
            return 0.0
        return (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])


def rewards(lines: Sequence[Mapping[str, Any]]) -> tuple[str, float | None, float | None]:
    """What is judged, and its mean reward at the start and at the end."""
    for key, what in (("reward/eval", "held-out prompts"), ("reward/mean", "training groups")):
        seen = [float(line[key]) for line in lines if line.get(key) is not None]
        if seen:
            return what, seen[0], seen[-1]
    return "training groups", None, None


class TraceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the summary takes from the trace."""

    ages: list[int] = msgspec.field(default_factory=list[int])
    """Versions between the oldest token and the step, of every group that was trained."""
    lost: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """Releases of groups that failed; what a worker that leaves gives back is lost if the run goes on after it."""
    steps: int = 0
    """Published and not rolled back."""
    tokens_trained: int = 0
    tokens_pushed: int = 0
    """Of those generated; a trace has no others."""
    filtered: int = 0

    def as_status(self) -> dict[str, Any]:
        """What the scheduler would have said, for a run that ended before it said anything."""
        totals = {
            "tokens_trained": self.tokens_trained,
            "tokens_generated": self.tokens_pushed,
            "releases": {"filtered": self.filtered},
        }
        return {"version": self.steps, "totals": totals}


def facts(events: Iterable[Mapping[str, Any]]) -> TraceFacts:
    """One pass over a trace."""
    sealed: dict[int, tuple[int, list[int]]] = {}
    steps = trained = pushed = filtered = 0
    ages: list[int] = []
    lost: Counter[str] = Counter()
    given_back: Counter[str] = Counter()
    holders: dict[int, str] = {}
    gone: set[str] = set()
    for event in events:
        match event["ev"]:
            case "attach":
                gone.discard(event["worker"])
            case "detach":
                gone.add(event["worker"])
            case "reserve":
                holders[event["group"]] = event["worker"]
            case "push":
                holders.pop(event["group"], None)
                pushed += sum(segment["tokens"] for segment in event["segments"])
            case "seal":
                of_batch = [event["step"] - member["version"] for member in event["members"]]
                sealed[event["batch"]] = event["tokens"] - event["masked_tokens"], of_batch
            case "consume":
                tokens, of_batch = sealed.pop(event["batch"], (0, []))
                trained += tokens
                ages += of_batch
                lost += given_back
                given_back.clear()
            case "publish":
                steps = event["version"]
            case "rollback":
                steps = event["to_version"]
            case "release":
                holder = holders.pop(event["group"], None)
                filtered += event["why"] == "filtered"
                if event["why"] in LOST:
                    (given_back if holder in gone else lost)[event["why"]] += 1
            case "close":
                given_back.clear()
            case _:
                pass
    return TraceFacts(
        ages=ages, lost=dict(lost), steps=steps, tokens_trained=trained, tokens_pushed=pushed, filtered=filtered
    )


def newest_model(run_dir: Path) -> Path | None:
    """The newest checkpoint, a model directory: one that is being written has another name until it is whole."""
    found = [
        path.parent for path in (run_dir / "checkpoints").glob("*/checkpoint.json") if path.parent.name.isdecimal()
    ]
    return max(found, key=lambda path: int(path.name), default=None)


def _of_trace(trace: Path) -> TraceFacts:
    """Nothing of one that is not there or is damaged: the audit says so, and the run has its summary all the same."""
    try:
        return facts(read_events(trace))
    except ConfigError:
        return TraceFacts()


def total(lines: Iterable[Mapping[str, Any]], key: str) -> float:
    """The last value of a running count."""
    seen = [float(line[key]) for line in lines if line.get(key) is not None]
    return seen[-1] if seen else 0.0


def summarise(
    config: Config,
    run_dir: Path,
    *,
    outcome: str,
    error: str,
    status: Mapping[str, Any],
    violations: int | None,
    wall_s: float,
    trained_per_s: float,
    restarts: Mapping[str, int],
) -> Summary:
    """Everything that is known about the run at its end."""
    lines = metric_lines(run_dir / "metrics.jsonl")
    what, start, end = rewards(lines)
    trace = _of_trace(run_dir / "trace.jsonl")
    status = status or trace.as_status()
    totals: Mapping[str, Any] = status.get("totals") or {}
    releases: Mapping[str, int] = totals.get("releases") or {}
    return Summary(
        name=config.name,
        run_dir=str(run_dir),
        model=str((config.trainer.backend != "simulated" and newest_model(run_dir)) or ""),
        outcome=outcome,
        error=error or str(status.get("error") or ""),
        steps=max(int(status.get("version") or 0), 0),
        steps_wanted=config.trainer.steps,
        reward_start=start,
        reward_end=end,
        reward_of=what,
        off_policy_mean=sum(trace.ages) / len(trace.ages) if trace.ages else None,
        off_policy_max=max(trace.ages, default=None),
        max_staleness=config.staleness.max_staleness,
        bound=config.staleness.bound.value,
        violations=violations,
        tokens_trained=int(totals.get("tokens_trained") or 0),
        tokens_generated=int(totals.get("tokens_generated") or 0),
        tokens_per_s=trained_per_s,
        wall_s=wall_s,
        restarts={name: count for name, count in restarts.items() if count},
        groups_lost=trace.lost,
        groups_filtered=int(releases.get("filtered", 0)),
        failed_steps=int(total(lines, "trainer/bad_steps")),
    )


def finished(run_dir: Path) -> Summary | None:
    """The summary of a run that has trained every step: there is nothing to resume."""
    found = read(run_dir)
    return found if found is not None and found.outcome == "finished" and found.steps >= found.steps_wanted else None


def how_to_go_on(done: Summary, config: Config, command: str = RUN) -> str:
    """What to say to somebody who wants more of a finished run. ``command``: any but ``staleflow run`` needs the
    configuration that the run was launched with, for the run's own says nothing of machines."""
    instead = " model.build= model.options={}" if config.model.build else ""
    model = f" model.path={done.model}{instead}" if done.model else ""
    told = f"this run is finished ({done.steps:,} of {done.steps_wanted:,} steps): {done.run_dir}"
    start = "a new run from its newest checkpoint" if model else "a new run"
    file = f"{done.run_dir}/config.toml" if command == RUN else "CONFIG"
    return f"{told}. For more steps begin {start}: {command} {file} trainer.steps=N{model}"


def write(summary: Summary, run_dir: Path) -> None:
    """``summary.json``, for scripts."""
    data = msgspec.json.format(msgspec.json.encode(summary), indent=2)
    write_durably(run_dir / "summary.json", data + b"\n")


def forget(run_dir: Path) -> None:
    """The run goes on: what it came to before is not what it comes to."""
    (run_dir / "summary.json").unlink(missing_ok=True)


def read(run_dir: Path) -> Summary | None:
    """The summary of a run that has ended, if it has one."""
    try:
        return msgspec.json.decode((run_dir / "summary.json").read_bytes(), type=Summary)
    except (FileNotFoundError, msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
