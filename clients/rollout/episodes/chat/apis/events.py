"""Server-sent events."""

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class EventStream:
    """A reply in the form of server-sent events."""

    data: bytes


def data_event(body: Any) -> bytes:
    """Return an event without a name; a text is sent as it is."""
    return f"data: {body if isinstance(body, str) else json.dumps(body)}\n\n".encode()


def named_event(body: dict[str, Any]) -> bytes:
    """Return an event that is named after the ``type`` of its body."""
    return f"event: {body['type']}\ndata: {json.dumps(body)}\n\n".encode()
