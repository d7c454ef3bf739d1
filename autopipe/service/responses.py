"""What routes answer, for the OpenAPI schema; and FastAPI's parts put in order."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


_TEXTS = {
    400: "The request is not right; `param` names the field.",
    401: "No valid API key.",
    403: "Another host's name.",
    404: "No such model or path.",
    405: "Not with this method.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "Too many requests wait; see Retry-After.",
    500: "A fault of the service.",
    503: "Loading, or shutting down, or the target is being restarted.",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that may answer with these."""
    return {status: {"model": ErrorBody, "description": _TEXTS[status]} for status in statuses}


EVENT_STREAM: dict[str, Any] = {"text/event-stream": {"schema": {"type": "string"}}}
