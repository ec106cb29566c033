"""Tables of the comparison with the papers, in Markdown."""

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from bench.papers_points import DEFAULT, OWN, TOKEN, Outcomes, Point, oldest, ratio
from bench.papers_runs import Interval
from bench.papers_shapes import Shape
from staleflow.sim.peers.conclusion import NEGLIGIBLE
from staleflow.sim.peers.presets import PEERS


def shapes(chosen: Sequence[Shape]) -> str:
    head = ("shape", "model", "engines", "trainer", "groups x samples", "longest", "size", "taken from")
    return table("Shapes", head, [shape.row for shape in chosen])


def systems(points: Sequence[Point]) -> str:
    """Return the table of one shape: all systems, with the bound as the setting of each."""
    shape = points[0].shape
    head = ["system"]
    for point in points:
        head += [f"η {point.eta}: steps/min", "age mean / max", "lost"]
    rows = [
        [name, *(cell for point in points for cell in _cells(point.systems()[name], point.eta))]
        for name in (*OWN, *PEERS)
    ]
    limits = ", ".join(f"{fmean(one.trainer_limit for one in point.own[DEFAULT]):.3f}" for point in points)
    busy = max(one.scheduler_busy for point in points for outcomes in point.own.values() for one in outcomes)
    etas = ", ".join(str(point.eta) for point in points)
    note = f"Limit of the trainer at η {etas}: {limits} steps/min. Our scheduler: busy at most {busy:.2%} of the time."
    text = [f"η {point.eta}. {' '.join(point.conclusion())}" for point in points]
    return "\n\n".join([table(shape.name, head, rows), note, *text])


def _cells(outcomes: Outcomes, eta: int) -> tuple[str, str, str]:
    most = oldest(outcomes)
    age = f"{fmean(one.staleness_mean for one in outcomes):.2f} / {f'**{most}**' if most > eta else most}"
    costs = [
        f"{share:.0%} {what}"
        for what, share in (
            ("discarded", fmean(one.discarded for one in outcomes)),
            ("masked", fmean(one.masked for one in outcomes)),
        )
        if share >= NEGLIGIBLE
    ]
    if costs:
        costs.append(f"net {fmean(one.net for one in outcomes):.3f}")
    return str(Interval.of([one.steps_per_min for one in outcomes])), age, ", ".join(costs)


def ratios(points: Sequence[Point]) -> str:
    """Return average and maximum of our throughput over that of each peer, over all shapes and bounds."""
    head = (
        "peer",
        "points",
        "default",
        "best lossless choice",
        "token bound",
        "default, over the peer at its own setting",
        "its oldest group",
        "it discards",
    )
    rows: list[Sequence[str]] = []
    for name in PEERS:
        kept = [point for point in points if name in point.equal]
        own: list[Callable[[Point], Outcomes]] = [
            lambda point: point.own[DEFAULT],
            lambda point: point.own[point.best()],
            lambda point: point.own[TOKEN],
        ]
        equal = [_spread(ratio(of(point), point.equal[name].outcomes).value for point in kept) for of in own]
        free = _spread(ratio(point.own[DEFAULT], point.peers[name]).value for point in points)
        most = str(max(oldest(point.peers[name]) for point in points))
        discarded = fmean(one.discarded for point in points for one in point.peers[name])
        cost = f"{discarded:.0%}" if discarded >= NEGLIGIBLE else ""
        rows.append((name, f"{len(kept)} of {len(points)}", *equal, free, most, cost))
    return table("Average and maximum of our trained tokens a minute over each peer", head, rows)


def by_shape(points: Sequence[Point]) -> str:
    """Return our throughput over the synchronous loop and over the fastest lossless peer within the bound, by shape."""
    head = ("shape", "η", "default / sync", "best / sync", "fastest peer", "default / it", "our best", "best / it")
    rows: list[Sequence[str]] = []
    for point in points:
        one, two, three, four = map(str, _beside(point))
        best = point.best().removeprefix("staleflow ")
        rows.append((point.shape.name, str(point.eta), one, two, point.rival(), three, best, four))
    for name in dict.fromkeys(point.shape.name for point in points):
        some = [_beside(point) for point in points if point.shape.name == name]
        one, two, three, four = (_spread(interval.value for interval in column) for column in zip(*some, strict=True))
        rows.append((f"**{name}**", "average / maximum", one, two, "", three, "", four))
    return table("Beside the synchronous loop and the fastest peer that keeps the bound and loses nothing", head, rows)


def _beside(point: Point) -> tuple[Interval, Interval, Interval, Interval]:
    """Return default and best lossless choice over the synchronous loop, then both over the fastest lossless peer."""
    sync, rival = point.equal["sync"].outcomes, point.equal[point.rival()].outcomes
    default, best = point.own[DEFAULT], point.own[point.best()]
    return ratio(default, sync), ratio(best, sync), ratio(default, rival), ratio(best, rival)


def _spread(values: Iterable[float]) -> str:
    """Return average and maximum."""
    some = list(values)
    return f"{fmean(some):.2f} / {max(some):.2f}" if some else "-"


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join((f"## {title}", "", *(f"| {' | '.join(line)} |" for line in lines)))
