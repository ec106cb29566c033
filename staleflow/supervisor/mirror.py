"""Check the store of ``parameters.mirror`` before a run starts. A run that has started never waits for it."""

import logging

from staleflow.clients.background import LoopThread
from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config
from staleflow.store.objects import NoAccess, Objects, StoreError

log = logging.getLogger(__name__)


def check_access(config: Config) -> None:
    """Raise ``ConfigError`` if the bucket is missing, or its credentials are. Log a warning if it is not reachable
    now: the parameter server tries again."""
    if not (mirror := config.parameters.mirror):
        return
    problem = why_unusable(mirror)
    if isinstance(problem, NoAccess) or (problem and mirror.startswith("file:")):
        raise ConfigError("parameters.mirror", mirror, f"it must be a store that this process may write to: {problem}")
    if problem:
        log.warning("the mirror does not answer yet: %s", problem)


def why_unusable(mirror: str) -> StoreError | None:
    """Write, read and delete an object; return the error, or None if that works."""
    thread = LoopThread("mirror")
    try:
        thread.result(Objects(mirror).probe())
    except StoreError as error:
        return error
    finally:
        thread.close(lambda: None)
    return None
