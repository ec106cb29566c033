"""Client for the status of a server and for draining a run, used by ``staleflow status`` and the supervisor."""

from typing import TypeVar

from staleflow.configs.errors import ConfigError
from staleflow.net.client import BlockingClient, worker_id
from staleflow.net.transport import SOCKETS, Transport
from staleflow.protocols.wire import messages
from staleflow.protocols.wire.messages import AttachReply, Done, GetStatus, SchedulerStatus, Status

S = TypeVar("S", bound=Status)


class Admin:
    """Blocking connection to one server. Calls raise ``Unavailable`` on a timeout."""

    def __init__(self, address: str, name: str = "admin", *, transport: Transport = SOCKETS) -> None:
        self._worker = worker_id(name)
        self._client = BlockingClient(address, worker=self._worker, transport=transport)

    def __enter__(self) -> "Admin":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def status(self, timeout_s: float = 5.0) -> SchedulerStatus:
        """Return the status of a scheduler."""
        return self.status_of(SchedulerStatus, timeout_s)

    def status_of(self, kind: type[S], timeout_s: float = 5.0) -> S:
        """Return the status of a server. Raise ``ConfigError`` if it is a server of another kind."""
        status = self._client.ask(GetStatus(), Status, timeout_s=timeout_s)
        if not isinstance(status, kind):
            detail = f"it replied with {type(status).__name__}, not {kind.__name__}"
            raise ConfigError("address", self._client.address, detail)
        return status

    def drain(self, why: str, timeout_s: float = 5.0) -> None:
        """End the run: finish the train step in progress, issue no new leases, keep all acknowledged data."""
        self._client.ask(messages.Drain(why=why), Done, timeout_s=timeout_s)

    def attach(self, timeout_s: float = 10.0) -> AttachReply:
        """Attach as an observer, or stay attached; return what the scheduler sends to an attaching worker."""
        hello = messages.Attach(worker=self._worker, name=self._worker, role="monitor")
        return self._client.ask(hello, AttachReply, timeout_s=timeout_s)

    def run(self, timeout_s: float = 10.0) -> AttachReply:
        """Return what the scheduler sends to an attaching worker: configuration, run directory, addresses."""
        attached = self.attach(timeout_s)
        self._client.ask(messages.Detach(worker=self._worker, why="asked only"), Done, timeout_s=timeout_s)
        return attached

    def close(self) -> None:
        self._client.close()
