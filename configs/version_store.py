"""Where versions of the weights lie: on the disk of the run directory, or in shared memory. Pure."""

from staleflow.configs.schema import Parameters

BESIDE_NEWEST = 3
"""Versions in the folder beside the newest ones: the checkpoint's, the one that is being written, the spare file."""


def room_for(parameters: Parameters, nbytes: int) -> int:
    """Return the bytes of all versions that are stored at once, if one has ``nbytes``."""
    return (parameters.keep_versions + BESIDE_NEWEST) * nbytes


def may_use_memory(parameters: Parameters) -> bool:
    """Return False if versions always lie on disk: by the key, or because they must survive a power failure."""
    return parameters.store != "disk" and parameters.durability != "power"


def in_memory(parameters: Parameters, nbytes: int, free: int) -> bool:
    """Return True if versions of ``nbytes`` lie in memory, of which ``free`` bytes are free. With "auto" they take at
    most half of it."""
    if not may_use_memory(parameters):
        return False
    return parameters.store == "memory" or room_for(parameters, nbytes) <= free // 2
