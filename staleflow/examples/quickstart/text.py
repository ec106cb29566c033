"""The text that the quickstart's model has read before it learns by reward, and the characters it is written in.

Text from the world is noisy, and so is this: it gives right answers only, but many writers put a question mark behind
theirs. A model that read it, and not for long, adds fairly well and writes in both manners in their proportions; the
reward then says which manner is wanted and which sums were wrong. Held-out problems are never in it.

Rules of this file: standard library only, and the same arguments always give the same text.
"""

import random
from collections.abc import Iterator, Mapping, Sequence

HEDGE = "?"
CHARACTERS = "0123456789+-=" + HEDGE
"""Every character that a prompt or an answer may have; each is one token."""


def examples(rows: Sequence[Mapping[str, str]], seed: int, *, hedged: float = 0.5) -> Iterator[tuple[str, str]]:
    """Endless (prompt, what somebody wrote behind it), drawn from ``rows`` with replacement.

    ``hedged`` is the share of answers with a question mark behind them, drawn anew for each example: the same problem
    comes in both manners.
    """
    rng = random.Random(seed)
    while True:
        row = rng.choice(rows)
        yield row["prompt"], row["answer"] + HEDGE if rng.random() < hedged else row["answer"]
