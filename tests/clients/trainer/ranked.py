"""Several ranks as processes, each with its share of the same batches, and their results."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from staleflow.clients.weights.tensors import part, tensor_of
from staleflow.configs.ranks import LISTEN_FD
from staleflow.configs.schema import Config
from staleflow.protocols.wire.messages import Manifest, WrittenSpan
from staleflow.protocols.wire.spans import by_tensor

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
    processes: list[subprocess.Popen[bytes]] = []
    spoken = [folder / f"rank-{rank}.txt" for rank in range(nproc)]  # a full pipe without a reader would block its rank
    with socket.create_server(("127.0.0.1", 0)) as meeting:
        try:
            command = ["tests.clients.trainer.rank_process", str(file)]
            processes += [start_rank(rank, nproc, meeting, command, spoken[rank]) for rank in range(nproc)]
            for process in processes:
                process.wait(timeout=LIMIT_S)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    codes = [process.returncode for process in processes]
    return Outcome(codes, [path.read_text() for path in spoken], Path(out))


def start_rank(
    rank: int, nproc: int, meeting: socket.socket, command: list[str], spoken: Path
) -> "subprocess.Popen[bytes]":
    """Start a module with its arguments as one of ``nproc`` ranks.

    The first rank inherits the socket, so no other process can take its port in between.
    """
    host, port = meeting.getsockname()
    told: dict[str, object] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc}
    told |= {"MASTER_ADDR": host, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    told |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": Path.cwd()}
    if rank == 0:
        told[LISTEN_FD] = meeting.fileno()
    with spoken.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            env=os.environ | {name: str(value) for name, value in told.items()},
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[meeting.fileno()] if rank == 0 else [],
        )


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
