"""A whole run with an engine on another host that loads its weights from an object store, until the store dies."""

import secrets
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.object_store import S3Server
from tests.process.hosts import possible
from tests.process.running import END_S, Run, audited

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("s3")]

SMALL = ("rollout.workers=1", "trainer.steps=5000", "trainer.simulated_step_s=0.2", "trainer.eval_prompts=0")
ON_ANOTHER_HOST = 'mount --bind "$1" /proc/sys/kernel/random/boot_id && shift && exec "$@"'


@contextmanager
def far_engine(run_dir: Path) -> Generator["subprocess.Popen[bytes]"]:
    """Attach an engine that has another boot id than the servers, so that it maps none of their files."""
    boot_id = run_dir.parent / "boot_id"
    boot_id.write_text(f"{secrets.token_hex(16)}\n")
    attach = [sys.executable, "-m", "staleflow.cli", "attach", "rollout", "--run-dir", str(run_dir), "--name", "far"]
    command = ["unshare", "--mount", "sh", "-c", ON_ANOTHER_HOST, "sh", str(boot_id), *attach]
    with (run_dir.parent / "far").open("wb") as output:
        engine = subprocess.Popen([*command, "rollout.weights_from=mirror"], stdout=output, stderr=output)
    try:
        yield engine
    finally:
        engine.kill()
        engine.wait()


def ways(run_dir: Path) -> Counter[str]:
    """Count the far engine's loads by their road."""
    lines = (run_dir.parent / "far").read_text().splitlines()
    return Counter(line.rpartition("is loaded, ")[2] for line in lines if "is loaded, " in line)


def until(run: Run, way: str, count: int) -> None:
    deadline_s = time.monotonic() + END_S
    while ways(run.run_dir)[way] < count:
        assert run.process.poll() is None, run.finish(5)
        assert time.monotonic() < deadline_s, (run.run_dir.parent / "far").read_text()
        time.sleep(0.1)


@pytest.mark.skipif(not possible(), reason="another boot id needs root and mount namespaces")
def test_an_engine_on_another_host_loads_from_the_store_and_from_the_server_once_the_store_is_gone(
    run_dir: Path, bucket: str, s3_server: S3Server
) -> None:
    try:
        with Run(run_dir, "simulated.toml", *SMALL, f"parameters.mirror=s3://{bucket}/weights") as run:
            run.wait_for("consume", 1, END_S)
            with far_engine(run_dir) as engine:
                until(run, "from the mirror", 2)
                s3_server.kill()
                until(run, "over the network", 2)
                assert run.drain(engine) == [0]
                output = run.finish(END_S)
    finally:
        s3_server.kill()
        s3_server.start()
    assert (run.process.returncode, run.summary()["violations"], run.summary()["restarts"]) == (0, 0, {}), output
    audited(run_dir, "consume=4", "publish=5")
    log = (run_dir / "logs" / "parameters.log").read_text()
    assert log.count("the mirror is behind") == 1
    assert "very-secret" not in log + output + (run_dir / "config.json").read_text()


@pytest.mark.usefixtures("bucket")
def test_a_missing_bucket_ends_a_run_before_it_starts(run_dir: Path) -> None:
    with Run(run_dir, "simulated.toml", *SMALL, "parameters.mirror=s3://no-such-bucket/weights") as run:
        output = run.finish(END_S)
    assert run.process.returncode == 2
    assert output.count("\n") == 1, output
    assert 'parameters.mirror is "s3://no-such-bucket/weights"; it must be a store' in output
    assert "NoSuchBucket" in output
    assert not run_dir.exists()
