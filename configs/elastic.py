"""``[rollout.elastic]``: limits within which the number of rollout workers follows the measured load."""

from typing import Annotated

from msgspec import Meta

from staleflow.configs.section import Processes, Section


class Elastic(Section, frozen=True, kw_only=True):
    """Start and stop rollout workers while the run trains, as the scheduler recommends from measured shares of time.
    Without limits it only recommends, see ``staleflow status``. ``--resume`` may change them.
    """

    min_workers: Processes = 1
    """Minimum number of workers that stay."""
    max_workers: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Maximum number of workers that the supervisor starts; at least the number with which the run starts. GPUs and
    cores are divided among this number from the start. With pools, further workers are of the last pool. 0: the number
    of workers does not change."""
