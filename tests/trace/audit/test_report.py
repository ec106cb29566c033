"""The auditor accepts true traces, detects forged ones, and agrees with the independent auditor."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from staleflow.trace.audit.report import AuditReport, FileRule, audit
from staleflow.trace.audit.state import Rule
from tests.trace.histories import History, history, limits_of

INDEPENDENT = Path(__file__).parents[4] / "shared" / "check_trace.py"
SEEDS = range(12)


def independent(path: Path) -> dict[str, Any] | None:
    """Return the report of the auditor that shares no code with the product; None if that auditor is not installed."""
    if not INDEPENDENT.exists():
        return None
    done = subprocess.run([sys.executable, str(INDEPENDENT), str(path)], capture_output=True, text=True, check=False)
    if not done.stdout:
        return {"violations": 1, "first": done.stderr.splitlines()[-1:]}
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def chained(lines: list[dict[str, Any]]) -> bytes:
    """Return lines with new numbers and hashes: a forgery that the file rules cannot detect."""
    previous, out = "0" * 16, b""
    for seq, line in enumerate(lines, 1):
        plain = {key: value for key, value in line.items() if key != "h"} | {"seq": seq}
        body = json.dumps(plain, separators=(",", ":")).encode()[:-1]
        previous = hashlib.sha256(previous.encode() + body).hexdigest()[:16]
        out += body + f',"h":"{previous}"}}\n'.encode()
    return out


def broken_rules(report: AuditReport) -> set[Rule | FileRule]:
    return {violation.rule for violation in report.violations}


@pytest.mark.parametrize("seed", SEEDS)
def test_both_auditors_find_a_random_history_true(tmp_path: Path, seed: int) -> None:
    path = history(tmp_path, seed)
    report = audit(path)
    assert report.violations == [], f"seed {seed}, {limits_of(seed)}"
    assert report.closed
    assert report.lines == sum(count for name, count in report.events.items() if ":" not in name)
    other = independent(path)
    if other is not None:
        assert other["violations"] == 0, f"seed {seed}: {other['first']}"
        assert other["staleness"] == {str(age): count for age, count in report.staleness.items()}
        assert other["tokens"] == report.tokens
        assert other["masked"] == report.masked_tokens
        assert other["steps"] == report.steps or report.events["rollback"]


def test_the_histories_exercise_every_rule_but_the_sockets(tmp_path: Path) -> None:
    unchecked: set[str] | None = None
    events: set[str] = set()
    for seed in range(8):
        folder = tmp_path / str(seed)
        folder.mkdir()
        report = audit(history(folder, seed))
        events |= set(report.events)
        unchecked = set(report.unchecked) if unchecked is None else unchecked & set(report.unchecked)
    assert unchecked == {"PULL"}
    assert {"rollback", "unseal", "promote", "drop:quarantine", "drop:rollback", "release:expired"} <= events


@pytest.fixture(scope="module")
def true_trace(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return history(tmp_path_factory.mktemp("history"), 3).read_bytes()


def edited(lines: list[bytes]) -> None:
    where = next(n for n, line in enumerate(lines) if b'"ev":"reserve"' in line and n > 20)
    lines[where] = lines[where].replace(b'"lease":', b'"lease":1')


def removed(lines: list[bytes]) -> None:
    del lines[len(lines) // 2]


def duplicated(lines: list[bytes]) -> None:
    lines.insert(len(lines) // 2, lines[len(lines) // 2])


def reordered(lines: list[bytes]) -> None:
    half = len(lines) // 2
    lines[half], lines[half + 1] = lines[half + 1], lines[half]


def torn(lines: list[bytes]) -> None:
    lines[-1] = lines[-1][:-20]


def test_violations_are_counted_by_rule_beyond_those_that_are_kept(
    tmp_path: Path, true_trace: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("staleflow.trace.audit.report.MAX_VIOLATIONS", 3)
    path = tmp_path / "trace.jsonl"
    lines = true_trace.splitlines(keepends=True)
    path.write_bytes(b"no event\n" * 5 + b"".join([*lines[:-1], lines[-1].replace(b'"h":"', b'"h":"0')]))
    report = audit(path)
    assert [violation.rule for violation in report.violations] == [FileRule.LINE] * 3
    assert report.violated == {"LINE": 5, "CHAIN": 1}
    assert report.num_violations == report.violated.total()


@pytest.mark.parametrize("change", [edited, removed, duplicated, reordered, torn])
def test_a_changed_file_is_caught(tmp_path: Path, true_trace: bytes, change: Callable[[list[bytes]], None]) -> None:
    lines = true_trace.splitlines(keepends=True)
    change(lines)
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(lines))
    report = audit(path)
    assert broken_rules(report) & set(FileRule)
    other = independent(path)
    assert other is None or other["violations"] > 0


def test_a_line_cut_at_its_very_end_is_torn(tmp_path: Path, true_trace: bytes) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(true_trace[:-1])
    assert broken_rules(audit(path)) == {FileRule.LINE}


Forgery = Callable[[list[dict[str, Any]]], None]


def first(lines: list[dict[str, Any]], name: str, after: int = 0) -> int:
    return next(n for n, line in enumerate(lines) if n >= after and line["ev"] == name)


def a_stale_lease_pushes(lines: list[dict[str, Any]]) -> None:
    lines[first(lines, "push")]["lease"] += 1


def a_group_is_sealed_twice(lines: list[dict[str, Any]]) -> None:
    seal = lines[first(lines, "seal")]
    seal["members"][1] = seal["members"][0]


def a_push_is_forgotten(lines: list[dict[str, Any]]) -> None:
    del lines[first(lines, "push")]


def an_old_trainer_consumes(lines: list[dict[str, Any]]) -> None:
    lines[first(lines, "consume")]["trainer_term"] = 0


def a_version_is_skipped(lines: list[dict[str, Any]]) -> None:
    lines[first(lines, "publish", after=5)]["version"] += 1


def a_seal_comes_late(lines: list[dict[str, Any]]) -> None:
    where = first(lines, "seal")
    other = first(lines, "reserve", after=where)
    lines.insert(other, lines.pop(where))


def an_occupied_group_is_released(lines: list[dict[str, Any]]) -> None:
    where = first(lines, "occupy")
    lease = next(line["lease"] for line in reversed(lines[:where]) if line.get("group") == lines[where]["group"])
    group = lines[where]["group"]
    lines.insert(
        where + 1, lines[where] | {"ev": "release", "group": group, "lease": lease, "tokens": 0, "why": "aborted"}
    )


def a_version_is_pulled_that_was_never_published(lines: list[dict[str, Any]], *, ok: bool = True) -> None:
    pull = {"ev": "pull", "worker": "w", "lineage": 0, "version": 10**6, "sha": "f" * 64 if ok else "", "ok": ok}
    where = first(lines, "seal")
    lines.insert(where + 1, lines[where] | pull)


def a_version_is_not_pulled_that_was_never_published(lines: list[dict[str, Any]]) -> None:
    a_version_is_pulled_that_was_never_published(lines, ok=False)


FORGERIES = [
    (a_stale_lease_pushes, Rule.I4),
    (a_group_is_sealed_twice, Rule.I3),
    (a_push_is_forgotten, Rule.MOVE),
    (an_old_trainer_consumes, Rule.FENCE),
    (a_version_is_skipped, Rule.I5),
    (a_seal_comes_late, Rule.PROGRESS),
    (an_occupied_group_is_released, Rule.MOVE),
    (a_version_is_pulled_that_was_never_published, Rule.PULL),
    (a_version_is_not_pulled_that_was_never_published, Rule.PULL),
]


@pytest.mark.parametrize(("forge", "rule"), FORGERIES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_forged_trace_with_a_fresh_chain_is_caught(tmp_path: Path, forge: Forgery, rule: Rule) -> None:
    plain = History(tmp_path, limits_of(3), 3)
    plain.begin()
    for _ in range(60):
        plain.reserve()
        plain.push()
        plain.occupy()
        plain.train()
    plain.close()
    lines = [json.loads(line) for line in plain.path.read_bytes().splitlines()]
    plain.path.write_bytes(chained(lines))
    assert audit(plain.path).ok
    forge(lines)
    plain.path.write_bytes(chained(lines))
    report = audit(plain.path)
    assert rule in broken_rules(report)
    assert not broken_rules(report) & {FileRule.CHAIN, FileRule.SEQUENCE, FileRule.LINE}


def test_an_empty_trace_has_nothing_to_check(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.touch()
    report = audit(path)
    assert report.ok
    assert len(report.unchecked) == len(FileRule) + len(Rule)


@pytest.mark.parametrize("seed", [seed for seed in SEEDS if seed % 3 == 0])
def test_a_group_that_nobody_leased_is_a_violation_and_no_crash(tmp_path: Path, seed: int) -> None:
    """Later lines about the group, such as a rollback or the end of its batch, must not crash the auditor either."""
    lines = [json.loads(line) for line in history(tmp_path, seed).read_bytes().splitlines()]
    reserves = [place for place, line in enumerate(lines) if line["ev"] == "reserve"]
    path = tmp_path / "forged.jsonl"
    for place in reserves[:: max(len(reserves) // 12, 1)]:
        path.write_bytes(chained([*lines[:place], *lines[place + 1 :]]))
        assert audit(path).violations


def huge_window(lines: list[dict[str, Any]]) -> None:
    lines[0]["max_staleness"] = 2**50


def far_version(lines: list[dict[str, Any]]) -> None:
    lines[first(lines, "publish", first(lines, "publish") + 1)]["version"] = 2**50


def lineage_of_itself(lines: list[dict[str, Any]]) -> None:
    rollback = {"lineage": 7, "from_lineage": 7, "to_version": 0, "trainer_term": 1, "ev": "rollback"}
    lines.insert(first(lines, "seal"), {**lines[first(lines, "seal")], **rollback})


@pytest.mark.parametrize("forge", [huge_window, far_version, lineage_of_itself])
def test_a_forged_number_is_a_violation_and_costs_no_more_time(
    tmp_path: Path, true_trace: bytes, forge: Callable[[list[dict[str, Any]]], None]
) -> None:
    lines = [json.loads(line) for line in true_trace.splitlines()]
    forge(lines)
    path = tmp_path / "forged.jsonl"
    path.write_bytes(chained(lines))
    assert audit(path).violations
