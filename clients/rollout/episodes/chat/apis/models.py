"""``/v1/models``: the one model of the server, in the fields of the OpenAI and of the Anthropic API."""

from typing import Any

NAME = "policy"


def model_list() -> dict[str, Any]:
    """Return the list. Calls may give any model's name: all of them reach the policy."""
    model = {
        "id": NAME,
        "object": "model",
        "owned_by": "staleflow",
        "created": 0,
        "type": "model",
        "display_name": NAME,
        "created_at": "1970-01-01T00:00:00Z",
    }
    return {"object": "list", "data": [model], "has_more": False, "first_id": NAME, "last_id": NAME}
