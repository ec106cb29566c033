"""Rollout workers that do not run, but may (``rollout.elastic``).

The scheduler publishes which workers it wants. It lets the others finish their groups and leave; they exit with 0 by
themselves and are not restarted. No process is killed.
"""

from collections.abc import Collection, Sequence

from staleflow.supervisor.roles import Role


class Spares:
    """Roles of the rollout workers that do not run now."""

    def __init__(self, roles: Sequence[Role]) -> None:
        self._roles = {role.name: role for role in roles}

    def take(self, wanted: Collection[str]) -> list[Role]:
        """Remove and return the roles that should run."""
        return [self._roles.pop(name) for name in wanted if name in self._roles]

    def keep(self, role: Role, wanted: Collection[str]) -> bool:
        """Add the role of a worker that has exited, if it is no longer wanted; return whether it is not."""
        if not wanted or not role.elastic or role.name in wanted:
            return False
        self._roles[role.name] = role
        return True
