"""Entry point of the head, the machine of the servers, when a batch system (Slurm) starts it.

    python -m staleflow.launch.head RUN_DIR GPUS-OF-A-MACHINE

Run servers and stage workers under a supervisor until the run ends, and print a line every few seconds. The
configuration in the run directory contains the addresses to bind. Exit codes are those of ``staleflow run``.
"""

import sys
from pathlib import Path

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import read_run
from staleflow.launch.placement import head_stages
from staleflow.launch.slurm import SCRIPT
from staleflow.monitor.plain import PlainView
from staleflow.report.writers import with_writers
from staleflow.supervisor import rundir
from staleflow.supervisor.addresses import check_free
from staleflow.supervisor.supervisor import Supervisor


def main() -> int:
    """Run the head; a run directory that contains a run already is resumed."""
    run_dir = Path(sys.argv[1])
    gpus = int(sys.argv[2])
    try:
        config = read_run(run_dir)
        check_free(config, run_dir)
        hint = f"sbatch {run_dir / SCRIPT}"
        with rundir.claim(config, run_dir, resume=True, command=hint):
            view = with_writers(PlainView(sys.stdout, config.name, run_dir=run_dir), config, run_dir)
            workers = head_stages(config, run_dir, gpus)
            return Supervisor(config, run_dir, view, hint, workers).run()
    except ConfigError as error:
        print(f"staleflow: {error}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
