"""Several ranks as processes, each with its share of the same batches, and their results."""

import json
import socket
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from staleflow.clients.weights.tensors import part, tensor_of
from staleflow.configs.schema import Config
from staleflow.protocols.wire.messages import Manifest, WrittenSpan
from staleflow.protocols.wire.spans import by_tensor
from tests.clients.trainer.forked_ranks import Rank, start_rank

LIMIT_S = 200.0


def ranked(config: Config, directory: Path, folder: Path, nproc: int = 1, **task: Any) -> "Outcome":
    """Train ``steps`` (and run the rest of the task) on ``nproc`` ranks; end every process."""
    folder.mkdir(parents=True, exist_ok=True)
    file, out = folder / "task.json", str(folder / "out")
    told = {"config": msgspec.to_builtins(config), "directory": str(directory), "out": out, **task}
    file.write_text(json.dumps(told, default=str))
    for name in ("save", "background"):
        if name in task:
            Path(task[name]).mkdir()
    ranks: list[Rank] = []
    spoken = [folder / f"rank-{rank}.txt" for rank in range(nproc)]  # a full pipe without a reader would block its rank
    with socket.create_server(("127.0.0.1", 0)) as meeting:
        try:
            module = "tests.clients.trainer.rank_process"
            ranks += [start_rank(rank, nproc, meeting, module, [str(file)], spoken[rank]) for rank in range(nproc)]
            codes = [rank.wait(LIMIT_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    return Outcome(codes, [path.read_text() for path in spoken], Path(out))


class Outcome:
    """The results of the ranks."""

    def __init__(self, codes: list[int], said: list[str], out: Path) -> None:
        self.codes, self.said = codes, said
        self._out = out

    @property
    def results(self) -> list[dict[str, Any]]:
        """The values of each step, including ``bad``."""
        assert self.codes == [0] * len(self.codes), "\n".join(self.said)
        found: list[dict[str, Any]] = json.loads(self._out.with_suffix(".json").read_bytes())
        return found

    @property
    def weights(self) -> dict[str, Any]:
        """The weights after the last step."""
        return self._arrays(".npz")

    @property
    def saved(self) -> dict[str, Any]:
        """The weights that were published when the checkpoint was saved."""
        return self._arrays("-saved.npz")

    def check_spans(self) -> None:
        """The spans of all ranks of a sharded model, each byte in one of them, are ``weights``."""
        spans: list[WrittenSpan] = []
        every = [self._arrays(f"-spans-{rank}.npz") for rank in range(len(self.codes))]
        (layout,) = {own.pop("layout").tobytes() for own in every}
        places = msgspec.msgpack.decode(layout, type=Manifest)
        content = bytearray(places.nbytes)
        for offset, data in (span for own in every for span in own.items()):
            spans.append(WrittenSpan(offset=int(offset), nbytes=len(data), digest=""))
            content[int(offset) : int(offset) + len(data)] = data.tobytes()
        by_tensor(places, spans)
        found = {entry.name: bytes(part(memoryview(content), entry)) for entry in places.tensors}
        assert found == {name: bytes(tensor_of(name, array).data) for name, array in self.weights.items()}
        assert all(every), "every rank has a part"

    def _arrays(self, end: str) -> dict[str, Any]:
        assert self.results is not None
        with np.load(f"{self._out}{end}") as found:
            return {name: found[name] for name in found.files}

    def column(self, name: str) -> list[float]:
        return [result[name] for result in self.results]
