"""The OpenAI-compatible API: /v1/models and /v1/chat/completions, streamed (SSE) or whole.

It shares engine, prefix cache and panel with the page. Everything here runs on the server's event loop; only what a
long body takes until its prompt's ids are known goes to a thread, since it would hold up every other stream.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from app.openai_logprobs import choice_logprobs
from app.openai_schema import ApiError, ChatCompletionRequest, count_messages, invalid, parse_request
from app.replies import context_limit
from app.security import Guard
from app.settings import Settings
from engine.engine_thread import EngineDead, EngineNotReady, QueueFull
from engine.outputs import Delta, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.shown import shortened, shown

if TYPE_CHECKING:
    from engine.engine_thread import EngineThread
    from engine.request_stream import RequestStream
    from engine.status import EngineStatus
    from models.tokenizer import Tokenizer

MAX_BODY = 8 * 2**20  # bytes
# Bytes from which a body is read and its prompt tokenized in a thread (about 10 ms). Whatever costs time, text or many
# short messages or arguments of the template, makes the body long.
LONG_BODY = 10_000
RETRY_LOADING, RETRY_FULL = "5", "1"  # seconds, the headers Retry-After of 503 and 429


def build_api(settings: Settings, engine: EngineThread, guard: Guard) -> FastAPI:
    """The application to mount at /v1."""
    api = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    started = int(time.time())

    @api.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body, error.status, error.headers)

    @api.exception_handler(HTTPException)
    async def no_such_route(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {shortened(request.url.path)}: {error.detail}"
        return await refused(request, ApiError(error.status_code, message, headers=dict(error.headers or {})))

    def check_caller(request: Request) -> None:
        if not guard.has_api_key(request):
            message = "no or wrong API key; send it as Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        if not guard.same_origin(request):
            raise ApiError(403, f"requests from pages of {shown(request.headers['origin'])} are not allowed")

    def model_card() -> dict[str, Any]:
        status = engine.status()
        card = {"id": status.model, "object": "model", "created": started, "owned_by": "pageturn"}
        return card | ({"max_model_len": status.max_model_len} if status.ready else {})

    @api.get("/models")
    async def models(request: Request) -> dict[str, Any]:
        check_caller(request)
        return {"object": "list", "data": [model_card()]}

    @api.get("/models/{model:path}")
    async def model(request: Request, model: str) -> dict[str, Any]:
        check_caller(request)
        if model != engine.status().model:
            raise _unknown_model(model, engine)
        return model_card()

    @api.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        check_caller(request)
        body = await _body(request)
        if len(body) > LONG_BODY:
            prepared = await asyncio.to_thread(_prepare, body, engine, settings)
        else:
            prepared = _prepare(body, engine, settings)
        reply = Reply(prepared.request, _submit(prepared, engine), engine)
        if prepared.request.stream:
            return EventStream(reply)
        async with _aborted_when_gone(request.receive, reply.stream):
            return JSONResponse(await reply.whole())

    return api


@dataclass(slots=True)
class Reply:
    """One completion of n choices: its request's stream told in OpenAI's terms."""

    request: ChatCompletionRequest
    stream: RequestStream
    engine: EngineThread
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))
    _last: dict[int, Delta] = field(default_factory=dict)  # by choice

    async def deltas(self) -> AsyncIterator[Delta]:
        """The request's deltas. ApiError where it ends with anything but "stop" or "length"."""
        async for delta in self.stream:
            self._last[delta.index] = delta
            if delta.finish_reason in ("error", "abort"):
                raise self._failure(delta)
            yield delta

    async def whole(self) -> dict[str, Any]:
        """The body of the answer that is not streamed."""
        texts = [""] * self.num_choices
        logprobs: list[list[TokenLogprobs]] = [[] for _ in texts]
        async for delta in self.deltas():
            texts[delta.index] += delta.text
            logprobs[delta.index].extend(delta.logprobs or ())
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": self._logprobs(logprobs[i]),
                "finish_reason": self._last[i].finish_reason,
            }
            for i, text in enumerate(texts)
        ]
        return self._envelope("chat.completion", choices) | {"usage": self.usage()}

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The chunks of the streamed answer, the last one's usage included where it was asked for."""
        first = True
        async for delta in self.deltas():
            if first:
                first = False
                for index in range(self.num_choices):
                    yield self._chunk(index, {"role": "assistant", "content": "", "refusal": None})
            if delta.text or delta.logprobs:
                logprobs = self._logprobs(delta.logprobs or ())
                yield self._chunk(delta.index, {"content": delta.text}, logprobs=logprobs)
            if delta.finish_reason is not None:
                yield self._chunk(delta.index, {}, delta.finish_reason)
        if self.request.include_usage:
            yield self._envelope("chat.completion.chunk", []) | {"usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Token counts as of the last deltas, of all choices together."""
        any_choice = next(iter(self._last.values()), Delta())
        prompt, output = any_choice.num_prompt_tokens, sum(d.num_output_tokens for d in self._last.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": any_choice.num_cached_tokens},
        }

    @property
    def num_choices(self) -> int:
        return self.request.n or 1

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        tokenizer = self.engine.tokenizer
        return choice_logprobs(entries, tokenizer) if self.request.logprobs and tokenizer else None

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = self._envelope("chat.completion.chunk", [choice])
        return chunk | {"usage": None} if self.request.include_usage else chunk

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.request.model,
            "system_fingerprint": None,
            "choices": choices,
        }

    def _failure(self, delta: Delta) -> ApiError:
        if cause := self.engine.status().error:
            return _engine_failed(cause)
        if delta.finish_reason == "abort":
            return ApiError(503, "the server is shutting down", type="server_error", code="aborted")
        return ApiError(500, delta.error or "the request failed", type="server_error")


class EventStream(Response):
    """Server-sent events of a Reply. The first delta is awaited before the status goes out, so that a request that
    cannot be served gets an error status; a later failure is an error event."""

    def __init__(self, reply: Reply) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = [  # by hand: Response would declare a Content-Length
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # nginx would gather the events
        ]
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _aborted_when_gone(receive, self._reply.stream):
            chunks = self._reply.chunks()
            try:
                first = await anext(chunks)
            except ApiError as error:
                await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _send_event(send, first)
            try:
                async for chunk in chunks:
                    await _send_event(send, chunk)
            except ApiError as error:
                await _send_event(send, error.body)
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


async def _send_event(send: Send, data: dict[str, Any]) -> None:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True})


@asynccontextmanager
async def _aborted_when_gone(receive: Receive, stream: RequestStream) -> AsyncIterator[None]:
    """Abort the request as soon as the client's connection is gone, whatever the body is doing, and on leaving."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        stream.abort()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        stream.abort()  # a no-op where it ended by itself


async def _body(request: Request) -> bytes:
    """The request's body; ApiError 413 beyond MAX_BODY, without reading the rest."""
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                raise ApiError(413, f"the body is longer than {MAX_BODY:,} bytes; send less", code="request_too_large")
    except ClientDisconnect:  # nobody is left to read the answer
        raise ApiError(400, "the connection closed before the whole body had come") from None
    return bytes(body)


def _check_ready(engine: EngineThread) -> tuple[EngineStatus, Tokenizer]:
    """The status and the tokenizer of a loaded model; ApiError where there is none yet, or none any more."""
    status, tokenizer = engine.status(), engine.tokenizer
    if status.error:
        raise _engine_failed(status.error)
    if not status.ready or tokenizer is None:
        stage = f"{status.load.stage}, {status.load.percent:.0f} %"
        raise _unavailable(f"the model is still loading ({stage}); try again in {RETRY_LOADING} s")
    return status, tokenizer


class Prepared(NamedTuple):
    """A request as the engine takes it."""

    request: ChatCompletionRequest
    prompt_ids: list[int]
    params: SamplingParams


def _prepare(body: bytes, engine: EngineThread, settings: Settings) -> Prepared:
    """Read the body and encode its prompt; every refusal as ApiError. What is far too long is refused before anything
    is done with it that takes long."""
    status = engine.status()
    if status.ready and (count := count_messages(body)) >= context_limit(status):  # of one token each at least
        raise _far_too_long(count, status)
    wanted = parse_request(body)
    status, tokenizer = _check_ready(engine)  # before it is, and after it has failed, the model's name is not known
    if wanted.model not in (status.model, settings.model):
        raise _unknown_model(wanted.model, engine)
    messages = wanted.chat_messages()
    text, limit = "".join(m["content"] for m in messages), context_limit(status)
    if len(text) > LONG_BODY and (least := tokenizer.least_tokens(text, limit)) >= limit:
        raise _far_too_long(least, status)
    try:
        prompt_ids = tokenizer.encode_chat(messages, template_kwargs=wanted.chat_template_kwargs)
    except ValueError as error:  # the chat template's own refusal, of an order of roles for instance
        raise ApiError(400, str(error), param="messages") from None
    room = status.max_model_len - len(prompt_ids)
    if room < 1:
        context = f"this model's context is {status.max_model_len} tokens, for the prompt and at least one of the reply"
        raise _too_long(len(prompt_ids), context)
    if len(prompt_ids) > limit:
        raise _too_long(len(prompt_ids), f"the KV cache holds {limit} tokens (--num-kvcache-blocks)")
    return Prepared(wanted, prompt_ids, wanted.sampling_params(room))


def _submit(prepared: Prepared, engine: EngineThread) -> RequestStream:
    """Hand the request to the engine; every refusal as ApiError."""
    try:
        return engine.submit(prepared.prompt_ids, prepared.params)
    except QueueFull as error:
        headers = {"Retry-After": RETRY_FULL}
        raise ApiError(429, str(error), type="rate_limit_error", code="queue_full", headers=headers) from None
    except EngineNotReady as error:
        raise _unavailable(str(error)) from None
    except EngineDead as error:
        raise _engine_failed(str(error)) from None
    except ValueError as error:
        raise invalid(error) from None


def _unknown_model(model: str, engine: EngineThread) -> ApiError:
    message = f"the model {shown(model)} is not served here; this server has {engine.status().model!r}"
    return ApiError(404, message, param="model", code="model_not_found")


def _too_long(prompt_tokens: int | str, limit: str) -> ApiError:
    message = f"the prompt has {prompt_tokens} tokens, but {limit}; shorten the messages"
    return ApiError(400, message, param="messages", code="context_length_exceeded")


def _far_too_long(least: int, status: EngineStatus) -> ApiError:
    return _too_long(f"at least {least}", f"this server takes {context_limit(status)}, the reply's included")


def _unavailable(message: str) -> ApiError:
    headers = {"Retry-After": RETRY_LOADING}
    return ApiError(503, message, type="server_error", code="model_loading", headers=headers)


def _engine_failed(cause: str) -> ApiError:
    return ApiError(503, f"the engine is down: {cause}", type="server_error", code="engine_failed")
