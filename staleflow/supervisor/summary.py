"""What a run came to: from the metrics, the scheduler's last status and our own audit of the trace.

``summary.json`` in the run directory has these fields and nothing else.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from staleflow.configs.durable_files import write_durably
from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config
from staleflow.metrics.reader import metric_lines
from staleflow.trace.running_time import timed
from staleflow.trace.writer import read_events

LOST = ("aborted", "expired")
"""Releases of groups that failed or whose worker was lost; the others are policy."""
RUN = "staleflow run"
TRACE = "trace.jsonl"
ENDED_WELL = ("finished", "drained")
"""Outcomes that nothing went wrong with; a drained run is resumed."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The end of ``staleflow run``, as a table and as ``summary.json``."""

    name: str
    run_dir: str
    model: str = ""
    """Directory of the newest checkpoint, as ``save_pretrained`` writes it; empty while there is none."""
    outcome: str
    """finished, drained, interrupted or failed."""
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
    """Trained tokens over the running time from the first published version to the last consumed step."""
    wall_s: float = 0.0
    """Running time of all sessions: seconds during which a scheduler served the run."""
    restarts: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    groups_lost: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """Groups whose worker or stage failed, by reason; they were generated again."""
    groups_filtered: int = 0
    failed_steps: int = 0
    """Steps whose loss or gradient was not finite."""
    resume: str = ""
    """The command that continues the run; empty for a finished run, and after a process refused its configuration (exit
    code 2), which a run that is resumed keeps."""

    @property
    def good(self) -> bool:
        return self.outcome in ENDED_WELL and not self.error and not self.violations


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
    """Versions between the oldest token and the step, for every trained group whose step was not rolled back."""
    lost: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """Releases of groups that failed; what a worker that leaves gives back is lost if the run goes on after it."""
    steps: int = 0
    """Published and not rolled back."""
    tokens_trained: int = 0
    """Tokens of the steps that were not rolled back."""
    tokens_pushed: int = 0
    """Of those generated; a trace has no others."""
    filtered: int = 0
    wall_s: float = 0.0
    working_s: float = 0.0
    """From the first published version to the last consumed step."""
    closed: bool = False
    """Its last line is ``close``."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_trained / self.working_s if self.working_s > 0 else 0.0


def facts(events: Iterable[Mapping[str, Any]]) -> TraceFacts:
    """One pass over a trace."""
    sealed: dict[int, tuple[int, int, list[int]]] = {}
    trained: dict[int, tuple[float, int, list[int]]] = {}
    """By step: when it was consumed, its tokens and the ages of its groups."""
    steps = pushed = filtered = 0
    now_s = 0.0
    published_s: float | None = None
    lost: Counter[str] = Counter()
    given_back: Counter[str] = Counter()
    holders: dict[int, str] = {}
    gone: set[str] = set()
    closed = False
    for now_s, event in timed(events):
        closed = event["ev"] == "close"
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
                sealed[event["batch"]] = event["step"], event["tokens"] - event["masked_tokens"], of_batch
            case "consume":
                if (batch := sealed.pop(event["batch"], None)) is not None:
                    trained[batch[0]] = now_s, batch[1], batch[2]
                lost += given_back
                given_back.clear()
            case "publish":
                steps = event["version"]
                published_s = now_s if published_s is None else published_s
            case "rollback":
                steps = event["to_version"]
                for step in [step for step in trained if step >= steps]:
                    del trained[step]
            case "release":
                holder = holders.pop(event["group"], None)
                filtered += event["why"] == "filtered"
                if event["why"] in LOST:
                    (given_back if holder in gone else lost)[event["why"]] += 1
            case "close":
                given_back.clear()
            case _:
                pass
    last_s = max((at_s for at_s, _, _ in trained.values()), default=0.0)
    return TraceFacts(
        ages=[age for _, _, ages in trained.values() for age in ages],
        lost=dict(lost),
        steps=steps,
        tokens_trained=sum(tokens for _, tokens, _ in trained.values()),
        tokens_pushed=pushed,
        filtered=filtered,
        wall_s=now_s,
        working_s=max(last_s - (published_s or 0.0), 0.0),
        closed=closed,
    )


def ended(status: Mapping[str, Any]) -> str:
    """The outcome by the scheduler's status: failed, drained or finished; empty before the trainer reported its end."""
    if not status.get("finished"):
        return ""
    if status.get("error"):
        return "failed"
    early = int(status.get("version") or 0) < int(status.get("steps") or 0)
    return "drained" if status.get("drained") and early else "finished"


def newest_model(run_dir: Path) -> Path | None:
    """The newest checkpoint, a model directory: one that is being written has another name until it is whole."""
    found = [
        path.parent for path in (run_dir / "checkpoints").glob("*/checkpoint.json") if path.parent.name.isdecimal()
    ]
    return max(found, key=lambda path: int(path.name), default=None)


def of_trace(trace: Path, status: Mapping[str, Any] | None = None) -> TraceFacts:
    """Read the facts of a trace. Without a trace that can be read, return what ``status`` has of them."""
    try:
        return facts(read_events(trace))
    except ConfigError:
        status = status or {}
        totals: Mapping[str, Any] = status.get("totals") or {}
        releases: Mapping[str, int] = totals.get("releases") or {}
        return TraceFacts(
            steps=max(int(status.get("version") or 0), 0),
            tokens_trained=int(totals.get("tokens_trained") or 0),
            filtered=int(releases.get("filtered", 0)),
            wall_s=float(status.get("run_s") or 0.0),
        )


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
    restarts: Mapping[str, int],
    resume: str = "",
) -> Summary:
    """Return everything that is known about the run at its end.

    Steps, tokens and times come from the trace, like those of the report. ``status`` is the scheduler's last answer; it
    may be older than the trace by the steps that were trained while the run drained.
    """
    lines = metric_lines(run_dir / "metrics.jsonl")
    what, start, end = rewards(lines)
    trace = of_trace(run_dir / TRACE, status)
    totals: Mapping[str, Any] = status.get("totals") or {}
    return Summary(
        name=config.name,
        run_dir=str(run_dir),
        model=str((config.trainer.backend != "simulated" and newest_model(run_dir)) or ""),
        outcome=outcome,
        error=error or str(status.get("error") or ""),
        steps=trace.steps,
        steps_wanted=config.trainer.steps,
        reward_start=start,
        reward_end=end,
        reward_of=what,
        off_policy_mean=sum(trace.ages) / len(trace.ages) if trace.ages else None,
        off_policy_max=max(trace.ages, default=None),
        max_staleness=config.staleness.max_staleness,
        bound=config.staleness.bound.value,
        violations=violations,
        tokens_trained=trace.tokens_trained,
        tokens_generated=max(int(totals.get("tokens_generated") or 0), trace.tokens_pushed),
        tokens_per_s=trace.tokens_per_s,
        wall_s=trace.wall_s,
        restarts={name: count for name, count in restarts.items() if count},
        groups_lost=trace.lost,
        groups_filtered=trace.filtered,
        failed_steps=int(total(lines, "trainer/bad_steps")),
        resume=resume,
    )


def trained(run_dir: Path) -> int:
    """Steps that are trained and not rolled back, by the summary or else by the trace."""
    found = read(run_dir)
    return of_trace(run_dir / TRACE).steps if found is None else found.steps


def finished(run_dir: Path, steps: int) -> Summary | None:
    """The summary of a run that has trained all of ``steps``: there is nothing to resume."""
    found = read(run_dir)
    return found if found is not None and found.outcome == "finished" and found.steps >= steps else None


def how_to_go_on(done: Summary, config: Config, command: str = RUN) -> str:
    """How to train more steps of a finished run. ``command``: any but ``staleflow run`` needs the
    configuration that the run was launched with, for the run's own says nothing of machines."""
    instead = " model.build= model.options={}" if config.model.build else ""
    told = f"this run is finished ({done.steps:,} of {done.steps_wanted:,} steps): {done.run_dir}"
    file, given = (f"{done.run_dir}/config.toml", "") if command == RUN else ("CONFIG", " CONFIG")
    more = f"For more steps: {command}{given} --run-dir {done.run_dir} --resume trainer.steps=N"
    if not done.model:
        return f"{told}. {more}"
    return (
        f"{told}. {more}. A new run from its model: {command} {file} trainer.steps=N model.path={done.model}{instead}"
    )


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
