# pyright: basic, reportMissingImports=false
"""The trainer's side of a direct transfer: keeps the newest version in main memory and sends it to readers.

- ``hold`` copies, because the optimizer may update the weights while readers are still receiving them. The copy of the
  previous version is overwritten, unless a reader is still receiving it.
- A train step never waits: sending runs in separate threads, and a reader that does not keep up is dropped.
- Only the newest version is available here. A request for another one is rejected immediately.
- A reader that has left costs the others next to nothing, and only this process can end the sending.
"""

import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta

import msgspec
import numpy as np

from staleflow.clients.weights import direct
from staleflow.clients.weights.direct import (
    ASKS,
    Answer,
    Ask,
    Bytes,
    Group,
    Store,
    answer_key,
    card,
    check_torch,
    connect,
    dist,
    here_key,
)
from staleflow.clients.weights.tensors import NamedTensors, copy_into, in_memory, layout
from staleflow.configs.errors import ConfigError
from staleflow.net.addresses import split_tcp
from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.messages import Manifest
from staleflow.protocols.wire.tensors import Array

log = logging.getLogger(__name__)

MAX_TRANSFERS = 8
"""Maximum number of concurrent transfers; further readers wait."""
WAIT = timedelta(days=7)


@dataclass(slots=True, eq=False)
class HeldVersion:
    """A version in memory, with the number of transfers in progress."""

    lineage: Lineage
    version: Version
    data: Bytes
    takers: int = 0


class DirectSource:
    """Source of direct transfers. Owned by the training thread; serves in its own threads until ``close``."""

    def __init__(self, bind: str) -> None:
        """``bind``: ``tcp://host:port``, port 0 for any. Raise ``ConfigError`` if that is not possible."""
        check_torch()
        self._newest: HeldVersion | None = None
        self._places: Manifest | None = None
        """Layout of the last weights, if those are gathered one by one."""
        self._lock = threading.Lock()
        self._card = card()
        self._store: Store | None
        self._store, self.endpoint = _open(bind)
        self._ended = threading.Event()
        self._givers = ThreadPoolExecutor(MAX_TRANSFERS, thread_name_prefix="give weights")
        self._thread = threading.Thread(target=self._serve, name="direct weights", daemon=True)
        self._thread.start()

    def hold(self, weights: NamedTensors, lineage: Lineage, version: Version) -> dict[str, Array]:
        """Copy the weights and serve the copy from now on; return it for publishing. It must not be modified.

        Raise ``ValueError`` if weights that are gathered one by one differ in layout from the first ones.
        """
        if self._places is None or in_memory(weights):
            self._places = layout(weights)
        places = self._places
        with self._lock:
            # Withdraw the previous version first: no transfer of it may start while it is overwritten.
            before, self._newest = self._newest, None
            free = before is not None and not before.takers and len(before.data) == places.nbytes
        data = before.data if free and before is not None else np.zeros(places.nbytes, np.uint8)
        try:
            copies = copy_into(places, weights, data)
        except ValueError:
            self._places = None
            raise
        with self._lock:
            self._newest = HeldVersion(lineage, version, data)
        return copies

    def close(self) -> None:
        """Stop serving; transfers in progress are abandoned. Idempotent."""
        if self._store is None:
            return
        self._ended.set()
        self._store.queue_push(
            ASKS, b""
        )  # wakes the thread, unless another client pops it; then the end of the store does
        self._thread.join(direct.CONFIRM_TIMEOUT_S)
        self._givers.shutdown(wait=False, cancel_futures=True)
        self._store = None

    # --- threads ---

    def _serve(self) -> None:
        asks = connect(self.endpoint)
        asks.set_timeout(WAIT)
        while True:
            try:
                message = asks.queue_pop(ASKS)
            except dist.DistStoreError:  # no request for that long
                continue
            except RuntimeError as error:
                if not self._ended.is_set():
                    log.error("direct transfers stopped: %s", error)
                return
            if self._ended.is_set():
                return
            try:
                self._givers.submit(self._give, msgspec.json.decode(message, type=Ask), time.monotonic())
            except msgspec.DecodeError as error:
                log.warning("malformed request for a direct transfer: %s", error)

    def _give(self, ask: Ask, asked_s: float) -> None:
        if time.monotonic() - asked_s > direct.ANSWER_TIMEOUT_S:
            return  # its reader has given up waiting
        current = self._acquire(ask)
        try:
            store = connect(self.endpoint)
            try:
                self._answered(ask, current, store)
            finally:
                _forget(store, ask.group)
        except (OSError, RuntimeError) as error:
            log.warning("direct transfer of version %d to %s failed: %s", ask.version, ask.group, error)
        finally:
            if current is not None:
                with self._lock:
                    current.takers -= 1

    def _answered(self, ask: Ask, current: HeldVersion | None, store: Store) -> None:
        """Accept or reject a request, and send the version if accepted.

        Raise ``RuntimeError`` if the reader has left or does not keep up.
        """
        if current is None:
            answer = Answer(backend="", why=f"version {ask.version} of lineage {ask.lineage} is not the newest")
        else:
            other = ask.card and self._card and ask.card != self._card
            answer = Answer(backend="nccl" if other else "gloo", span=direct.SPAN_BYTES)
        store.set(answer_key(ask.group), msgspec.json.encode(answer))
        store.wait([here_key(ask.group)], timedelta(seconds=direct.CONFIRM_TIMEOUT_S))
        if current is not None:
            with closing(Group(answer, store, ask.group, rank=0)) as group:
                group.give(current.data)

    def _acquire(self, ask: Ask) -> HeldVersion | None:
        """Return the requested version and protect it from being overwritten; None if it is not the one in memory."""
        with self._lock:
            current = self._newest
            if current is None or (current.lineage, current.version, len(current.data)) != (
                ask.lineage,
                ask.version,
                ask.nbytes,
            ):
                return None
            current.takers += 1
            return current


def _open(bind: str) -> tuple[Store, str]:
    """Open the store; return it with its address. It listens on that address only, unlike with its default binding."""
    host, port = split_tcp(bind)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError("parameters.direct_bind", bind, f"the system refuses it: {error.strerror}") from error
    port = listening.getsockname()[1]
    store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    return store, f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


def _forget(store: Store, group: str) -> None:
    """Remove the keys of a finished or unopened group from the store."""
    for key in store.list_keys():
        if key.startswith(f"{group}/"):
            store.delete_key(key)
