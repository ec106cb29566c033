"""State that most parts of the scheduler share."""

from dataclasses import dataclass

from staleflow.configs.schema import Config
from staleflow.servers.scheduler.coordination.instances import Instances
from staleflow.servers.scheduler.ledger.identity import Identity
from staleflow.servers.scheduler.ledger.interpreter import Interpreter
from staleflow.servers.scheduler.ledger.phase import Phase
from staleflow.servers.scheduler.workers.registry import Registry
from staleflow.servers.scheduler.workers.stage_loads import StageLoadTable


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerState:
    """Objects of one scheduler, shared by reference: a change by one part is visible to the others."""

    config: Config
    identity: Identity
    interpreter: Interpreter
    registry: Registry
    instances: Instances
    phase: Phase
    loads: StageLoadTable
