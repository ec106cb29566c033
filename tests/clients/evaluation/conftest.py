"""The trainer's small model."""

from tests.clients.trainer.conftest import model_directory

__all__ = ["model_directory"]
