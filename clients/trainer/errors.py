"""The errors with which the run ends a trainer."""

from typing import NoReturn

from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.configs.errors import ConfigError
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import Version
from staleflow.protocols.wire.messages import Batch


class Fenced(Exception):
    """Another trainer has joined the run; this one must stop."""


class BadVersion(Exception):
    """The run rejects these weights and everything derived from them; the text is the reason."""


def fenced(reason: object) -> Fenced:
    """Return the error of a trainer that another one has replaced."""
    return Fenced(f"another trainer has joined the run, this one stops ({reason})")


def raise_refusal(refused: Refused, version: Version, batch: TrainBatch | Batch | None = None) -> NoReturn:
    """Raise the error that a trainer gets for the refusal of ``version``, which ``batch`` (if given) produced."""
    match refused.code:
        case Code.FENCED:
            raise fenced(refused.detail) from refused
        case Code.BAD_VERSION if batch is not None:
            lost = f"step {batch.step}: batch {batch.batch} was revoked while it was trained, the step is void"
            raise BadVersion(f"{lost}; resume from the newest checkpoint ({refused.detail})") from refused
        case Code.DENIED if not refused.is_over:
            # ConfigError ends the process: a restarted trainer would be refused again.
            why = f"the parameter server refuses its weights: {refused.detail}"
            raise ConfigError("version", version, why) from refused
        case _:
            raise refused
