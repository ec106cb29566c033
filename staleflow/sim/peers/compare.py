"""Compare one configuration under every choice of the bound and under the rules of other systems: one row each.

All rows have the same engines, prompts, lengths, trainer and seed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import msgspec

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading import overrides as dotted
from staleflow.configs.loading.explain import decode
from staleflow.configs.loading.presence import RANKER, check_package
from staleflow.configs.rules.checks import consistent
from staleflow.configs.schema import Config
from staleflow.sim.peers.presets import PEERS
from staleflow.sim.peers.run import simulate_peer
from staleflow.sim.result import Result
from staleflow.sim.simulate import simulate

_STRICT = ("staleness.bound=trajectory", "coordination.composition=iid")


def _share(speed: float, limit: float) -> str:
    """Return the share of a limit. The limit is 0 for a trainer that takes no time, and for engines that left before
    the counted steps were trained."""
    return f"{speed / limit:.3f}" if limit else "-"


OWN: dict[str, tuple[str, ...]] = {
    "wait": (*_STRICT, "staleness.on_overdue=wait"),
    "clustered": (
        "staleness.bound=trajectory",
        "staleness.on_overdue=wait",
        "coordination.composition=length_clustered",
        "coordination.ranker=learned",
    ),
    "token": ("staleness.bound=token", "staleness.on_overdue=wait", "coordination.composition=iid"),
    "truncate": (*_STRICT, "staleness.on_overdue=truncate"),
    "retry": (*_STRICT, "staleness.on_overdue=retry"),
    "drop": (*_STRICT, "staleness.on_overdue=drop"),
}
"""The choices of a run of this service, as overrides of the configuration."""

COLUMNS: tuple[tuple[str, Callable[[Result], str]], ...] = (
    ("steps/min", lambda result: f"{result.steps_per_min:.3f}"),
    ("÷\u00a0trainer limit", lambda result: _share(result.steps_per_min, result.trainer_limit)),
    ("÷\u00a0rollout limit", lambda result: _share(result.steps_per_min, result.rollout_limit)),
    ("staleness mean\u00a0/\u00a0max", lambda result: f"{result.staleness_mean:.2f} / {result.staleness_max}"),
    ("violations", lambda result: f"{result.violations:,}"),
    ("discarded tokens", lambda result: f"{result.discarded:.1%}"),
    ("masked tokens", lambda result: f"{result.masked:.1%}"),
    ("length bias", lambda result: f"{result.length_bias:.3f}"),
    ("engine idle", lambda result: f"{result.engine_idle:.1%}"),
    ("trainer idle", lambda result: f"{result.trainer_idle:.1%}"),
)
"""Columns of a row."""


def compare(config: Config, peers: Sequence[str], *, steps: int | None = None) -> Iterator[Result]:
    """Yield one result after the other: the choices of ``OWN``, then ``peers``. Raises ``ConfigError`` before the first
    one."""
    for name in peers:
        if name not in PEERS:
            raise ConfigError("--peers", name, f"it must be one of {', '.join(PEERS)}")
    check_package("coordination.ranker", "learned", "sklearn", RANKER)
    own = {name: changed(config, overrides) for name, overrides in OWN.items()}
    return _results(config, own, peers, steps)


def _results(config: Config, own: dict[str, Config], peers: Sequence[str], steps: int | None) -> Iterator[Result]:
    for name, chosen in own.items():
        yield replace(simulate(chosen, steps=steps), name=f"staleflow {name}")
    for name in peers:
        yield simulate_peer(name, config, steps=steps)


def changed(config: Config, overrides: Sequence[str]) -> Config:
    """Return the configuration with ``key=value`` overrides, after checking that its keys agree with each other."""
    table = dotted.apply(msgspec.to_builtins(config), [dotted.parse(override) for override in overrides])
    other = decode(table)
    consistent(other)
    return other
