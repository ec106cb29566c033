"""Render ``report.html`` and the page of ``trace plot``, each as one self-contained file."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2

from staleflow.configs.errors import MISSING, ConfigError
from staleflow.configs.loading.load import config_sha, read_run
from staleflow.configs.loading.toml import dumps
from staleflow.configs.schema import Config
from staleflow.metrics.reader import metric_lines
from staleflow.monitor.lanes import Lane, overlaps
from staleflow.monitor.words import clock
from staleflow.report import sections
from staleflow.report.curves import LEARNING, Curves
from staleflow.report.facts import Facts
from staleflow.report.lane_paths import lane_rows
from staleflow.report.reading import read
from staleflow.report.samples import samples
from staleflow.report.settings import changes, settings
from staleflow.supervisor import summary as summaries
from staleflow.trace.audit.report import AuditReport, FileRule, audit
from staleflow.trace.audit.state import Rule

CONTENTS = {
    "learning": "Learning",
    "samples": "Samples",
    "staleness": "Staleness",
    "time": "Time and waits",
    "waste": "Tokens",
    "events": "Events",
    "versions": "Weights",
    "audit": "Audit",
    "config": "Configuration",
    "more": "Other metrics",
}
GOOD, BAD, OPEN = "good", "bad", "warn"
MAX_VIOLATIONS = 20


def report(run_dir: Path) -> str:
    """Return the report of the run in a directory, running or ended. Raise ``ConfigError`` if there is no trace."""
    trace = run_dir / "trace.jsonl"
    config = read_run(run_dir)
    if not trace.is_file():
        raise ConfigError("run directory", str(run_dir), "it has no trace.jsonl: the run has not started yet")
    facts, shown = read(trace)
    curves = Curves(metric_lines(run_dir / "metrics.jsonl"))
    return _render("report.html", _context(run_dir, config, facts, shown, curves, audit(trace, growing=True)))


def timeline(trace: Path, shown: list[Lane], facts: Facts, window_s: tuple[float, float]) -> str:
    """Return a page with the lanes of a trace, the age of the trained groups and the trainer's waits."""
    charts = [sections.age_chart(facts, by_time=True), sections.wait_chart(facts, by_time=True)] if facts.steps else []
    together = [(one, other, f"{both:.2f} s") for one, other, both in overlaps(shown)]
    return _render(
        "timeline.html",
        {
            "title": f"{facts.run}: timeline",
            "name": facts.run,
            "subtitle": _when(facts),
            "lanes": lane_rows(shown, window_s),
            "charts": charts,
            "staleness_words": sections.staleness_words(facts),
            "waits_words": sections.waits_words(facts),
            "waits": sections.wait_rows(facts),
            "overlaps": together,
            "run_dir": trace,
        },
    )


def _render(name: str, context: Mapping[str, Any]) -> str:
    pages = jinja2.Environment(
        loader=jinja2.PackageLoader("staleflow.report", "pages"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return pages.get_template(name).render(version=version("staleflow"), **context)


def _context(
    run_dir: Path, config: Config, facts: Facts, shown: list[Lane], curves: Curves, audited: AuditReport
) -> dict[str, Any]:
    ended = summaries.read(run_dir)
    generated = ended.tokens_generated if ended else 0
    kept, sentence = sections.verdict(facts, audited)
    outcome, colour = _outcome(facts, ended)
    learning, others, wrote = curves.group(LEARNING), curves.others(), samples(run_dir / "samples.jsonl")
    missing = {"learning": learning, "more": others, "samples": wrote}
    return {
        "title": f"{config.name}: report",
        "name": config.name,
        "outcome": outcome,
        "outcome_class": colour,
        "subtitle": f"{_when(facts)}, run {facts.run}",
        "error": ended.error if ended else "",
        "kept": kept,
        "verdict": sentence,
        "tiles": sections.tiles(facts, curves, config, generated),
        "contents": [(id, word) for id, word in CONTENTS.items() if missing.get(id, True)],
        "learning": learning,
        "samples": wrote,
        "others": others,
        "staleness_words": sections.staleness_words(facts),
        "staleness": sections.staleness_charts(facts, curves),
        "ages": sections.age_meters(facts),
        "waits_words": sections.waits_words(facts),
        "time": sections.time_charts(facts, curves),
        "waits": sections.wait_rows(facts),
        "lanes": lane_rows(shown, (0.0, facts.seconds)),
        "waste_words": sections.waste_words(facts, generated),
        "waste": sections.waste_meters(facts, generated),
        "versions_words": sections.versions_words(facts),
        "versions": sections.version_charts(facts),
        "run_dir": run_dir,
        **_events(facts),
        **_audited(audited),
        **_configured(config),
    }


def _when(facts: Facts) -> str:
    began = datetime.fromtimestamp(facts.began_unix_s, UTC)
    return f"{began:%Y-%m-%d %H:%M} UTC, {sections.duration(facts.seconds)}"


def _outcome(facts: Facts, ended: summaries.Summary | None) -> tuple[str, str]:
    if ended is not None:
        return ended.outcome, {"finished": GOOD, "drained": GOOD, "failed": BAD}.get(ended.outcome, OPEN)
    return (
        (facts.closed, GOOD if facts.closed in summaries.GOOD_OUTCOMES else OPEN)
        if facts.closed
        else ("not ended", OPEN)
    )


def _events(facts: Facts) -> dict[str, Any]:
    shown = facts.happenings[: sections.MAX_HAPPENINGS]
    rows = [{"at": clock(one.at_s), "bad": one.bad, "text": one.text} for one in shown]
    rejects = [(code, f"{count:,}", sections.CODES.get(code, "")) for code, count in facts.rejects.most_common()]
    return {"happenings": rows, "more_happenings": len(facts.happenings) - len(shown), "rejects": rejects}


def _audited(audited: AuditReport) -> dict[str, Any]:
    rules = [
        {
            "rule": rule.value,
            "checked": f"{audited.checks[rule.name]:,}" if audited.checks[rule.name] else "nothing to check",
            "violated": audited.violated[rule.name],
        }
        for rule in (*FileRule, *Rule)
    ]
    lines = [f"line {one.seq}: {one.rule.value}: {one.why}" for one in audited.violations[:MAX_VIOLATIONS]]
    ending = f"The hash of the last event, {audited.last_hash}, identifies the whole file." if audited.last_hash else ""
    words = f"Recomputed from {audited.lines:,} events by code that is independent of the ledger. {ending}"
    return {"audit_words": words, "rules": rules, "violations": lines}


def _configured(config: Config) -> dict[str, Any]:
    changed = [
        (key, _shown(value), "" if default is MISSING else _shown(default)) for key, value, default in changes(config)
    ]
    return {"changed": changed, "config": dumps(settings(config)), "config_sha": config_sha(config)}


def _shown(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
