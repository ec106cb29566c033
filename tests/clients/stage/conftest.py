"""The trainer's small model is the stages' too."""

from tests.clients.trainer.conftest import model_directory

__all__ = ["model_directory"]
