"""The connecting side of TCP: authenticates with a key, and reports a rejected handshake to the client.

ZeroMQ reports a rejected handshake to its monitor only. The monitor's event becomes a ``Refusal`` (``denied``) of
request 0, as if the server had sent it; a failure that may be transient is only logged.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import zmq
from zmq.utils.monitor import recv_monitor_message

from staleflow.net import addresses
from staleflow.net.keyring import as_client
from staleflow.net.keys import Key
from staleflow.net.limits import TransportLimits
from staleflow.net.zmq_stream import DrainedSocket
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.codec import Data, encode_reply
from staleflow.protocols.wire.messages import Refusal

log = logging.getLogger(__name__)

RECONNECT_MS: Final = 50
RECONNECT_CAP_MS: Final = 1_000
_FAILURES: Final = (
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    | int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
    | int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
)
_MISMATCH: Final = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)


def dial(target: "zmq.Socket[bytes]", address: str, route: bytes) -> None:
    """Connect permanently: ZeroMQ reconnects when necessary."""
    target.set(zmq.ROUTING_ID, route)
    target.set(zmq.IPV6, int("[" in address))
    target.set(zmq.RECONNECT_IVL, RECONNECT_MS)
    target.set(zmq.RECONNECT_IVL_MAX, RECONNECT_CAP_MS)
    target.connect(address)


class Dialer:
    """A DEALER over TCP, and its monitor."""

    def __init__(
        self,
        address: str,
        route: bytes,
        *,
        limits: TransportLimits,
        on_message: Callable[[list[bytes], list[memoryview], bool], None],
        key: Key | None,
    ) -> None:
        self._address = address
        self._key = key
        self._on_message = on_message
        self._loop: asyncio.AbstractEventLoop | None = None
        if key is None and not addresses.is_loopback(address):
            log.warning(
                "INSECURE: connection to %s without a key; anyone on the network path can read and change it", address
            )
        self._socket = DrainedSocket(zmq.DEALER, num_heads=1, limits=limits, on_message=on_message)
        try:
            if key is not None:
                as_client(self._socket.zmq, key)
            self._monitor: zmq.Socket[bytes] = self._socket.zmq.get_monitor_socket(_FAILURES)
            dial(self._socket.zmq, address, route)
        except BaseException:
            self._socket.close(0)
            raise

    def start(self) -> None:
        self._socket.start()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._monitor.fileno(), self._poll_monitor)
        self._poll_monitor()

    def send(self, parts: Sequence[Data]) -> bool:
        return self._socket.send(parts)

    def close(self, linger_ms: int | None = None) -> None:
        if self._monitor.closed:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._monitor.fileno())
        self._socket.zmq.disable_monitor()
        self._monitor.close(0)
        self._socket.close(linger_ms)

    def _poll_monitor(self) -> None:
        """Handle all waiting monitor events; the monitor's descriptor is edge-triggered."""
        while not self._monitor.closed and self._monitor.poll(0):
            self._on_failure(cast("dict[str, Any]", recv_monitor_message(self._monitor, zmq.NOBLOCK)))

    def _on_failure(self, event: dict[str, Any]) -> None:
        mine = "no key" if self._key is None else f"the key {self._key.path}"
        match int(event["event"]):
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._denied(f"{self._address} rejects {mine}: it is not in the server's allow-list")
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL if int(event["value"]) == _MISMATCH:
                theirs = (
                    "the server requires one; set STALEFLOW_KEY to its file"
                    if self._key is None
                    else "the server has no keys"
                )
                self._denied(f"{self._address} was contacted with {mine}, but {theirs}")
            case _ if self._key is not None:
                log.warning("%s aborted the handshake; check that %s belongs to this server", self._address, mine)
            case _:
                pass

    def _denied(self, detail: str) -> None:
        self._on_message([encode_reply(0, Refusal(code=Code.DENIED, detail=detail))], [], False)
