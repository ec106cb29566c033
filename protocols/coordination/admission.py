"""Admission: the number of groups to start, out of those that the bound admits.

A group that starts before it is needed waits after it is finished, and is old when it is trained. Under the trajectory
bound its deadline also follows from the version it starts with, so an early lease shortens the time that the longest
group of its version may take. ``just_in_time`` therefore leaves room unused: it starts groups only until ``lead``
batches are live (token bound: in progress, or waiting for their step).

``lead`` is derived from measurements (``Pace``). It is the average number of groups in progress, plus half a batch that
gathers for the next step, plus a margin that grows while the trainer waits and shrinks while it does not.

Under the trajectory bound a waiting trainer gets everything that the bound admits, at the newest version, so that its
slow step starts with all of it. When long groups pin its steps, every start is better one version later: ``lead`` is 0,
so that groups gather while a sealed batch exists, unless the engines could not take the gathered groups at once. While
no sealed batch exists, everything that the bound admits is started.

Gathering has a cost: the trainer starves until the engines have written the first batch of the gathered groups. It is
hidden where the longest group still takes longer. Where it is not, because engines are crowded and answers are of
similar length, groups are not gathered: ``lead`` is the maximum.

The rule is this project's; StaleFlow (2601.12784) fills every entry of its buffers. docs/consistency.md has the bounds
of both.
"""

import math
from typing import Literal

import msgspec

from staleflow.protocols.coordination.view import Snapshot

Admission = Literal["fill", "just_in_time"]

HISTORY_WEIGHT = 0.8
"""Weight of the earlier sums at each step: about the last five steps count."""
MAX_PINNED_SHARE = 0.05
"""Share of time pinned above which the longest groups limit the run."""
MIN_WAIT = 1.25
"""Minimum wait of the trainer, pinned and starved, as a multiple of the part that gathering causes, to gather groups.
At 1 no step is pinned, and all of the wait is for the first batch."""
GATHER_COST_WEIGHT = 0.99
"""Weight of the cost of gathering at each step without: after some 70 steps it has halved, and is measured anew."""
WAIT_SHARE = 0.01
"""Accepted share of time that the trainer waits for a batch: the set point of the margin."""
MAX_GATHERED_ROUNDS = 2.0
"""Largest room left to gather, as a multiple of the free places of the engines. More would start too late."""
GATHERING_BATCHES = 0.5
"""Average part of the next batch that is occupied and waits for the rest."""
FIRST_MARGIN = 0.5
"""Margin at the start of a run: an unneeded one shrinks within some 50 steps, a missing one costs waits to learn."""
MARGIN_GAIN = 1.0
"""Batches by which the margin grows for each share of a step waited above ``WAIT_SHARE``. It integrates: in the long
run the share of time waited is ``WAIT_SHARE``, or the margin is at one of its limits."""


class Step(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Measurements between one published version and the next."""

    seconds: float
    pinned_s: float
    """Seconds that the trainer waited with enough groups occupied, because unfinished ones had to be in its batch."""
    starved_s: float
    """Seconds that the trainer waited because too few groups were occupied."""
    blocked_s: float = 0.0
    """Part of ``starved_s`` that generation did not cause: the missing groups were in stages, or none was leased."""
    under_way: float
    """Average number of groups that were leased or in stages, in batches."""


class Pace(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """State of ``just_in_time``: decaying sums over the last steps."""

    lead: float
    """Target number of live groups, in batches."""
    margin: float = 0.0
    gathers: bool = False
    """Groups are gathered while a sealed batch exists."""
    gather_s: float = 0.0
    """Average of the seconds starved in a step while groups are gathered."""
    seconds: float = 0.0
    pinned_s: float = 0.0
    starved_s: float = 0.0
    under_way_s: float = 0.0
    """Batches x seconds."""


def paced(pace: Pace, step: Step, most: float) -> Pace:
    """Return the pace after another step. ``most`` is the number of batches that the bound allows to be live."""
    seconds = HISTORY_WEIGHT * pace.seconds + step.seconds
    pinned_s = HISTORY_WEIGHT * pace.pinned_s + step.pinned_s
    starved_s = HISTORY_WEIGHT * pace.starved_s + step.starved_s
    under_way_s = HISTORY_WEIGHT * pace.under_way_s + step.under_way * step.seconds
    wait_s = (1 - HISTORY_WEIGHT) * (pinned_s + starved_s)  # average of a step
    if pace.gathers:
        gather_s = HISTORY_WEIGHT * pace.gather_s + (1 - HISTORY_WEIGHT) * step.starved_s
    else:
        gather_s = GATHER_COST_WEIGHT * pace.gather_s
    pinned = pinned_s > MAX_PINNED_SHARE * seconds
    gathers = pinned and wait_s > MIN_WAIT * gather_s
    if gathers:
        margin, lead = pace.margin, 0.0
    else:
        waited_excess = (step.pinned_s + step.starved_s) / step.seconds - WAIT_SHARE
        margin = min(most, max(0.0, pace.margin + MARGIN_GAIN * waited_excess))
        # Divide by the time that was not starved: without starvation the same groups would fill only that time.
        fed_s = max(seconds - starved_s, 1e-9)
        lead = most if pinned else min(most, under_way_s / fed_s + GATHERING_BATCHES + margin)
    return Pace(
        lead=lead,
        margin=margin,
        gathers=gathers,
        gather_s=gather_s,
        seconds=seconds,
        pinned_s=pinned_s,
        starved_s=starved_s,
        under_way_s=under_way_s,
    )


def first_paced(pace: Pace, starved_s: float, most: float) -> Pace:
    """Return the pace after the first step of a run, which starts with everything that the bound admits, as gathered
    groups do. ``starved_s``: seconds that the trainer waited since the first lease."""
    return msgspec.structs.replace(pace, gather_s=starved_s / most)


def admitted(snapshot: Snapshot, admission: Admission) -> Snapshot:
    """Return the snapshot with ``next`` cut to the groups that ``admission`` allows to start."""
    if admission == "fill" or not snapshot.next or _admits_all(snapshot):
        return snapshot
    live = snapshot.leased + snapshot.pushed + snapshot.occupied - snapshot.spares
    if snapshot.token_bound:
        live += snapshot.sealed - snapshot.training
    makes_a_batch = snapshot.token_bound or not snapshot.sealed
    lead = max(1.0, snapshot.lead) if makes_a_batch else snapshot.lead
    few = max(0, math.ceil(lead * snapshot.batch_size) - live)
    return msgspec.structs.replace(snapshot, next=snapshot.next[:few])


def _admits_all(snapshot: Snapshot) -> bool:
    """Return True if now is the time to start everything that the bound admits (trajectory bound only)."""
    if snapshot.token_bound:
        return False
    gathered = not snapshot.sealed or max(snapshot.room.values()) > MAX_GATHERED_ROUNDS * places(snapshot)
    return snapshot.waits or (not snapshot.lead and gathered)


def places(snapshot: Snapshot) -> int:
    """Return the number of groups that engines could decode in addition to those they have."""
    started = snapshot.group_size
    return sum(
        max(0, (i.slots // started if i.slots else i.capacity) - i.held) for i in snapshot.instances if not i.on_hold
    )
