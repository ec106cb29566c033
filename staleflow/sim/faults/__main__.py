"""``python -m staleflow.sim.faults SEED``: replay one seed, and print the trace lines about its first violation."""

import argparse
import sys
from pathlib import Path

from staleflow.sim.faults.run import Outcome, run_seed
from staleflow.sim.virtual import BEGIN_S


def main() -> int:
    """Return 0 if every rule held, else 1."""
    parser = argparse.ArgumentParser(prog="python -m staleflow.sim.faults")
    parser.add_argument("seed", type=int)
    parser.add_argument("--events", type=int, default=10_000, help="lines of the trace after which the faults stop")
    parser.add_argument("--keep", type=Path, help="an empty directory for the trace and the stores")
    arguments = parser.parse_args()
    outcome = run_seed(arguments.seed, arguments.events, arguments.keep)
    sys.stdout.write(describe(outcome))
    return 0 if outcome.ok else 1


def describe(outcome: Outcome) -> str:
    """Format the outcome for people."""
    lines = [
        f"seed {outcome.seed}: {outcome.events} events, {outcome.seconds - BEGIN_S:.0f} s of virtual time, "
        f"{sum(outcome.faults.values())} faults, hash {outcome.trace_hash}",
    ]
    if outcome.ok:
        return lines[0] + ": everything held\n"
    lines += [f"  {rule}: {why}" for rule, why in outcome.violations[:20]]
    lines += ["", f"again: {outcome.replay}", "the story of the first one:", *outcome.story, ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
