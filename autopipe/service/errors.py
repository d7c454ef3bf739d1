"""Errors as OpenAI's clients expect them: `{"error": {message, type, param, code}}` with a 4xx or 5xx status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopipe.core.errors import (
    AutoPipeError,
    ConfigError,
    ContextLengthError,
    EngineClosedError,
    ModelLoadError,
    QueueFullError,
    StageError,
)
from autopipe.core.journal import JournalError

INVALID = "invalid_request_error"
SERVER = "server_error"


class ApiError(Exception):
    """What a request is answered with instead of a result.

    Attributes:
        param: the field of the request that is to blame.
        code: a word that programs can act on.
        headers: sent along (Retry-After).
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """A 400 that names the field at fault."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str, retry_after_s: int = 1) -> ApiError:
    """A 503: the same request may work later."""
    return ApiError(503, message, kind=SERVER, code=code, headers={"Retry-After": str(retry_after_s)})


def from_engine(error: BaseException, names: Mapping[str, str] | None = None) -> ApiError:
    """An engine's error as a client may see it.

    Args:
        names: the engine's key -> the request's field.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextLengthError):
        return invalid((names or {}).get("prompt", "prompt"), str(error), "context_length_exceeded")
    if isinstance(error, ConfigError):
        key = error.key.split(".")[0]
        param = (names or {}).get(key, key)
        return invalid(param, f"{param}: {error.value!r} is not allowed; allowed: {error.allowed}"[:2000])
    if isinstance(error, QueueFullError):
        return queue_full(max(1, round(error.retry_after_s)))
    if isinstance(error, EngineClosedError):
        return unavailable("the service is shutting down", "shutting_down", 5)
    if isinstance(error, StageError):
        return unavailable(f"the target is being restarted: {error}", "target_died", 5)
    if isinstance(error, ModelLoadError):  # of a dead one that is loaded again; it may name files
        return unavailable("the target is being restarted", "target_died", 5)
    if isinstance(error, JournalError):
        return unavailable("the journal cannot be written; the server's log says why", "journal_failed", 5)
    if isinstance(error, AutoPipeError):
        return ApiError(500, str(error), kind=SERVER, code="engine_error")
    return ApiError(500, "internal error; the server's log says more", kind=SERVER, code="internal_error")


def queue_full(retry_after_s: int = 1) -> ApiError:
    return ApiError(
        429,
        "too many requests wait already; try again in a moment",
        kind="rate_limit_error",
        code="queue_full",
        headers={"Retry-After": str(retry_after_s)},
    )


def from_validation(errors: Sequence[Mapping[str, Any]], body: Any, unsupported: Mapping[str, str]) -> ApiError:
    """The first problem that pydantic found, in words, with the field's path as `param`.

    Args:
        errors: as `RequestValidationError.errors()` lists them.
        body: the parsed body, to tell fields from the names of union branches in a path.
        unsupported: what fields that are known, but not supported, are for.
    """
    first = _most_telling(errors, body)
    place, *path = first.get("loc", ("body",))
    if first["type"] == "json_invalid":
        reason = (first.get("ctx") or {}).get("error", first["msg"])
        return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")
    param = _path(path, body) if place == "body" else ".".join(map(str, path))
    name = param or "body"
    if first["type"] == "extra_forbidden":
        name = ".".join(map(str, path))
        purpose = unsupported.get(str(path[-1]))
        if purpose is not None:
            return invalid(name, f"{name}: {purpose} is not supported", "unsupported_parameter")
        return invalid(name, f"{name}: no such field", "unknown_parameter")
    if first["type"] == "missing":
        name = ".".join(map(str, path)) or "body"
        message = f"{name}: missing" if path else "the body is missing; it must be JSON, sent as application/json"
        return invalid(name if path else None, message, "missing_required_parameter")
    wanted = str(first["msg"]).removeprefix("Value error, ")
    return invalid(param, f"{name}: {wanted}", "invalid_type" if first["type"].endswith("_type") else "invalid_value")


def _most_telling(errors: Sequence[Mapping[str, Any]], body: Any) -> Mapping[str, Any]:
    """Of the first problem's errors (a union has one for each of its branches) the deepest; a wrong type comes last."""
    paths = [_path(error.get("loc", ("body",))[1:], body) or "" for error in errors]
    related = [place for place, path in enumerate(paths) if path.startswith(paths[0])]
    deepest = max(paths[place].count(".") for place in related)
    candidates = [errors[place] for place in related if paths[place].count(".") == deepest]
    return next((error for error in candidates if not error["type"].endswith("_type")), candidates[0])


def _path(path: Sequence[int | str], body: Any) -> str | None:
    """The parts of an error's path that lead through the data; those that name a branch of a union do not."""
    parts: list[str] = []
    for part in path:
        try:
            body = body[part] if not isinstance(body, str) else body[None]  # type: ignore[index]
        except (LookupError, TypeError):
            continue
        parts.append(str(part))
    return ".".join(parts) or None
