"""Read a comparison: which choice is fastest at no cost, what the faster ones cost, and which rows exceed the bound."""

from collections.abc import Sequence

from staleflow.sim.result import Result

NEGLIGIBLE = 0.005
"""A share of tokens, or a deviation of the length bias from 1, below which a row counts as free of that cost."""

CHOICES = {
    "wait": "an overdue group keeps its place; the trainer waits for it",
    "clustered": "as wait, with groups of similar expected length in one batch",
    "token": "the bound holds for each token; older tokens are masked in the loss",
    "truncate": "an overdue group is cut and trained as far as it is",
    "retry": "an overdue group is discarded, and its prompt is generated again",
    "drop": "an overdue group is discarded, and its prompt is not generated again",
}
"""Rows of this service, by the name behind "staleflow"."""

LEGEND = (
    *(f"staleflow {name}: {meaning}" for name, meaning in CHOICES.items()),
    "other names: the admission and discard rules of those systems, on the same engines and trainer",
    "staleness: step minus the oldest version among a group's trained tokens",
    "violations: trained groups or tokens that exceed the bound",
    "length bias: mean trained length divided by the mean generated length; below 1, long trajectories are missing",
)


def conclusion(results: Sequence[Result]) -> list[str]:
    """Return up to three sentences about ``results``; rows of this service are named "staleflow …"."""
    sentences: list[str] = []
    free = [result for result in results if not result.violations and not _costs(result)]
    own, others = _fastest(free, own=True), _fastest(free, own=False)
    if own is not None:
        sentence = f"Fastest without violations, lost tokens or length bias: {_speed(own)}"
        if others is not None and others.steps_per_min:
            factor = own.steps_per_min / others.steps_per_min
            sentence += f", {factor:.2f} times the fastest other system that does the same: {_speed(others)}"
        sentences.append(f"{sentence}.")
    best = own.steps_per_min if own is not None else 0.0
    dearer = [r for r in results if not r.violations and _costs(r) and r.steps_per_min > best]
    if dearer:
        listed = "; ".join(f"{_speed(r)}: {_costs(r)}" for r in sorted(dearer, key=lambda r: -r.steps_per_min))
        sentences.append(f"Faster at a cost: {listed}.")
    beyond = [result for result in results if result.violations]
    if beyond:
        sentences.append(f"Beyond the bound: {', '.join(f'{r.name} ({r.violations:,} violations)' for r in beyond)}.")
    return sentences


def _fastest(results: Sequence[Result], *, own: bool) -> Result | None:
    chosen = [result for result in results if result.name.startswith("staleflow ") is own]
    return max(chosen, key=lambda result: result.steps_per_min, default=None)


def _speed(result: Result) -> str:
    return f"{result.name} ({result.steps_per_min:.3f} steps/min)"


def _costs(result: Result) -> str:
    """Return the costs of a row in words, or "" when it has none."""
    costs: list[str] = []
    if result.discarded >= NEGLIGIBLE:
        costs.append(f"{result.discarded:.1%} of the tokens discarded")
    if result.masked >= NEGLIGIBLE:
        costs.append(f"{result.masked:.1%} of the tokens masked")
    if abs(result.length_bias - 1) >= NEGLIGIBLE:
        costs.append(f"length bias {result.length_bias:.3f}")
    return ", ".join(costs)
