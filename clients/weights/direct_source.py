# pyright: basic, reportMissingImports=false
"""The trainer's side of a direct transfer: it holds the newest version in main memory, and gives it to who asks.

- ``hold`` copies: the optimizer may move the weights while readers are still taking them. The copy of the version
  before is written over, unless somebody still takes it.
- A step is never held up: giving happens in threads of its own, and a reader that does not keep up is left behind.
- A version that is not the newest any more is not to be had here. Who asks for it is told so at once.
- Who has left takes next to nothing from those who are there, and nobody but this process ends the giving.
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
from staleflow.clients.weights.tensors import NamedTensors, in_memory, layout, placed
from staleflow.configs.errors import ConfigError
from staleflow.net.addresses import split_tcp
from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.messages import Manifest
from staleflow.protocols.wire.tensors import Array

log = logging.getLogger(__name__)

GIVING = 8
"""Readers that are given to at once; more wait."""
WAIT = timedelta(days=7)


@dataclass(slots=True, eq=False)
class Held:
    """A version in memory."""

    lineage: Lineage
    version: Version
    data: Bytes
    takers: int = 0


class DirectSource:
    """Owned by the thread that trains; serves in threads of its own until ``close``."""

    def __init__(self, bind: str) -> None:
        """``bind``: ``tcp://host:port``, port 0 for any. ``ConfigError`` when that cannot be."""
        check_torch()
        self._held: Held | None = None
        self._places: Manifest | None = None
        """Of weights that are gathered one by one, as they came last."""
        self._lock = threading.Lock()
        self._card = card()
        self._store: Store | None
        self._store, self.endpoint = _open(bind)
        self._ended = threading.Event()
        self._givers = ThreadPoolExecutor(GIVING, thread_name_prefix="give weights")
        self._thread = threading.Thread(target=self._serve, name="direct weights", daemon=True)
        self._thread.start()

    def hold(self, weights: NamedTensors, lineage: Lineage, version: Version) -> dict[str, Array]:
        """A copy of the weights, of which readers are given from now on; to be published, not to be written to.

        ``ValueError`` when weights that are gathered one by one are not those of the first time.
        """
        if self._places is None or in_memory(weights):
            self._places = layout(weights)
        places = self._places
        with self._lock:
            before, self._held = self._held, None
            free = before is not None and not before.takers and len(before.data) == places.nbytes
        data = before.data if free and before is not None else np.zeros(places.nbytes, np.uint8)
        try:
            copies = placed(places, weights, data)
        except ValueError:
            self._places = None
            raise
        with self._lock:
            self._held = Held(lineage, version, data)
        return copies

    def close(self) -> None:
        """Give to nobody any more; what is under way is left behind. May be called again."""
        if self._store is None:
            return
        self._ended.set()
        self._store.queue_push(ASKS, b"")  # wakes the thread, if no stranger takes it; else the end of the store does
        self._thread.join(direct.HERE_S)
        self._givers.shutdown(wait=False, cancel_futures=True)
        self._store = None

    # --- threads ---

    def _serve(self) -> None:
        asks = connect(self.endpoint)
        asks.set_timeout(WAIT)
        while True:
            try:
                found = asks.queue_pop(ASKS)
            except dist.DistStoreError:  # nobody asked for that long
                continue
            except RuntimeError as error:
                if not self._ended.is_set():
                    log.error("weights are given to nobody any more: %s", error)
                return
            if self._ended.is_set():
                return
            try:
                self._givers.submit(self._give, msgspec.json.decode(found, type=Ask), time.monotonic())
            except msgspec.DecodeError as error:
                log.warning("an ask for weights cannot be read: %s", error)

    def _give(self, ask: Ask, asked_s: float) -> None:
        if time.monotonic() - asked_s > direct.MEET_S:
            return  # its reader waits no more
        held = self._taken(ask)
        try:
            store = connect(self.endpoint)
            try:
                self._answered(ask, held, store)
            finally:
                _forget(store, ask.group)
        except (OSError, RuntimeError) as error:
            log.warning("version %d is not given to %s: %s", ask.version, ask.group, error)
        finally:
            if held is not None:
                with self._lock:
                    held.takers -= 1

    def _answered(self, ask: Ask, held: Held | None, store: Store) -> None:
        """Say yes or no, and after a yes give. ``RuntimeError`` when the reader has left, or does not keep up."""
        if held is None:
            answer = Answer(backend="", why=f"version {ask.version} of lineage {ask.lineage} is not the newest")
        else:
            other = ask.card and self._card and ask.card != self._card
            answer = Answer(backend="nccl" if other else "gloo", span=direct.SPAN_BYTES)
        store.set(answer_key(ask.group), msgspec.json.encode(answer))
        store.wait([here_key(ask.group)], timedelta(seconds=direct.HERE_S))
        if held is not None:
            with closing(Group(answer, store, ask.group, rank=0)) as group:
                group.give(held.data)

    def _taken(self, ask: Ask) -> Held | None:
        """The version that was asked for, which nobody writes over now; None when it is not the one that is here."""
        with self._lock:
            held = self._held
            if held is None or (held.lineage, held.version, len(held.data)) != (ask.lineage, ask.version, ask.nbytes):
                return None
            held.takers += 1
            return held


def _open(bind: str) -> tuple[Store, str]:
    """The store, and where it is. It listens on that address only, as its own way of binding would not."""
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
    """What a group that ended, or was not opened, left in the store."""
    for key in store.list_keys():
        if key.startswith(f"{group}/"):
            store.delete_key(key)
