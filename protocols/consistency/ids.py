"""Identifier types of the protocol. Distinct types keep a number of one kind from being passed as another."""

from typing import NamedTuple, NewType

GroupId = NewType("GroupId", int)
"""The trajectories of one prompt: ``epoch * rows + row`` of the prompt source. Never reused once trained or dropped."""

LeaseId = NewType("LeaseId", int)
"""The right to produce a group; strictly increasing, never reused, and so the fencing token."""

Version = NewType("Version", int)
"""Parameters after that many committed train steps; 0 is the initial model."""

Step = NewType("Step", int)
"""Step ``k`` consumes batch ``k`` and publishes version ``k + 1``."""

Lineage = NewType("Lineage", int)
"""The surviving history; one more at each trainer rollback."""

TrainerTerm = NewType("TrainerTerm", int)
"""The trainer's fencing number; one more at each join. 0: no trainer has joined yet."""

BatchId = NewType("BatchId", int)
"""A sealed batch; strictly increasing from 1, never reused, so a resealed batch has a new id."""

WorkerId = NewType("WorkerId", str)
"""One lifetime of an attached process: its name and a nonce (``rollout-0.9f2c``)."""


class Segment(NamedTuple):
    """Tokens of a group that one version wrote, summed over its samples."""

    lineage: Lineage
    version: Version
    tokens: int
