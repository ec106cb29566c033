"""Is this machine fit for a run?"""

import json
from pathlib import Path

import pytest

from staleflow.supervisor import checkup
from staleflow.supervisor.checkup import Finding
from tests.cli.conftest import SIMULATED, Cli


def test_every_check_says_something(cli: Cli) -> None:
    said = cli("doctor", "--json")
    findings = {finding["what"]: finding for finding in json.loads(said.out)}
    names = ["python", "torch", "transformers", "vllm", "deepspeed", "pyarrow", "disk", "shared memory", "open files"]
    assert list(findings)[:9] == names
    assert all(finding["found"] for finding in findings.values())
    assert said.code == (1 if any(finding["state"] == "bad" for finding in findings.values()) else 0)


def test_a_configuration_is_examined_too(tmp_path: Path) -> None:
    assert list(checkup.configuration(SIMULATED, [])) == [
        Finding("configuration", "good", f"{SIMULATED} fits this machine")
    ]
    (found,) = checkup.configuration(SIMULATED, ["seed=-1"])
    assert (found.state, found.found) == ("bad", "seed is -1; it must be an integer >= 0")
    free = list(checkup.configuration(SIMULATED, ["scheduler.bind=tcp://127.0.0.1:1"]))
    assert free[1].what == "address"


def test_what_is_not_installed_is_missing_not_bad() -> None:
    assert checkup.package("no-such-package") == Finding("no-such-package", "missing", "not installed")


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken() -> Finding:
        raise OSError("no such device")

    monkeypatch.setattr(checkup, "shared_memory", broken)
    monkeypatch.setattr(checkup, "torch", lambda: Finding("torch", "missing", "not asked"))
    findings = {finding.what: finding for finding in checkup.examine(None, [], tmp_path)}
    assert findings["shared memory"] == Finding("shared memory", "bad", "OSError: no such device")
