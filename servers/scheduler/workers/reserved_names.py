"""Names that are reserved for a role.

A name whose first word is a role ("trainer", "trajectories-0") or a stage ("reward-2") is reserved for that role, even
while no process uses it: a process of another role with that name would lock its owner out.
"""

import re
from collections.abc import Collection

from staleflow.net.security import OBSERVER_ROLES

_ROLES: dict[str, tuple[str, ...]] = {
    "rollout": ("rollout",),
    "stage": ("stage",),
    "trainer": ("trainer",),
    "trajectories": ("trajectories",),
    "parameters": ("parameters",),
    "relay": ("relay",),
    "scheduler": (),
    "monitor": OBSERVER_ROLES,
    "admin": OBSERVER_ROLES,
}
"""Roles that may use a name, by the first word of the name."""
_FIRST_WORD = re.compile(r"[^-.]*")


def reserved_for(name: str, stages: Collection[str]) -> tuple[str, ...] | None:
    """Return the roles that may use ``name``; None if every role may. ``stages``: the stages of the run."""
    match = _FIRST_WORD.match(name)
    word = match.group() if match else ""
    return ("stage",) if word in stages else _ROLES.get(word)


def name_objection(name: str, role: str, stages: Collection[str]) -> str | None:
    """Return why a process of ``role`` may not use ``name``, or None."""
    roles = reserved_for(name, stages)
    if roles is None or role in roles:
        return None
    owners = f"processes of role {roles[0]}" if roles else "the scheduler itself"
    return f'name is "{name}", which is reserved for {owners}; use a name with another first word'
