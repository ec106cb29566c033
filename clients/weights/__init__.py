"""Publishing and pulling of weights, without torch: names, dtypes, shapes and raw bytes.

- On the server's host the bytes go through a file that both processes access (``local_upload`` and ``mapped``);
  elsewhere through several concurrent chunks (``chunks``). The bytes are the same either way.
- No byte is used without its checksum.
- Async only; a training loop runs it on an event loop in a separate thread, like its other calls.
"""

from staleflow.clients.weights.external import external
from staleflow.clients.weights.publish import TRIES, Publisher, damaged
from staleflow.clients.weights.pull import CorruptWeights, PulledVersion, Puller
from staleflow.clients.weights.tensors import NamedTensors, Tensor

__all__ = [
    "TRIES",
    "CorruptWeights",
    "NamedTensors",
    "Publisher",
    "PulledVersion",
    "Puller",
    "Tensor",
    "damaged",
    "external",
]
