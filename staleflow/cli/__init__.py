"""The command line, one module per verb.

Until a verb is chosen, only click is imported; verbs import torch and other heavy packages inside their functions.
"""

from staleflow.cli.main import main

__all__ = ["main"]
