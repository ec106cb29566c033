"""Identity of the run that a store belongs to. Settings that the staleness bound depends on may not change in a run."""

import secrets
from pathlib import Path

import msgspec

from staleflow.configs import resumable
from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import config_sha, difference, from_json, to_json
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.limits import Limits
from staleflow.store.base import Store, Write

_KEY = b"identity"


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of a run, stored with the first transaction of each start; ``incarnation`` counts the starts."""

    run: str
    config_sha: str
    config: bytes
    """The configuration, canonical JSON."""
    incarnation: int


def identify(store: Store, config: Config, run_dir: Path, run: str = "") -> Identity:
    """Return the identity of this start. Raises ``ConfigError`` if the store belongs to another configuration.

    The keys of ``resumable`` may differ. ``run``: name of a new run, generated if empty.
    """
    old, sha = stored(store), config_sha(config)
    if old is None:
        run = run or f"{config.name}-{secrets.token_hex(4)}"
        return Identity(run=run, config_sha=sha, config=to_json(config), incarnation=1)
    if old.config_sha != sha:
        _check_resumable(run_dir, old, config)
    return msgspec.structs.replace(old, config_sha=sha, config=to_json(config), incarnation=old.incarnation + 1)


def stored(store: Store) -> Identity | None:
    """Return the identity of the newest start; None for a new store."""
    with store.read() as txn:
        raw = txn.get("meta", _KEY)
    return None if raw is None else msgspec.msgpack.decode(raw, type=Identity)


def _steps(identity: Identity) -> int:
    """Return ``trainer.steps`` of the newest start; 0 if this version of staleflow cannot read the configuration."""
    try:
        return from_json(identity.config).trainer.steps
    except ConfigError:
        return 0


def check_steps(old: Identity | None, config: Config, version: int) -> None:
    """Raise ``ConfigError`` if ``trainer.steps`` was lowered below the number of trained steps.

    An unchanged value is accepted: a custom training loop may train more steps than the configuration has.
    """
    steps = config.trainer.steps
    if old is not None and steps < version and steps < _steps(old):
        raise ConfigError("trainer.steps", steps, f"{version} steps are trained already: use at least as many")


def _check_resumable(run_dir: Path, old: Identity, config: Config) -> None:
    """Raise ``ConfigError`` if ``config`` differs in a key that a resume may not change, or from a kept checkpoint."""
    before = from_json(old.config)
    kept = resumable.with_keys_of(config, before)
    if to_json(kept) == old.config:
        resumable.check(config, before)
        return
    change = difference(before, kept)
    if change is None:
        raise ConfigError("run directory", str(run_dir), "it belongs to another configuration")
    key, theirs, ours = change
    raise ConfigError(key, ours, f"the run in {run_dir} was started with {theirs}; use another run directory")


def save(txn: Write, identity: Identity) -> None:
    """Write the identity; called in the first transaction of each incarnation."""
    txn.put("meta", _KEY, msgspec.msgpack.encode(identity))


def limits(config: Config) -> Limits:
    """Return the limits of the ledger for a configuration."""
    staleness = config.staleness
    spares = round((config.rollout.redundancy.groups - 1.0) * config.trainer.batch_size * (staleness.max_staleness + 1))
    return Limits(
        max_staleness=staleness.max_staleness,
        batch_size=config.trainer.batch_size,
        lease_ms=max(round(config.scheduler.lease_s * 1000), 1),
        bound=staleness.bound,
        on_overdue=staleness.on_overdue,
        min_trainable=staleness.min_trainable,
        max_spares=spares,
    )
