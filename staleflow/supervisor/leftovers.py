"""Versions of the weights that runs of this user left in shared memory when they were killed."""

import logging

from staleflow.process import memory_folder
from staleflow.supervisor import rundir

log = logging.getLogger(__name__)


def sweep() -> None:
    """Remove the folders in shared memory of runs that died: their directory is gone, or has lost its supervisor.

    Servers that were started by hand have no supervisor, and may be between two starts: their folders stay. So do
    folders in use: a relay survives its supervisor, and the disk of another container is not visible here.
    """
    for folder in list(memory_folder.disk_folders()):
        run_dir = folder.parent if folder.name == "parameters" else folder.parent.parent  # of a relay
        if (rundir.lost_supervisor(run_dir) or not folder.is_dir()) and memory_folder.remove(folder):
            log.info("removed %s, which a run left in memory that was killed", memory_folder.path_of(folder))
