"""`/v1/chat/completions`, `/v1/completions`, `/v1/models`."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import JSONResponse

from autopipe.service import sse
from autopipe.service.answers import Answer, ChatShape, CompletionShape, Shape
from autopipe.service.disconnect import ClientGoneError, while_connected
from autopipe.service.errors import ApiError, from_engine
from autopipe.service.generation import Choice
from autopipe.service.prompts import chat_ids, completion_ids
from autopipe.service.responses import EVENT_STREAM, errors
from autopipe.service.running import collect, stream
from autopipe.service.sampling import ENGINE_NAMES, check_fields, choice_params, prompt_field
from autopipe.service.schemas import ChatRequest, CompletionRequest
from autopipe.service.service import Service

_log = logging.getLogger("autopipe.service.requests")

_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer; with `stream: true` as server-sent events.", "content": EVENT_STREAM},
    **errors(400, 401, 403, 404, 408, 413, 429, 500, 503),
}
_CLIENT_CLOSED_REQUEST = 499

IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=200,
        pattern=r'^[!"$-~]+$',  # "#" numbers the choices
        description="Under the same key the same request is answered once, also after a crash (needs a journal).",
    ),
]


def openai_routes(service: Service) -> APIRouter:
    """The routes of one service."""
    router = APIRouter(prefix="/v1", tags=["OpenAI"])
    started_s = int(time.time())

    @router.post("/chat/completions", responses=_ANSWERS, response_model=None)
    async def chat(body: ChatRequest, request: Request, idempotency_key: IdempotencyKey = None) -> Response:
        return await _answer(service, body, request, idempotency_key)

    @router.post("/completions", responses=_ANSWERS, response_model=None)
    async def completions(
        body: CompletionRequest, request: Request, idempotency_key: IdempotencyKey = None
    ) -> Response:
        return await _answer(service, body, request, idempotency_key)

    def model_data() -> dict[str, Any]:
        return {
            "id": service.config.served_model_name,
            "object": "model",
            "created": started_s,
            "owned_by": "autopipe",
        }

    @router.get("/models", responses=errors(401, 403))
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_data()]}

    @router.get("/models/{model}", responses=errors(400, 401, 403, 404))
    async def one_model(model: str) -> dict[str, Any]:
        _require_model(service, model)
        return model_data()

    return router


def _require_model(service: Service, name: str) -> None:
    if name != service.config.served_model_name:
        raise ApiError(
            404,
            f"the model {name[:100]!r} does not exist; this service has {service.config.served_model_name!r}",
            param="model",
            code="model_not_found",
        )


async def _answer(
    service: Service, body: ChatRequest | CompletionRequest, request: Request, key: str | None
) -> Response:
    _require_model(service, body.model)
    check_fields(body, service.config.limits)
    host = service.ready()
    if key is not None:
        _ = service.journal  # raises where there is none
    names = {**ENGINE_NAMES, "prompt": prompt_field(body)}

    def prepare() -> tuple[list[Choice], int]:
        prompts = (
            [chat_ids(host, body.messages)]
            if isinstance(body, ChatRequest)
            else completion_ids(host, body.prompt)
        )  # fmt: skip
        rows = [
            (ids, params)
            for ids in prompts
            for params in choice_params(body, service.config.limits, len(ids), host.context_tokens, key)
        ]
        return service.open_choices(rows, names, key), sum(map(len, prompts))

    try:
        choices, prompt_tokens = await asyncio.to_thread(prepare)
    except ApiError:
        raise
    except Exception as error:
        raise from_engine(error, names) from error
    shape: Shape = ChatShape(service.texts) if isinstance(body, ChatRequest) else CompletionShape(service.texts)
    answer = Answer(shape, body.model, service.fingerprint)
    _log_request(service, answer.id, body, prompt_tokens, len(choices))
    if body.stream:
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        chunks = stream(choices, answer, shape, prompt_tokens, include_usage=include_usage)
        return sse.EventResponse(chunks, lambda: service.forget(choices))
    try:
        return JSONResponse(await while_connected(request, collect(choices, answer, prompt_tokens)))
    except ClientGoneError:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    finally:
        service.forget(choices)


def _log_request(
    service: Service, number: str, body: ChatRequest | CompletionRequest, prompt_tokens: int, num_choices: int
) -> None:
    """One line a request; what it says only where the operator asked for that."""
    _log.info("%s: %d prompt tokens, %d choices, stream %s", number, prompt_tokens, num_choices, bool(body.stream))
    if service.config.log_prompts:
        said = body.messages if isinstance(body, ChatRequest) else body.prompt
        _log.info("%s: %r", number, said)
