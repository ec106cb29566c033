"""Sockets of a process, from its configuration and role: which key it uses, and which keys its endpoints admit."""

import os
from pathlib import Path

from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config, Security
from staleflow.net.allow_list import AllowList
from staleflow.net.keys import ALLOWED, VARIABLE, Key, read_key
from staleflow.net.permissions import Role
from staleflow.net.transport import SOCKETS, Sockets

OBSERVER_ROLES = (Role.MONITOR, Role.ADMIN)
"""Roles of observers, in the order in which their keys are tried."""


def server_sockets(config: Config) -> Sockets:
    """Return the sockets of a server: with keys, its own and the allow-list beside it. Raise ``ConfigError`` if they
    are unusable."""
    security = config.security
    if security.insecure:
        return Sockets(insecure=True)
    if (path := _key_path(security, (Role.SERVER,))) is None:
        return SOCKETS
    return Sockets(_own_key(path, (Role.SERVER,)), AllowList(path.parent / ALLOWED))


def client_sockets(security: Security | None, *roles: Role) -> Sockets:
    """Return the sockets of a process that only connects, with a key of one of ``roles``. Raise ``ConfigError`` if
    unusable.

    ``security`` None: the run's configuration is not known yet, so only the environment can name a key.
    """
    path = _key_path(security, roles)
    return SOCKETS if path is None else Sockets(_own_key(path, roles))


def check_keys(config: Config) -> None:
    """Raise ``ConfigError`` unless every process that ``staleflow run`` starts will find its key."""
    if config.security.keys:
        folder = Path(config.security.keys)
        for role in (Role.SERVER, Role.ROLLOUT, Role.STAGE, Role.TRAINER):
            _own_key(folder / f"{role}.key", (role,))
        AllowList(folder / ALLOWED)


def security_mode(config: Config) -> str:
    """Return the security mode for display: keys, local or insecure."""
    if config.security.insecure:
        return "insecure"
    return "keys" if config.security.keys else "local"


def _key_path(security: Security | None, roles: tuple[Role, ...]) -> Path | None:
    named = os.environ.get(VARIABLE, "")
    if named and not Path(named).is_dir():
        return Path(named)
    if not named and (security is None or not security.keys):
        return None
    folder = Path(named or (security.keys if security else ""))
    paths = [folder / f"{role}.key" for role in roles]
    return next((path for path in paths if path.exists()), paths[0])


def _own_key(path: Path, roles: tuple[Role, ...]) -> Key:
    key = read_key(path)
    if key.role not in roles:
        allowed = f"its role is {key.role}; here it must be {' or '.join(roles)}"
        raise ConfigError("key file", str(path), allowed)
    return key
