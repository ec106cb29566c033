"""How many of the groups that the bound admits are started.

A group that is begun before it is needed waits at the end, and is old when it is trained. Under the trajectory bound it
also has its deadline from the version that it begins with: a lease given out early shortens the time that the longest
group of its version may take. ``just_in_time`` therefore leaves room unused: only so many groups are started that
``lead`` batches are live (token bound: under way, or wait for their step).

``lead`` follows from what was seen (``Pace``): as many groups as are under way on average, half a batch that gathers
for the next step, and a margin that grows when the trainer starves and shrinks when it does not.

Under the trajectory bound a trainer that waits gets everything that the bound admits, at the newest version: its slow
step begins with all of it. When long groups pin its steps, ``lead`` is nothing: while a sealed batch is there every
start is better one version later, unless engines could not take at once what has gathered by then; while none is
there, everything that the bound admits is started.

The rule is this project's; StaleFlow (2601.12784) fills every entry that its buffers have. docs/consistency.md has the
bounds of both.
"""

import math
from typing import Literal

import msgspec

from staleflow.protocols.coordination.view import Snapshot

Admission = Literal["fill", "just_in_time"]

MEMORY = 0.8
"""Weight of what was before at each step: the last five steps or so decide."""
PINNED = 0.05
"""Share of time pinned above which the longest groups are what limits the run."""
STARVED = 0.01
"""Share of time starved that is put up with."""
ROUNDS = 2.0
"""More room than so many times the places that engines have free is not left to gather: it would start too late."""
GATHERS = 0.5
"""Batches: on average so much of the next one is there and waits for the rest."""
GAIN = 1.0
"""Batches that the margin grows by for each share of a step that starved beyond that. It integrates: in the long run
the share of time starved is ``STARVED``, or the margin is at one of its ends."""


class Step(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """From one published version to the next."""

    seconds: float
    pinned_s: float
    """The trainer waited, with enough groups occupied: some unfinished ones had to be in its batch."""
    starved_s: float
    """The trainer waited for more groups."""
    under_way: float
    """Batches of groups that were leased or in stages, on average."""


class Pace(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What ``just_in_time`` remembers. Sums over the last steps, each weighing less than the one after it."""

    lead: float
    """Batches of groups to be live."""
    margin: float = 0.0
    seconds: float = 0.0
    pinned_s: float = 0.0
    starved_s: float = 0.0
    under_way_s: float = 0.0
    """Batches x seconds."""


def paced(pace: Pace, step: Step, most: float) -> Pace:
    """The pace after another step. ``most``: batches that the bound lets live at once."""
    seconds = MEMORY * pace.seconds + step.seconds
    pinned_s = MEMORY * pace.pinned_s + step.pinned_s
    starved_s = MEMORY * pace.starved_s + step.starved_s
    under_way_s = MEMORY * pace.under_way_s + step.under_way * step.seconds
    if pinned_s > PINNED * seconds:
        margin, lead = pace.margin, 0.0
    else:
        margin = min(most, max(0.0, pace.margin + GAIN * (step.starved_s / step.seconds - STARVED)))
        fed_s = max(seconds - starved_s, 1e-9)  # at full speed as many more would be under way
        lead = min(most, under_way_s / fed_s + GATHERS + margin)
    return Pace(
        lead=lead,
        margin=margin,
        seconds=seconds,
        pinned_s=pinned_s,
        starved_s=starved_s,
        under_way_s=under_way_s,
    )


def admitted(snapshot: Snapshot, admission: Admission) -> Snapshot:
    """The snapshot with no more groups to start than ``admission`` lets in."""
    if admission == "fill" or not snapshot.next or _all_of_it(snapshot):
        return snapshot
    live = snapshot.leased + snapshot.pushed + snapshot.occupied - snapshot.spares
    if snapshot.token_bound:
        live += snapshot.sealed - snapshot.training
    makes_a_batch = snapshot.token_bound or not snapshot.sealed
    lead = max(1.0, snapshot.lead) if makes_a_batch else snapshot.lead
    few = max(0, math.ceil(lead * snapshot.batch_size) - live)
    return msgspec.structs.replace(snapshot, next=snapshot.next[:few])


def _all_of_it(snapshot: Snapshot) -> bool:
    """Trajectory bound: whether this is the moment for everything that the bound admits."""
    if snapshot.token_bound:
        return False
    gathered = not snapshot.sealed or max(snapshot.room.values()) > ROUNDS * places(snapshot)
    return snapshot.waits or (not snapshot.lead and gathered)


def places(snapshot: Snapshot) -> int:
    """Groups that engines could decode at once beyond those that they have."""
    started = snapshot.group_size
    return sum(
        max(0, (i.slots // started if i.slots else i.capacity) - i.held) for i in snapshot.instances if not i.on_hold
    )
