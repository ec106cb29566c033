"""One point of the comparison: a shape at a bound, under every choice of this service and the rule of every peer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.papers_runs import Campaign, Interval, Outcome
from bench.papers_shapes import Shape
from staleflow.sim.peers.conclusion import NEGLIGIBLE, conclusion
from staleflow.sim.peers.presets import PEERS
from staleflow.sim.result import Result

DEFAULT = "staleflow wait"
TOKEN = "staleflow token"
OWN: dict[str, tuple[str, ...]] = {
    DEFAULT: (),
    "staleflow fill": ("coordination.admission=fill", "coordination.routing=least_loaded"),
    "staleflow clustered": (
        "coordination.composition=length_clustered",
        "coordination.ranker=learned",
        "coordination.lookahead=4",
    ),
    TOKEN: ("staleness.bound=token",),
}
"""Choices of this service, as overrides of its defaults."""
LOSSLESS = [name for name in OWN if name != TOKEN]

Outcomes = Sequence[Outcome]


@dataclass(frozen=True, slots=True)
class Equal:
    """A peer under its largest setting with which no trained group is older than the bound."""

    setting: int
    outcomes: Outcomes


@dataclass(frozen=True, slots=True)
class Point:
    """Outcomes of a shape at a bound, one for each seed."""

    shape: Shape
    eta: int
    own: Mapping[str, Outcomes]
    peers: Mapping[str, Outcomes]
    """Each peer with the bound as its own setting, whatever it makes of it."""
    equal: Mapping[str, Equal]
    """Peers that keep the bound, if need be with a smaller setting."""

    @classmethod
    def of(cls, campaign: Campaign, shape: Shape, eta: int, seeds: int) -> "Point":
        def outcomes(peer: str, setting: int, *overrides: str) -> Outcomes:
            configs = [shape.world(*overrides, eta=setting, seed=seed) for seed in range(seeds)]
            return campaign.of(configs, peer)

        own = {name: outcomes("", eta, *overrides) for name, overrides in OWN.items()}
        peers = {name: outcomes(name, eta) for name in PEERS}
        equal: dict[str, Equal] = {}
        for name in PEERS:
            for setting in range(eta, -1, -1):
                some = outcomes(name, setting)
                if oldest(some) <= eta:
                    equal[name] = Equal(setting, some)
                    break
        return cls(shape, eta, own, peers, equal)

    def best(self) -> str:
        """Return the fastest of our choices that lose nothing."""
        return max(LOSSLESS, key=lambda name: speed(self.own[name]))

    def rival(self) -> str:
        """Return the fastest peer that keeps the bound and loses nothing."""
        free = [name for name, equal in self.equal.items() if loses_nothing(equal.outcomes)]
        return max(free, key=lambda name: speed(self.equal[name].outcomes))

    def systems(self) -> dict[str, Outcomes]:
        """Return all of our choices, then all peers at their own setting."""
        return {**self.own, **self.peers}

    def conclusion(self) -> list[str]:
        return conclusion([_result(name, outcomes, self.eta) for name, outcomes in self.systems().items()])


def speed(outcomes: Outcomes) -> float:
    return fmean(one.steps_per_min for one in outcomes)


def oldest(outcomes: Outcomes) -> int:
    return max(one.staleness_max for one in outcomes)


def loses_nothing(outcomes: Outcomes) -> bool:
    return all(fmean(shares) < NEGLIGIBLE for shares in ([o.discarded for o in outcomes], [o.masked for o in outcomes]))


def ratio(ours: Outcomes, theirs: Outcomes) -> Interval:
    """Return our trained tokens a minute over theirs, seed by seed; masked tokens do not count."""
    return Interval.of([a.net / b.net for a, b in zip(ours, theirs, strict=True)])


def _result(name: str, outcomes: Outcomes, eta: int) -> Result:
    """Return the means over the seeds, as far as a conclusion needs them."""
    return Result(
        name=name,
        seconds=0.0,
        steps=[],
        steps_per_min=speed(outcomes),
        trainer_limit=0.0,
        rollout_limit=0.0,
        staleness_mean=fmean(one.staleness_mean for one in outcomes),
        staleness_max=oldest(outcomes),
        ages={},
        violations=sum(one.violations for one in outcomes if one.staleness_max > eta),
        discarded=fmean(one.discarded for one in outcomes),
        filtered=0.0,
        masked=fmean(one.masked for one in outcomes),
        length_bias=fmean(one.length_bias for one in outcomes),
        engine_idle=0.0,
        trainer_idle=0.0,
        engines=[],
        drawn=[],
        trained=[],
    )
