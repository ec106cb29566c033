"""The rejection of a call, in the error shapes of the OpenAI and the Anthropic API."""

from typing import Any

_ANTHROPIC_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


class ChatRefused(Exception):
    """A rejected call; nothing was sampled. The text names the argument, its value and the allowed values."""

    def __init__(self, message: str, code: str, *, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.status, self.param = code, status, param

    def body(self) -> dict[str, Any]:
        """Return the response body in the form that the ``openai`` package reads."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """Return the response body in the form that the ``anthropic`` package reads, with ``code`` added."""
        kind = "api_error" if self.status >= 500 else _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": str(self), "code": self.code}}


def malformed(param: str, value: object, allowed: str) -> ChatRefused:
    """Return the rejection of an argument whose value has the wrong form."""
    return ChatRefused(f"{param} is {_short(value)}; {allowed}", "malformed", param=param)


def unsupported(param: str, value: object, allowed: str) -> ChatRefused:
    """Return the rejection of a valid argument that the endpoint cannot honour."""
    return ChatRefused(f"{param} is {_short(value)}; {allowed}", "unsupported", param=param)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
