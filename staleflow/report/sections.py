"""What each part of the pages says: facts as sentences, rows and charts. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from staleflow.configs.schema import Config
from staleflow.monitor.words import amount, clock, plural
from staleflow.protocols.consistency.limits import Bound
from staleflow.report.charts import SECONDS, Chart, Series, lines, number, stack
from staleflow.report.curves import STALENESS, TIME, Curves
from staleflow.report.facts import Facts, StepFact
from staleflow.trace.audit.report import AuditReport

MAX_WAITS = 12
MAX_HAPPENINGS = 200
SHORTEST_WAIT_S = 0.005
WAYS = {
    "filtered": "the filter did not want them: all rewards equal",
    "surplus": "redundancy: others were faster",
    "rollback": "written by weights that were taken back",
    "overdue": "the overdue policy gave them up",
    "expired": "their worker was not heard from in time; generated again",
    "aborted": "given up by a worker or a stage, or moved; generated again",
    "quarantine": "their stored bytes were damaged",
}
CODES = {
    "stale_lease": "the lease was over; the group is with somebody else",
    "duplicate": "sent again; answered as before",
    "conflict": "the same name for other bytes, or another configuration",
    "fenced": "a successor has come",
    "busy": "no room, or not yet; asked again",
    "bad_version": "weights that the run does not know or has let go",
    "denied": "not allowed",
    "malformed": "not a message",
    "oversize": "beyond the limits of the transport",
    "stale": "the run has passed it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Meter:
    """One row with a bar."""

    name: str
    groups: str
    tokens: str
    share: float
    colour: str
    meaning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One number in large."""

    label: str
    value: str
    note: str = ""


def duration(seconds: float) -> str:
    """As a person says it: 12.3 s, 3 min 47 s, 1 h 2 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if seconds < 3600 else f"{minutes // 60} h {minutes % 60} min"


def percent(part: float, whole: float) -> str:
    """``-`` of nothing."""
    if whole <= 0:
        return "-"
    share = 100 * part / whole
    return f"{share:.0f} %" if share >= 10 or share == 0 else f"{share:.1f} %"


def verdict(facts: Facts, report: AuditReport) -> tuple[bool, str]:
    """Whether the promise was kept, in one sentence."""
    if report.num_violations:
        first = report.violations[0]
        more = f"{report.num_violations} violations" if report.num_violations > 1 else "1 violation"
        return False, f"{more} in {report.lines:,} events. The first, at line {first.seq}: {first.why}."
    if not facts.steps:
        return True, f"No step was trained yet; nothing is wrong in {report.lines:,} events."
    groups = sum(facts.ages.values())
    if facts.bound == Bound.TOKEN.value:
        masked = percent(facts.masked, facts.trained + facts.masked)
        bound = plural(facts.max_staleness, "version")
        kept = f"no trained token was older than {bound}; {masked} of all were, and masked"
    else:
        kept = f"the oldest was {plural(max(facts.ages), 'version')} old, the bound is {facts.max_staleness}"
    checked = f"The audit found nothing wrong in {report.lines:,} events."
    return True, f"The promise was kept: of {groups:,} trained groups {kept}. {checked}"


def staleness_words(facts: Facts) -> str:
    """What the bound means here."""
    are = "is" if facts.max_staleness == 1 else "are"
    allowed = f"at most {plural(facts.max_staleness, 'version')} {are} allowed"
    of = "the step that trains a group minus the version of its oldest token"
    if facts.bound == Bound.TOKEN.value:
        return f"Age is {of}. Of a trained token {allowed}: older ones are read and masked."
    return f"Age is {of}; {allowed}."


def staleness_charts(facts: Facts, curves: Curves) -> list[Chart]:
    """Age of what was trained, of what is on the way, and where a group's time goes."""
    steps = facts.steps
    if not steps:
        return curves.group(STALENESS)
    return [age_chart(facts), phase_chart(steps), *curves.group(STALENESS)]


def age_chart(facts: Facts, *, by_time: bool = False) -> Chart:
    """Mean and oldest of every step, and the bound; over the steps, or over the seconds of the run."""
    steps = facts.steps
    series = [
        Series(name="oldest", colour="orange", values=[step.age_max for step in steps], exact=True),
        Series(name="mean", colour="blue", values=[step.age_mean for step in steps]),
    ]
    return lines(
        "Age of the trained groups",
        [step.consumed_s if by_time else step.step for step in steps],
        series,
        unit="versions",
        x_unit=SECONDS if by_time else "step",
        level=(facts.max_staleness, f"bound {facts.max_staleness}"),
        from_zero=True,
        whole=by_time,
    )


def phase_chart(steps: Sequence[StepFact]) -> Chart:
    """Mean seconds of a step's groups from lease to training."""
    series = [
        Series(name="generated", colour="blue", values=[step.writing_s for step in steps]),
        Series(name="in stages", colour="orange", values=[step.staging_s for step in steps]),
        Series(name="waits for its batch", colour="grey", values=[step.queueing_s for step in steps]),
    ]
    return stack("Where a group's time goes", [step.step for step in steps], series, unit="s")


def age_meters(facts: Facts) -> list[Meter]:
    """A row an age."""
    total = sum(facts.ages.values())
    within = facts.max_staleness
    token = facts.bound == Bound.TOKEN.value
    return [
        Meter(
            name=str(age),
            groups=f"{count:,}",
            tokens=percent(count, total),
            share=100 * count / max(facts.ages.values()),
            colour="blue" if age <= within else "grey" if token else "red",
            meaning="" if age <= within else "what was too old of them is masked" if token else "beyond the bound",
        )
        for age, count in facts.ages.items()
    ]


def time_charts(facts: Facts, curves: Curves) -> list[Chart]:
    """The trainer's time, idleness, throughput, and the groups in each state."""
    own = curves.step_times()
    found = [own] if own else [wait_chart(facts)] if facts.steps else []
    return [*found, *curves.group(TIME), *([level_chart(facts)] if len(facts.levels.points) > 1 else [])]


def wait_chart(facts: Facts, *, by_time: bool = False) -> Chart:
    """From the trace alone: seconds of each step without a complete batch."""
    places = [step.consumed_s if by_time else step.step for step in facts.steps]
    series = [Series(name="no complete batch", colour="red", values=[step.waited_s for step in facts.steps])]
    unit = SECONDS if by_time else "step"
    return stack("The trainer waits", places, series, unit="s a step", x_unit=unit, whole=by_time)


def level_chart(facts: Facts) -> Chart:
    """Groups by state over the seconds of the run."""
    points = facts.levels.points
    parts = (("leased", "blue"), ("pushed", "orange"), ("occupied", "green"), ("sealed", "purple"))
    words = {"pushed": "in stages", "occupied": "ready to train"}
    series = [
        Series(name=words.get(name, name), colour=colour, values=[float(getattr(point, name)) for point in points])
        for name, colour in parts
    ]
    return stack("Groups on the way", [point.at_s for point in points], series, x_unit=SECONDS, whole=True)


def waits_words(facts: Facts) -> str:
    """How long the trainer waited altogether."""
    if not facts.steps:
        return ""
    share = percent(facts.waited_s, _working_s(facts))
    return f"For {duration(facts.waited_s)}, {share} of the time, the trainer had no complete batch to work on."


def _working_s(facts: Facts) -> float:
    """From the first weights to the last step. Of a trace that lacks the former, from its first line."""
    return facts.steps[-1].consumed_s - min((version.published_s for version in facts.versions), default=0.0)


def wait_rows(facts: Facts) -> list[dict[str, str]]:
    """The steps that waited longest, and the group that came last."""
    slow = sorted(facts.steps, key=lambda step: -step.waited_s)[:MAX_WAITS]
    rows: list[dict[str, str]] = []
    for step in slow:
        if step.waited_s < SHORTEST_WAIT_S:
            continue
        last = step.last
        text = ""
        if last is not None:
            text = f"group {last.group} of version {last.version} from {last.worker}, {last.took_s:.2f} s on its way"
        rows.append({"step": f"{step.step:,}", "waited": f"{step.waited_s:.2f} s", "text": text})
    return rows


def waste_meters(facts: Facts, generated: int) -> list[Meter]:
    """Every way that tokens went, largest block first: what was trained, what was lost, and why."""
    trained_groups = sum(facts.ages.values())
    rows = [("trained", trained_groups, facts.trained, "green", "what the model learned from")]
    if facts.masked:
        rows.append(("masked", 0, facts.masked, "grey", "too old by the token bound: read, not trained"))
    if facts.undone_steps:
        rows.append(("taken back", 0, facts.undone_tokens, "red", "trained, and taken back with a rollback"))
    for why, spent in sorted(facts.released.items(), key=lambda item: -item[1].tokens):
        rows.append((why, spent.groups, spent.tokens, "orange", WAYS.get(why, "")))
    for why, spent in sorted(facts.dropped.items(), key=lambda item: -item[1].tokens):
        rows.append((f"dropped, {why}", spent.groups, spent.tokens, "red", f"ready to train: {WAYS.get(why, '')}"))
    whole = max(generated, facts.pushed.tokens, *(tokens for _, _, tokens, _, _ in rows), 1)
    return [
        Meter(
            name=name,
            groups=f"{groups:,}" if groups else "",
            tokens=f"{tokens:,}",
            share=100 * tokens / whole,
            colour=colour,
            meaning=meaning,
        )
        for name, groups, tokens, colour, meaning in rows
    ]


def waste_words(facts: Facts, generated: int) -> str:
    """The whole in a sentence."""
    made = max(generated, facts.pushed.tokens)
    parts = f"{facts.pushed.tokens:,} of them in finished groups"
    share = percent(facts.trained, made)
    return (
        f"The engines generated {made:,} tokens, {parts}; {share} were trained." if made else "Nothing was generated."
    )


def versions_words(facts: Facts) -> str:
    """How many, how large, how soon loaded."""
    if not facts.versions:
        return "No version was published."
    loads = [delay for version in facts.versions for delay in version.loads_s]
    failed = sum(version.failed for version in facts.versions)
    size = f"{amount(facts.versions[-1].nbytes)} each"
    words = f"{len(facts.versions):,} versions, {size}, {facts.checkpoints:,} checkpoints."
    if loads:
        words += (
            f" An engine had a new one {median(loads):.2f} s after it was published (median of {len(loads):,} loads)."
        )
    return words + (f" {failed:,} loads failed and were ordered again." if failed else "")


def version_charts(facts: Facts) -> list[Chart]:
    """How soon engines had each version."""
    loaded = [version for version in facts.versions if version.loads_s]
    if len(loaded) < 2:
        return []
    series = [
        Series(name="the last engine", colour="orange", values=[max(version.loads_s) for version in loaded]),
        Series(name="the first", colour="blue", values=[min(version.loads_s) for version in loaded]),
    ]
    places = [version.version for version in loaded]
    return [lines("From publish to loaded", places, series, unit="s", x_unit="version", from_zero=True)]


def tiles(facts: Facts, curves: Curves, config: Config, generated: int) -> list[Tile]:
    """The run in a handful of numbers."""
    steps = f"{len(facts.steps):,} of {config.trainer.steps:,}"
    found = [Tile(label="steps", value=steps, note=f"{facts.batch_size} groups of {facts.group_size} each")]
    for key, what in (("reward/eval", "held-out prompts"), ("reward/mean", "training groups")):
        if known := curves.known(key):
            found.append(Tile(label="reward", value=f"{known[0]:.2f} → {known[-1]:.2f}", note=what))
            break
    if facts.steps:
        groups = sum(facts.ages.values())
        mean = sum(age * count for age, count in facts.ages.items()) / groups
        most = f"at most {max(facts.ages)}, bound {facts.max_staleness}"
        if facts.bound == Bound.TOKEN.value:
            most = f"at most {max(facts.ages)}, masked over {facts.max_staleness}"
        found.append(Tile(label="age, versions", value=f"{mean:.2f}", note=most))
        working = _working_s(facts)
        found.append(
            Tile(
                label="tokens/s trained",
                value=number(facts.trained / max(working, 1e-9)),
                note=f"{facts.trained:,} tokens",
            )
        )
        waited = percent(facts.waited_s, working)
        found.append(Tile(label="trainer waited", value=waited, note="of the time"))
        made = max(generated, facts.pushed.tokens)
        found.append(Tile(label="tokens used", value=percent(facts.trained, made), note=f"of {number(made)} generated"))
    found.append(
        Tile(
            label="time",
            value=clock(facts.seconds),
            note=f"{facts.incarnations} start{'s' if facts.incarnations > 1 else ''} of the scheduler",
        )
    )
    return found
