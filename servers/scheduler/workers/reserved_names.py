"""Which roles may use which names.

A name that begins with the word of a role ("trainer", "trajectories-0") or of a stage ("reward-2") is reserved for that
role, whether a process has it at the moment or not: a name that another role has taken keeps its owner out.
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
"""By first word of a name: the roles that may use it."""
_FIRST_WORD = re.compile(r"[^-.]*")


def reserved_for(name: str, stages: Collection[str]) -> tuple[str, ...] | None:
    """Return the roles that may use ``name``; None if every role may. ``stages``: those of the run."""
    found = _FIRST_WORD.match(name)
    word = found.group() if found else ""
    return ("stage",) if word in stages else _ROLES.get(word)


def name_objection(name: str, role: str, stages: Collection[str]) -> str | None:
    """Return why a process of ``role`` may not use ``name``, or None."""
    roles = reserved_for(name, stages)
    if roles is None or role in roles:
        return None
    owners = f"processes of role {roles[0]}" if roles else "the scheduler itself"
    return f'name is "{name}", which is reserved for {owners}; use a name with another first word'
