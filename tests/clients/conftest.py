"""Fixtures for the clients, which are tested against the real servers."""

from tests.servers.conftest import make_run, run

__all__ = ["make_run", "run"]
