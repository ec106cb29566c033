"""Summary of a run, from its metrics, the scheduler's last status and an audit of the trace.

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
from staleflow.metrics.names import held_out
from staleflow.metrics.reader import metric_lines
from staleflow.protocols.consistency.groups import LEASED
from staleflow.protocols.wire.messages import SchedulerStatus
from staleflow.trace import events
from staleflow.trace.fold import Fold, ages
from staleflow.trace.reader import Line, read_lines

LOST = ("aborted", "expired")
"""Reasons of releases that count as losses: the group failed or its worker was lost. The others are policy."""
RUN = "staleflow run"
TRACE = "trace.jsonl"
GOOD_OUTCOMES = ("finished", "drained")
"""Outcomes of runs without a failure; a drained run can be resumed."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a run, shown as a table and stored as ``summary.json``."""

    name: str
    run_dir: str
    model: str = ""
    """Directory of the newest checkpoint in the format of ``save_pretrained``; empty without one."""
    outcome: str
    """finished, drained, interrupted or failed."""
    error: str = ""
    steps: int = 0
    steps_wanted: int
    reward_start: float | None = None
    reward_end: float | None = None
    reward_of: str = "training groups"
    """Source of the two rewards: held-out prompts if the run has any, else training groups."""
    off_policy_mean: float | None = None
    off_policy_max: int | None = None
    """Consuming step minus oldest version, over every group trained."""
    max_staleness: int
    bound: str
    violations: int | None = None
    """Violations that the audit found in the whole trace; None without a trace."""
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
    """Command that continues the run.

    Empty for a finished run, and after a process rejected its configuration (exit code 2), because a resumed run keeps
    its configuration.
    """

    @property
    def good(self) -> bool:
        return self.outcome in GOOD_OUTCOMES and not self.error and not self.violations


def rewards(lines: Sequence[Mapping[str, Any]]) -> tuple[str, float | None, float | None]:
    """Return the source of the rewards and their mean at the start and at the end of the run."""
    keys = [(key, "held-out prompts") for key in held_out(key for line in lines for key in line)]
    for key, what in (*keys, ("reward/mean", "training groups")):
        values = [float(line[key]) for line in lines if line.get(key) is not None]
        if values:
            return what, values[0], values[-1]
    return "training groups", None, None


class TraceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the summary that comes from the trace."""

    ages: Counter[int] = msgspec.field(default_factory=Counter[int])
    """Number of trained groups by the versions between oldest token and step, without steps that were rolled back."""
    lost: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """Releases of groups that failed, by reason.

    Groups that a leaving worker releases count only if the run continues afterwards.
    """
    steps: int = 0
    """Published steps that were not rolled back."""
    tokens_trained: int = 0
    """Tokens of the steps that were not rolled back."""
    tokens_pushed: int = 0
    """Pushed tokens; the trace does not contain other generated tokens."""
    filtered: int = 0
    wall_s: float = 0.0
    working_s: float = 0.0
    """Running time from the first published version to the last consumed step."""
    closed: bool = False
    """True if the last event of the trace is ``close``."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_trained / self.working_s if self.working_s > 0 else 0.0


def facts(lines: Iterable[Line]) -> TraceFacts:
    """Compute the facts in one pass over a trace."""
    fold = Fold()
    pushed = filtered = 0
    published_s: float | None = None
    lost: Counter[str] = Counter()
    pending_releases: Counter[str] = Counter()
    for line in fold.over(lines):
        match line.event:
            case events.Push() as event:
                pushed += event.tokens
            case events.Consume():
                lost += pending_releases
                pending_releases.clear()
            case events.Publish() if published_s is None:
                published_s = fold.now_s
            case events.Release() as event:
                filtered += event.why == "filtered"
                if event.why in LOST:
                    left = (group := fold.group) and group.state is LEASED and group.worker not in fold.workers
                    (pending_releases if left else lost)[event.why] += 1
            case events.Close():
                pending_releases.clear()
            case _:
                pass
    last_s = max((batch.consumed_s for batch in fold.trained), default=0.0)
    return TraceFacts(
        ages=ages(fold.trained),
        lost=dict(lost),
        steps=max(fold.version, 0),
        tokens_trained=sum(batch.trained_tokens for batch in fold.trained),
        tokens_pushed=pushed,
        filtered=filtered,
        wall_s=fold.now_s,
        working_s=max(last_s - (published_s or 0.0), 0.0),
        closed=fold.closed is not None,
    )


def ended(status: SchedulerStatus) -> str:
    """Return the outcome by the scheduler's status: failed, drained or finished; empty until the trainer reports it."""
    if not status.finished:
        return ""
    if status.error:
        return "failed"
    return "drained" if status.drained and status.version < status.steps else "finished"


def newest_model(run_dir: Path) -> Path | None:
    """Return the newest complete checkpoint, a model or an adapter; an incomplete one has a different name."""
    result = [
        path.parent for path in (run_dir / "checkpoints").glob("*/checkpoint.json") if path.parent.name.isdecimal()
    ]
    return max(result, key=lambda path: int(path.name), default=None)


def of_trace(trace: Path, status: SchedulerStatus) -> TraceFacts:
    """Return the facts of a trace; if it cannot be read, return those that ``status`` contains."""
    try:
        return facts(read_lines(trace))
    except ConfigError:
        return TraceFacts(
            steps=max(status.version, 0),
            tokens_trained=status.totals.tokens_trained,
            filtered=status.totals.releases.get("filtered", 0),
            wall_s=status.run_s,
        )


def total(lines: Iterable[Mapping[str, Any]], key: str) -> float:
    """Return the last value of a cumulative metric."""
    values = [float(line[key]) for line in lines if line.get(key) is not None]
    return values[-1] if values else 0.0


def summarise(
    config: Config,
    run_dir: Path,
    *,
    outcome: str,
    error: str,
    status: SchedulerStatus,
    violations: int | None,
    restarts: Mapping[str, int],
    resume: str = "",
) -> Summary:
    """Build the summary of a run at its end.

    Steps, tokens and times come from the trace, like those of the report. ``status`` is the scheduler's last answer; it
    may be older than the trace by the steps that were trained while the run drained.
    """
    lines = metric_lines(run_dir / "metrics.jsonl")
    what, start, end = rewards(lines)
    trace = of_trace(run_dir / TRACE, status)
    return Summary(
        name=config.name,
        run_dir=str(run_dir),
        model=str((config.trainer.backend != "simulated" and newest_model(run_dir)) or ""),
        outcome=outcome,
        error=error or status.error,
        steps=trace.steps,
        steps_wanted=config.trainer.steps,
        reward_start=start,
        reward_end=end,
        reward_of=what,
        off_policy_mean=(
            sum(age * groups for age, groups in trace.ages.items()) / trace.ages.total() if trace.ages else None
        ),
        off_policy_max=max(trace.ages, default=None),
        max_staleness=config.staleness.max_staleness,
        bound=config.staleness.bound.value,
        violations=violations,
        tokens_trained=trace.tokens_trained,
        tokens_generated=max(status.totals.tokens_generated, trace.tokens_pushed),
        tokens_per_s=trace.tokens_per_s,
        wall_s=trace.wall_s,
        restarts={name: count for name, count in restarts.items() if count},
        groups_lost=trace.lost,
        groups_filtered=trace.filtered,
        failed_steps=int(total(lines, "trainer/bad_steps")),
        resume=resume,
    )


def trained(run_dir: Path) -> int:
    """Return the number of trained steps that were not rolled back, from the summary or else from the trace."""
    result = read(run_dir)
    return of_trace(run_dir / TRACE, SchedulerStatus()).steps if result is None else result.steps


def finished(run_dir: Path, steps: int) -> Summary | None:
    """Return the summary of a run that has trained all of ``steps`` and cannot be resumed; None for other runs."""
    result = read(run_dir)
    return result if result is not None and result.outcome == "finished" and result.steps >= steps else None


def how_to_continue(ended_run: Summary, config: Config, command: str = RUN) -> str:
    """Return a sentence on how to train more steps of a finished run.

    Any ``command`` other than ``staleflow run`` needs the configuration file that the run was launched with, because
    the configuration in the run directory does not name machines.
    """
    status = f"this run has finished ({ended_run.steps:,} of {ended_run.steps_wanted:,} steps): {ended_run.run_dir}"
    file, given = (f"{ended_run.run_dir}/config.toml", "") if command == RUN else ("CONFIG", " CONFIG")
    more = f"For more steps: {command}{given} --run-dir {ended_run.run_dir} --resume trainer.steps=N"
    if not ended_run.model:
        return f"{status}. {more}"
    model = config.model.starting_from(ended_run.model)
    return f"{status}. {more}. A new run from its model: {command} {file} trainer.steps=N {model}"


def write(summary: Summary, run_dir: Path) -> None:
    """Write ``summary.json`` durably."""
    data = msgspec.json.format(msgspec.json.encode(summary), indent=2)
    write_durably(run_dir / "summary.json", data + b"\n")


def forget(run_dir: Path) -> None:
    """Delete the summary of a run that is resumed."""
    (run_dir / "summary.json").unlink(missing_ok=True)


def read(run_dir: Path) -> Summary | None:
    """Return the stored summary of a run, or None."""
    try:
        return msgspec.json.decode((run_dir / "summary.json").read_bytes(), type=Summary)
    except (FileNotFoundError, msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
