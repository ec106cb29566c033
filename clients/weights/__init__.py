"""Weights to and from the parameter server, without torch: names, dtypes, shapes and raw bytes.

- On the server's host the bytes go through a file that both see (``written`` and ``mapped``); elsewhere through chunks,
  a few of them under way (``chunks``). Both ways end in the same bytes.
- Nothing is believed without its checksum.
- Async only; a training loop runs it on a loop in a thread of its own, as it runs its other calls.
"""

from staleflow.clients.weights.publish import TRIES, Publisher, damaged
from staleflow.clients.weights.pull import CorruptWeights, PulledVersion, Puller
from staleflow.clients.weights.tensors import NamedTensors, Tensor

__all__ = ["TRIES", "CorruptWeights", "NamedTensors", "Publisher", "PulledVersion", "Puller", "Tensor", "damaged"]
