"""Loading of a cost file."""

import tomllib
from pathlib import Path

import msgspec

from staleflow.configs.costs import Costs
from staleflow.configs.errors import ConfigError

KEY = "simulation.costs"


def read_costs(path: Path) -> Costs:
    """Read a cost file. ``ConfigError`` names the value that is wrong."""
    try:
        costs = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Costs)
    except OSError as error:
        raise ConfigError(KEY, str(path), f"it cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(KEY, str(path), f"it must be TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(KEY, str(path), f"{error}; docs/reference/costs.md lists the values") from error
    engine = costs.engine
    if engine is not None and not (engine.active <= engine.experts and bool(engine.active) == bool(engine.experts)):
        allowed = (
            f"engine.active must be from 1 to the {engine.experts} of engine.experts; both are 0 for a dense model"
        )
        raise ConfigError(KEY, str(path), f"engine.active is {engine.active}; {allowed}")
    return costs
