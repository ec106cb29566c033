"""A rollout worker whose tokens encode the version that wrote them: ``token // 256``. Runs as a separate process."""

import sys
from pathlib import Path

import numpy as np

from staleflow.clients.rollout import main
from staleflow.clients.rollout.engines.simulated import SimulatedEngine
from staleflow.configs.loading.load import addresses, read_run


class Marked(SimulatedEngine):
    """Engine that adds ``256 * version`` to each token except the stop token."""

    def _write(self) -> None:
        super()._write()
        rows = self._rows
        newest = np.arange(rows.size), rows.count[: rows.size] - 1
        drawn = rows.token_ids[newest]
        rows.token_ids[newest] = np.where(drawn == 0, 0, drawn + 256 * self.version)


if __name__ == "__main__":
    run_dir, name = Path(sys.argv[1]), sys.argv[2]
    config = read_run(run_dir)
    main.__dict__["SimulatedEngine"] = Marked
    sys.exit(main.attach(config, run_dir, name, addresses(config, run_dir).scheduler))
