"""A second server on the same folder is refused before it removes the first one's uploads; a relay waits instead."""

import errno
import fcntl
import os
import re
import signal
import threading
from pathlib import Path

import pytest

from staleflow.configs.errors import ConfigError
from staleflow.servers.parameters.main import owned, serve
from staleflow.servers.parameters.relay import main as relay_main
from tests.servers.running import config_of


def test_a_second_server_leaves_the_first_one_s_uploads_alone(tmp_path: Path) -> None:
    folder = tmp_path / "parameters"
    with owned(folder):
        (folder / "upload-1.part").write_bytes(b"half")
        with pytest.raises(ConfigError, match="in use"), owned(folder):
            pass
        assert serve(config_of(tmp_path), tmp_path) == 2
        assert (folder / "upload-1.part").exists()
    with owned(folder):
        pass


def relayed(run_dir: Path) -> int:
    return relay_main.attach(config_of(run_dir), run_dir, "relay-0", "ipc:///nowhere", relay_main.BIND, 0.0)


def test_a_relay_that_waited_in_vain_leaves_to_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The exit code is 1, because code 2 would end the run and this is no user error."""
    monkeypatch.setattr(relay_main, "FOLDER_TIMEOUT_S", 0.1)
    folder = relay_main.folder_of(tmp_path, "relay-0")
    with owned(folder):
        (folder / "upload-1.part").write_bytes(b"half")
        assert relayed(tmp_path) == 1
        assert (folder / "upload-1.part").exists()
    assert f"waiting for folder {folder}: another relay still owns it" in caplog.text
    assert "in use by another process" in caplog.text


def test_a_folder_whose_file_system_has_no_locks_is_refused_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    why = re.escape("(flock: Function not implemented, errno 38)")
    with pytest.raises(ConfigError, match=why), owned(tmp_path / "parameters"):
        pass
    assert relayed(tmp_path) == 2  # the relay does not wait
    assert "another relay" not in caplog.text


def test_a_relay_that_waits_can_be_stopped(tmp_path: Path) -> None:
    log, over = tmp_path / "logs" / "relay-0.log", threading.Event()

    def stop() -> None:
        while not over.wait(0.02):
            if log.exists() and "waiting for folder" in log.read_text():
                os.kill(os.getpid(), signal.SIGTERM)
                return

    stopping = threading.Thread(target=stop)
    with owned(relay_main.folder_of(tmp_path, "relay-0")):
        stopping.start()
        try:
            assert relayed(tmp_path) == 0
        finally:
            over.set()
            stopping.join()
