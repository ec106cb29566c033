"""Compare the ledger with the paper's versioned buffers in every admission, batch and readiness, on 10^6 events.

The same two machines and the same comparisons as ``tests/protocols/consistency/test_model.py``, with wider limits, an
event chosen by weight instead of by hypothesis, and a new history every few hundred events. The comparison ends at the
first difference, with the seed of its history.

    python -m bench.ledger_model [--events 1000000] [--seed 0]
"""

import random
import time
from collections import Counter

import click

from tests.protocols.consistency.test_model import SameAsTheBuffers

HISTORY = 300
"""Events of one history."""
MAX_STALENESS, LARGEST_BATCH = 4, 6
WEIGHTS = {
    "reserve": 36,
    "push": 10,
    "occupy": 10,
    "finish": 40,
    "release": 4,
    "drop": 2,
    "migrate": 2,
    "quarantine": 1,
    "train": 14,
    "checkpoint": 1,
    "rollback": 1,
    "restart": 1,
}


def compare(seed: int, events: int) -> Counter[str]:
    """Run one history of ``events`` events; return the counts of events. ``AssertionError`` at a difference."""
    draw = random.Random(seed)
    pair = SameAsTheBuffers()
    pair.begin(
        max_staleness=draw.randint(0, MAX_STALENESS),
        batch_size=draw.randint(1, LARGEST_BATCH),
        token_bound=draw.random() < 0.25,
    )
    done: Counter[str] = Counter()
    while done.total() < events:
        (what,) = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))
        if what == "train" and pair.scene.machine.next_step <= pair.scene.machine.version:
            continue
        _do(pair, what, draw)
        pair.same_state()
        pair.pins_are_what_keeps_the_step()
        done[what] += 1
    return done


def _do(pair: SameAsTheBuffers, what: str, draw: random.Random) -> None:
    index = draw.randrange(1 << 16)
    match what:
        case "reserve":
            pair.reserve(age=draw.randint(-1, 4), again=draw.random() < 0.2, index=index)
        case "push":
            pair.push(index=index, age=draw.randint(0, 3))
        case "release":
            pair.release(index=index, filtered=draw.random() < 0.5)
        case "rollback":
            pair.rollback(back=draw.randint(1, 3))
        case "checkpoint":
            pair.checkpoint(keep=draw.randint(1, 3))
        case "occupy" | "finish" | "drop" | "migrate" | "quarantine":
            getattr(pair, what)(index=index)
        case _:
            getattr(pair, what)()


@click.command()
@click.option("--events", default=1_000_000, show_default=True, type=click.IntRange(min=1))
@click.option("--seed", default=0, show_default=True)
def main(events: int, seed: int) -> None:
    """Compare, and print the counts."""
    started = time.perf_counter()
    total: Counter[str] = Counter()
    while (left := events - total.total()) > 0:
        try:
            total += compare(seed, min(HISTORY, left))
        except AssertionError as error:
            raise click.ClickException(f"the history of seed {seed} differs: {error}") from error
        seed += 1
    kinds = ", ".join(f"{count:,} {what}" for what, count in total.most_common())
    click.echo(f"{total.total():,} events, no difference, {time.perf_counter() - started:.0f} s: {kinds}")


if __name__ == "__main__":
    main()
