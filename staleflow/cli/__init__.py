"""The command line: one file a verb. Only click is imported before a verb is chosen, and heavy things inside it."""

from staleflow.cli.main import main

__all__ = ["main"]
