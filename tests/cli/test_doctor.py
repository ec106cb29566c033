"""``staleflow doctor`` reports whether this machine is fit for a run."""

import importlib.metadata
import importlib.util
import json
import re
import socket
import sys
from pathlib import Path

import pytest

from staleflow.cli.doctor import show
from staleflow.cli.main import main
from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.extras import install
from staleflow.configs.loading.load import load
from staleflow.supervisor import checkup, sustained
from staleflow.supervisor.addresses import check_free
from staleflow.supervisor.checkup import Finding, abilities
from tests.cli.conftest import SIMULATED, Cli


def test_every_check_says_something(cli: Cli) -> None:
    said = cli("doctor", "--json")
    findings = {finding["what"]: finding for finding in json.loads(said.out)}
    names = ["python", "torch", "transformers", "vllm", "deepspeed", "pyarrow", "scikit-learn", "matplotlib", "openai"]
    assert list(findings)[:9] == names
    assert list(findings)[-2:] == ["can run", "start with"]
    assert all(finding["found"] for finding in findings.values())
    assert said.code == (1 if any(finding["state"] == "bad" for finding in findings.values()) else 0)


def test_what_to_install_is_printed_as_it_is_to_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    show([Finding("vllm", "missing", "pip install -e '.[vllm]'")])
    assert "pip install -e '.[vllm]'" in capsys.readouterr().out


def test_a_configuration_is_examined_too(tmp_path: Path) -> None:
    assert [finding for finding in checkup.configuration(SIMULATED, []) if finding.what == "configuration"] == [
        Finding("configuration", "good", f"{SIMULATED} fits this machine")
    ]
    (found,) = checkup.configuration(SIMULATED, ["seed=-1"])
    assert (found.state, found.found) == ("bad", "seed is -1; it must be an integer from 0 to 4294967295")
    free = list(checkup.configuration(SIMULATED, ["scheduler.bind=tcp://127.0.0.1:1"]))
    assert free[1].what == "address"


def test_a_mirror_is_written_and_read(tmp_path: Path) -> None:
    def found(mirror: Path) -> list[Finding]:
        config = [f"parameters.mirror=file://{mirror}"]
        return [finding for finding in checkup.configuration(SIMULATED, config) if finding.what == "mirror"]

    good = f"file://{tmp_path}/weights can be written and read"
    assert found(tmp_path / "weights") == [Finding("mirror", "good", good)]
    assert list((tmp_path / "weights").iterdir()) == []
    (tmp_path / "file").write_bytes(b"")
    (bad,) = found(tmp_path / "file")
    assert bad.state == "bad"
    assert bad.found.startswith(f"file://{tmp_path}/file/probe-")


def test_a_stage_with_fewer_calls_than_a_batch_takes_names_the_keys_that_raise_them() -> None:
    few = ["reward.concurrency=8", "reward.workers=2", "trainer.batch_size=8", "rollout.group_size=4"]
    (found,) = checkup.stage_calls(load(SIMULATED, few))
    assert found == Finding(
        "stage reward",
        "good",
        "16 concurrent calls of an async def, 2 of another function; a batch needs 32: raise reward.concurrency or "
        "reward.workers if the stage is the limit",
    )
    (found,) = checkup.stage_calls(load(SIMULATED, [*few[1:], "reward.concurrency=64"]))
    assert found.found.endswith("a batch needs 32")


def test_an_environment_with_fewer_episodes_than_the_engine_takes_names_its_keys() -> None:
    few = ["environment.run=m:C", "environment.concurrency=4", "environment.processes=2", "rollout.max_inflight=64"]
    found = list(checkup.stage_calls(load(SIMULATED, few)))[-1]
    said = "8 episodes per rollout worker, whose engine takes 64: "
    said += "raise environment.processes or environment.concurrency"
    assert (found.what, found.found) == ("environment", said)


def test_every_address_that_would_keep_a_run_from_starting_is_examined(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"http://127.0.0.1:{other.getsockname()[1]}"
        overrides = [f"metrics.bind={address}", "parameters.bind=tcp://127.0.0.1:1"]
        with pytest.raises(ConfigError, match=r"metrics\.bind is .*; it is in use"):
            check_free(load(SIMULATED, overrides), tmp_path)
        found = checkup.configuration(SIMULATED, overrides)
        assert [finding for finding in found if finding.what == "address"] == [
            Finding("address", "good", "parameters.bind tcp://127.0.0.1:1 is free"),
            Finding("address", "bad", f"metrics.bind {address} is in use"),
        ]


def test_what_is_not_installed_is_missing_not_bad() -> None:
    assert checkup.package("no-such-package") == Finding("no-such-package", "missing", "not installed")
    how = f"not installed; only for tea: {install('kettle')}"
    assert checkup.extra("no-such-package", "kettle", "tea") == Finding("no-such-package", "missing", how)


def test_what_can_run_follows_from_what_is_there() -> None:
    found = [Finding("torch", "good", ""), Finding("transformers", "good", ""), Finding("vllm", "bad", "")]
    can, begin = abilities(found)
    assert can.found == "engines simulated, transformers; trainer backends simulated, torch, ddp, fsdp"
    assert begin.found.startswith("staleflow init")
    can, begin = abilities([])
    assert can.found == "engines simulated; trainer backends simulated"
    assert begin.found == f"staleflow run configs/simulated.toml; for models {install('train')}"


@pytest.mark.long
@pytest.mark.xdist_group("machine")
def test_what_it_sustains_is_measured_by_a_run(monkeypatch: pytest.MonkeyPatch, short_dir: Path) -> None:
    monkeypatch.setattr(sustained, "MEASURE_S", 0.5)
    told: list[float] = []
    weights, trajectories, steps = sustained.sustained(load(SIMULATED), short_dir, told.append)
    assert [finding.what for finding in (weights, trajectories, steps)] == ["weights", "trajectories", "steps"]
    assert re.fullmatch(r"[\d,]+/s of 256 tokens, .*", trajectories.found)
    assert re.fullmatch(r"the service allows [\d,]+ a minute: a step is 8 x 4 trajectories; .*", steps.found)
    assert told == sorted(told)
    assert list(short_dir.iterdir()) == []  # neither files nor processes are left behind


def test_a_run_that_does_not_start_is_a_bad_finding(monkeypatch: pytest.MonkeyPatch, short_dir: Path) -> None:
    monkeypatch.setattr(sustained, "TASK", "name = 3")
    *_, found = sustained.sustained(None, short_dir, lambda share: None)
    assert (found.what, found.state) == ("trajectories", "bad")
    told, *words = found.found.splitlines()
    assert re.fullmatch(r"a run without a model ended with exit code 2 after \d+ s; its last output:", told)
    assert words == ["  staleflow: name is 3; it must be a printable string"]


def test_what_keeps_it_from_being_measured_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> list[Finding]:
        return [Finding("python", "good", "3"), Finding("disk", "bad", "0.5 GiB free")]

    monkeypatch.setattr(checkup, "examine", full)
    assert main(["doctor", "--measure", "--json"]) == 1
    findings = {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert findings["trajectories"]["found"] == "not measured: fix disk first"


def a_package(directory: Path, name: str, code: str) -> None:
    (directory / name).mkdir()
    (directory / name / "__init__.py").write_text(code)


def test_a_vllm_that_trips_over_the_wrong_torchvision_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    a_package(tmp_path, "vllm", "")
    a_package(tmp_path, "torchvision", "raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = ["staleflow"]

    def entry_points(**_: str) -> list[str]:
        return found

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    assert checkup.vllm() == Finding(
        "vllm",
        "bad",
        "RuntimeError: operator torchvision::nms does not exist; "
        "torchvision, torchaudio or torchcodec was built for another torch: pip uninstall all three",
    )
    found.clear()
    assert checkup.vllm().found.startswith("the vLLM plugin of staleflow is not registered")


def test_without_deepspeed_doctor_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Finding:
        return Finding(name, "missing", "not installed")

    monkeypatch.setattr(checkup, "package", absent)
    assert checkup.deepspeed().state == "missing"
    assert install("deepspeed") in checkup.deepspeed().found


def test_without_vllm_doctor_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(name: str) -> None:
        return None

    monkeypatch.setattr(importlib.util, "find_spec", nowhere)
    assert checkup.vllm().state == "missing"
    assert install("vllm") in checkup.vllm().found


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken() -> Finding:
        raise OSError("no such device")

    monkeypatch.setattr(checkup, "shared_memory", broken)
    monkeypatch.setattr(checkup, "torch", lambda: Finding("torch", "missing", "not asked"))
    monkeypatch.setattr(checkup, "vllm", lambda: Finding("vllm", "missing", "not asked"))
    findings = {finding.what: finding for finding in checkup.examine(None, [], tmp_path)}
    assert findings["shared memory"] == Finding("shared memory", "bad", "OSError: no such device")
