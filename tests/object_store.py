"""A real S3 server on loopback: moto in a process of its own, with its objects in memory."""

import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.request
from types import TracebackType

from tests.servers.ports import ReservedPort

ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "AKIDTEST", "AWS_SECRET_ACCESS_KEY": "very-secret", "AWS_REGION": "us-east-1"}
START_TIMEOUT_S = 60.0
SIGNED = f"AWS4-HMAC-SHA256 Credential={ENVIRONMENT['AWS_ACCESS_KEY_ID']}/20260101/us-east-1/s3/aws4_request"


def installed() -> bool:
    """Return True if the packages of the extra and of the server are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("obstore", "moto", "flask"))


class S3Server:
    """The server. After ``kill``, ``start`` starts it at the same port, empty."""

    def __init__(self) -> None:
        self._reserved = ReservedPort()
        self.port = self._reserved.number
        self.url = f"http://127.0.0.1:{self.port}"
        self.environment = ENVIRONMENT | {"AWS_ENDPOINT_URL": self.url}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(self.port)]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdout=quiet, stderr=quiet, env=os.environ | ENVIRONMENT)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except ConnectionRefusedError:
                assert self._process.poll() is None, "the server has ended"
                assert time.monotonic() < deadline_s, "the server does not listen"
                time.sleep(0.05)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def make_bucket(self, name: str) -> None:
        self._send(name, b"", "PUT", {"Authorization": f"{SIGNED}, SignedHeaders=host, Signature=0"})

    def forbid(self, forbidden: bool) -> None:
        """Refuse every request, since no user of the server has the key; or accept every request again."""
        accepted = b"0" if forbidden else b"inf"
        self._send("moto-api/reset-auth", accepted, "POST", {"Content-Type": "text/plain"})

    def _send(self, path: str, body: bytes, method: str, headers: dict[str, str]) -> None:
        request = urllib.request.Request(f"{self.url}/{path}", data=body, method=method, headers=headers)
        urllib.request.urlopen(request).close()

    def __enter__(self) -> "S3Server":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._reserved.close()
