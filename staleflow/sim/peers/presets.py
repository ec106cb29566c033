"""The peers by name."""

from staleflow.sim.peers.areal import Areal
from staleflow.sim.peers.forge import Forge
from staleflow.sim.peers.laminar import Laminar
from staleflow.sim.peers.nemo_rl import NemoRl
from staleflow.sim.peers.prime_rl import PrimeRl
from staleflow.sim.peers.psrl import Psrl
from staleflow.sim.peers.roll import RollAgentic
from staleflow.sim.peers.rule import Rule
from staleflow.sim.peers.slime import Slime
from staleflow.sim.peers.stitch import Stitch
from staleflow.sim.peers.sync import Sync
from staleflow.sim.peers.trl import Trl
from staleflow.sim.peers.verl import Verl

PEERS: dict[str, type[Rule]] = {
    "sync": Sync,
    "psrl": Psrl,
    "nemo-rl": NemoRl,
    "stitch": Stitch,
    "forge": Forge,
    "areal": Areal,
    "prime-rl": PrimeRl,
    "verl": Verl,
    "slime": Slime,
    "roll-agentic": RollAgentic,
    "trl": Trl,
    "laminar": Laminar,
}
"""In the order of the table: first the systems that lose nothing and keep a bound."""
