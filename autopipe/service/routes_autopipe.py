"""`/health`, `/metrics`, `/v1/autopipe/...` and the live page."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse

from autopipe.core.errors import AutoPipeError, ConfigError
from autopipe.core.journal import Status
from autopipe.core.text import OutputText
from autopipe.service import sse
from autopipe.service.errors import ApiError, from_engine, invalid
from autopipe.service.page import load_page
from autopipe.service.plans import PlanChange
from autopipe.service.responses import EVENT_STREAM, errors
from autopipe.service.service import Service, State, choice_key


def autopipe_routes(service: Service) -> APIRouter:
    """The routes of one service."""
    router = APIRouter(tags=["AutoPipe"])
    page = load_page()

    @router.get("/", response_class=HTMLResponse, responses=errors(403))
    async def live_page() -> Response:
        return HTMLResponse(page.html, headers=page.headers)

    @router.get("/health", responses={503: {"description": "Loading, dead or shutting down."}, **errors(403)})
    async def health() -> JSONResponse:
        state = service.state
        headers = {} if state is State.READY else {"Retry-After": "2"}
        return JSONResponse({"status": state.value}, 200 if state is State.READY else 503, headers=headers)

    @router.get("/metrics", responses={200: {"content": {"text/plain": {}}}, **errors(401, 403)}, response_model=None)
    async def metrics(request: Request) -> Response:
        text, content_type = service.metrics.text(request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": content_type})

    @router.get("/v1/autopipe/status", responses=errors(401, 403))
    async def status() -> dict[str, Any]:
        return service.status()

    @router.get("/v1/autopipe/plan", responses=errors(401, 403, 503))
    async def plan() -> dict[str, Any]:
        return _plan(service)

    @router.put("/v1/autopipe/plan", responses=errors(400, 401, 403, 408, 413, 500, 503))
    async def change_plan(body: PlanChange) -> dict[str, Any]:
        if body.plan is not None and not body.pinned:
            raise invalid("plan", "plan: only together with pinned: true")
        control = service.control
        try:
            await asyncio.wrap_future(control.pin(body.plan) if body.pinned else control.release())
        except ConfigError as error:
            raise invalid(error.key, str(error)) from None
        except AutoPipeError as error:
            raise ApiError(
                503, f"the plan could not be put in force: {error}", kind="server_error", code="plan_failed",
                headers={"Retry-After": "5"},
            ) from error  # fmt: skip
        except Exception as error:
            raise from_engine(error) from error
        return _plan(service)

    @router.get("/v1/autopipe/requests/{key}", responses=errors(400, 401, 403, 404, 503))
    async def journaled(key: Annotated[str, Path(min_length=1, max_length=200)]) -> dict[str, Any]:
        return await asyncio.to_thread(_journaled, service, key)

    @router.get(
        "/v1/autopipe/events",
        responses={200: {"description": "Plan changes, acceptance, faults.", "content": EVENT_STREAM},
                   **errors(400, 401, 403, 429)},
        response_model=None,
    )  # fmt: skip
    async def events(last_event_id: Annotated[int | None, Header(ge=0, lt=2**63)] = None) -> Response:
        stream = service.events.subscribe(last_event_id)
        return sse.EventResponse(stream, stream.close)

    return router


def _journaled(service: Service, key: str) -> dict[str, Any]:
    """What the journal knows of a request, choice by choice."""
    host = service.ready()
    choices: list[dict[str, Any]] = []
    while True:
        try:
            record = service.journal.lookup(choice_key(key, len(choices)))
        except AutoPipeError as error:
            raise from_engine(error) from error
        if record is None:
            break
        output = OutputText(host.tokenizer, record.params.stop)
        pushed = output.push(record.token_ids)
        text = pushed.text + output.finish()
        choices.append(
            {
                "index": len(choices),
                "status": Status.FINISHED.value if output.stopped else record.status.value,
                "reason": "stop" if output.stopped else record.reason or None,
                "text": text,
                "completion_tokens": pushed.num_tokens_used,
                "created": record.created_s,
            }
        )
    if not choices:
        raise ApiError(404, "the journal knows no request with this key", param="key", code="not_found")
    return {"key": key, "choices": choices}


def _plan(service: Service) -> dict[str, Any]:
    service.ready()
    found: dict[str, Any] = service.status()["plan"]
    return found
