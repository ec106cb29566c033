"""Synchronous training: generate a batch, train it, load the weights."""

from staleflow.sim.peers.rule import Rule


class Sync(Rule):
    """After each step, with the new weights everywhere, exactly one batch starts, and training waits for all of it.

    The usual loop without asynchrony; verl's default trainer, and staleness 0 in PSRL's documentation (Somoku/psrl,
    docs/design/staleness_control.md). A step lasts as long as its longest trajectory plus the training. Bound in
    versions: 0, by construction. Nothing is lost.
    """

    def begin(self) -> None:
        pool = self.pool
        if pool.training or not pool.loaded():
            return
        while len(pool.running) + len(pool.finished) < pool.batch_size and pool.begin():
            pass
