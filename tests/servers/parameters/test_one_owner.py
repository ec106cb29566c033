"""A second server on the same folder is refused before it removes what the first one is writing."""

from pathlib import Path

import pytest

from staleflow.configs.errors import ConfigError
from staleflow.servers.parameters.main import owned, serve
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
