# pyright: basic, reportMissingImports=false
"""Files of a checkpoint that any number of ranks can read, whichever number wrote them.

Every rank writes the parts of the state that it holds, by the names of whole tensors, as safetensors files of bounded
size; a header entry gives the place of each part in its tensor. This is the layout of ``torch.distributed.checkpoint``
for safetensors: its reader finds the parts that a rank needs. DCP's own writer would exchange pickled plans between
the ranks, and its default format has pickled metadata.
"""

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from staleflow.configs.errors import ConfigError
from staleflow.configs.ranks import Place

FOLDER = "optimizer"
"""Folder of a checkpoint with these files alone."""
FILE_BYTES = 2 << 30
"""Size of one file of optimizer state or of a model; a larger tensor makes a larger file."""
READERS = 4
"""Number of files that are read at once."""
_PLACES, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""Header entry with the place of each part, and its key; both are DCP's."""
_ALONE = "torch.distributed is disabled"
"""Start of DCP's warning that it does not communicate with other ranks, as requested here."""


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A safetensors file that this rank writes to a checkpoint."""

    name: str
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def copied(self) -> "TensorFile":
        """Return the file with copies of its tensors in main memory."""
        return replace(self, tensors={name: t.detach().to("cpu", copy=True) for name, t in self.tensors.items()})

    def write(self, directory: Path) -> None:
        path = directory / self.name
        path.parent.mkdir(exist_ok=True)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, path, metadata=dict(self.metadata))


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a named tensor, with the index of its first element in each dimension of the whole."""

    name: str
    tensor: Tensor
    offsets: tuple[int, ...]


def whole(tensors: Mapping[str, Tensor]) -> Iterator[Part]:
    """Yield complete tensors as their only part."""
    for name, tensor in tensors.items():
        yield Part(name, tensor, (0,) * tensor.ndim)


def optimizer_files(parts: Iterable[Part], where: Place) -> list[TensorFile]:
    """Return the files of a rank; every part of a tensor belongs to exactly one rank."""
    files: list[list[Part]] = []
    room = 0
    for part in parts:
        if part.tensor.nbytes > room:
            files.append([])
            room = FILE_BYTES
        files[-1].append(part)
        room -= part.tensor.nbytes
    return [_file(file, f"{FOLDER}/rank-{where.rank}-file-{number}.safetensors") for number, file in enumerate(files)]


def _file(parts: list[Part], name: str) -> TensorFile:
    places = json.dumps({part.name: {_OFFSETS: part.offsets} for part in parts})
    return TensorFile(name, {part.name: part.tensor for part in parts}, {_PLACES: places})


def read_optimizer(checkpoint: Path, empty: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Return every stored tensor by name. Read only this rank's part of a sharded one.

    ``empty`` returns the tensor to fill, whole or a ``DTensor``; it may raise ``ValueError``. ``ConfigError`` if the
    state does not fit it.
    """
    if not (checkpoint / FOLDER).is_dir():  # it was saved before the first update
        return {}
    # Imported here: it takes a second, and engines import this module as well.
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(checkpoint / FOLDER), thread_count=READERS)
    try:
        state = {name: empty(name) for name in reader.read_metadata().state_dict_metadata}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", _ALONE, UserWarning)
            load(state, storage_reader=reader, no_dist=True)
    except (ValueError, CheckpointException) as error:
        failures = list(error.failures.values()) if isinstance(error, CheckpointException) else [(error, None)]
        allowed = f"its optimizer state must fit the model: {failures[0][0]}"
        raise ConfigError("checkpoint", str(checkpoint), allowed) from error
    return state
