"""The ASGI application."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from autopipe import __version__
from autopipe.service.errors import ApiError, from_validation
from autopipe.service.guard import App, Guard
from autopipe.service.routes_autopipe import autopipe_routes
from autopipe.service.routes_openai import openai_routes
from autopipe.service.schemas import UNSUPPORTED
from autopipe.service.service import Service

_log = logging.getLogger("autopipe.service")

_CODES = {404: "not_found", 405: "method_not_allowed"}


def create_app(service: Service) -> App:
    """The whole service as an ASGI application; whoever runs it starts and closes `service`."""
    app = FastAPI(
        title="AutoPipe",
        version=__version__,
        description="OpenAI-compatible text generation through a self-configuring pipeline.",
        docs_url=None,  # they load scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,
    )
    app.include_router(openai_routes(service))
    app.include_router(autopipe_routes(service))
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _internal_error)
    _finish_schema(app, service.config.served_model_name)
    return Guard(app, service.config)


def _respond(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, headers=error.headers)


async def _api_error(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, ApiError):
        raise error
    return _respond(error)


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, RequestValidationError):
        raise error
    return _respond(from_validation(error.errors(), error.body, UNSUPPORTED))


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, HTTPException):
        raise error
    headers = {**(error.headers or {})}
    code = _CODES.get(error.status_code, "http_error")
    return _respond(ApiError(error.status_code, str(error.detail), code=code, headers=headers))


async def _internal_error(request: Request, error: Exception) -> JSONResponse:
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _respond(
        ApiError(500, "internal error; the server's log says more", kind="server_error", code="internal_error")
    )


def _finish_schema(app: FastAPI, model: str) -> None:
    """Say in the schema which model there is, and take out FastAPI's own 422 answers: this service never gives them."""
    build = app.openapi

    def openapi() -> dict[str, Any]:
        schema = build()
        for path in schema.get("paths", {}).values():
            for operation in path.values():
                operation.get("responses", {}).pop("422", None)
        parts = schema.get("components", {}).get("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):
            parts.pop(name, None)
        for name in ("ChatRequest", "CompletionRequest"):
            parts[name]["properties"]["model"] = {"type": "string", "enum": [model], "title": "Model"}
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
