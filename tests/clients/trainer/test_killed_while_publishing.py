"""A trainer process that is killed or stopped while a version is being published and the next step trains.

The parameter server is stopped meanwhile, so that the version stays under way until the test lets it continue.
"""

import signal
import subprocess
import time

import pytest

from tests.clients.trainer.service import Service, serving
from tests.clients.trainer.test_process import LIMIT_S, check_resumed, checkpoints, ended

STEP_S = 1.0
"""The engine has loaded a version, and the next batch is sealed, well before the step that follows it ends."""
SLOWLY = (
    *(f"trainer.simulated_step_s={STEP_S}", "trainer.steps=1000", "trainer.checkpoint_every=2"),
    "coordination.admission=fill",
)


def publishing(service: Service) -> "subprocess.Popen[bytes]":
    """A trainer that has trained a step whose version is under way, and is in the next one or has trained it, too."""
    trainer = service.start_trainer()
    service.wait_for("seal", 3)
    service.processes["parameters"].send_signal(signal.SIGSTOP)
    time.sleep(3 * STEP_S)
    return trainer


def resume(service: Service) -> None:
    service.processes["parameters"].send_signal(signal.SIGCONT)


def delivered(service: Service) -> dict[int, set[str]]:
    """Digests of the batches of each step, over all lineages."""
    digests: dict[int, set[str]] = {}
    for event in service.trace("seal"):
        digests.setdefault(event["step"], set()).add(event["digest"])
    return digests


@pytest.mark.parametrize("stored", [False, True])
def test_a_kill_while_a_version_is_being_published_loses_and_doubles_no_step(*, stored: bool) -> None:
    """``stored``: the version is published before the kill, while the next one is under way or its step trains."""
    with serving(*SLOWLY) as service:
        trainer = publishing(service)
        before = len(service.trace("consume"))
        if stored:
            resume(service)
            service.wait_for("consume", before + 1)
        trainer.send_signal(signal.SIGKILL)
        ended(trainer)
        saved = max(checkpoints(service), default=0)
        published = {event["version"] for event in service.trace("publish")}
        assert saved in published, "a checkpoint exists only once its version is published"
        resume(service)
        check_resumed(service)
        # the batch of the step whose version was lost is the same: a rollback forms only later batches anew
        step = service.trace("join")[1]["checkpoint"]["version"]
        assert len(delivered(service)[step]) == 1


def test_a_stop_while_a_version_is_being_published_ends_with_the_version_published_and_saved() -> None:
    with serving(*SLOWLY) as service:
        trainer = publishing(service)
        before = len(service.trace("consume"))
        trainer.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + LIMIT_S
        while "SIGTERM: stopping" not in (service.run_dir / "logs" / "trainer.log").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        resume(service)
        assert ended(trainer) == 0
        published = [event["version"] for event in service.trace("publish")]
        assert published[-1] > before, "the version that was under way is published"
        assert checkpoints(service)[-1] == published[-1]
        check_resumed(service)
        assert service.trace("rollback") == []
