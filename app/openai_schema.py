"""The body of POST /v1/chat/completions: what is understood, what is refused by name, what may be ignored.

A field that would change the answer and is not available is refused: a client that asked for JSON or tools must not
get plain text in silence. Fields that only concern the provider's books (user, metadata, store ...) are accepted.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from engine.sampling_params import SamplingParams
from engine.shown import shortened, shown

# Values that ask for nothing are accepted for the unavailable fields too: None always, and these.
_UNAVAILABLE: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
_IGNORED = {
    "metadata",
    "parallel_tool_calls",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
# What an assistant message carries when a client sends back the one it was given.
_MESSAGE_UNAVAILABLE = {"tool_calls": ([],), "function_call": (), "audio": (), "refusal": ()}
_MESSAGE_IGNORED = {"annotations", "name", "reasoning", "reasoning_content"}
# A template may write them into the prompt, whose length is known only then; and what is tokenized in one piece holds
# up the whole process.
MAX_TEMPLATE_CHARS = 50_000
_JSON = TypeAdapter(Any)


class ApiError(Exception):
    """An error as OpenAI's clients know it: status, message, type, param and code."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        param = None if param is None else shortened(param)
        self.status = status
        self.headers = headers
        self.body = {"error": {"message": message, "type": type, "param": param, "code": code}}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")  # include_obfuscation and what else concerns the wire

    include_usage: bool | None = None


class Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: Any = None


class ChatCompletionRequest(BaseModel):
    """Types and OpenAI's ranges; the remaining ranges are SamplingParams'. None means left out, as in OpenAI's API."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str
    messages: list[Message] = Field(min_length=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    logit_bias: dict[str, float] | None = None
    # beyond OpenAI's (the client's extra_body)
    min_tokens: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def chat_messages(self) -> list[dict[str, str]]:
        """Role and text of every message, as Tokenizer.encode_chat takes them."""
        return [
            {"role": "system" if m.role == "developer" else m.role, "content": _text(m, f"messages[{i}]")}
            for i, m in enumerate(self.messages)
        ]

    def sampling_params(self, room: int) -> SamplingParams:
        """The request's SamplingParams; `room` tokens are left in the context. Raises ApiError for a bad range."""
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        fields = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,  # -1: vLLM's word for all
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "seed": None if self.seed is None else self.seed % 2**63,  # OpenAI's may be negative
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
            "min_tokens": self.min_tokens,
            "n": self.n,
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
            "logit_bias": self._logit_bias(),
        }
        try:
            return SamplingParams(
                max_tokens=room if limit is None else min(limit, room),
                **{name: value for name, value in fields.items() if value is not None},
            )
        except ValueError as error:
            raise invalid(error) from None

    def _logit_bias(self) -> dict[int, float] | None:
        """By id: JSON's keys are strings."""
        for key in self.logit_bias or ():
            if not (key.isascii() and key.isdecimal()):
                raise ApiError(400, f"logit_bias holds {shown(key)}; its keys must be token ids", param="logit_bias")
        return {int(key): value for key, value in self.logit_bias.items()} if self.logit_bias else None


def invalid(error: ValueError) -> ApiError:
    """The engine's word on a bad value, whose first word is the field where it is about one."""
    named = re.match(r"\w+", str(error))
    param = named[0] if named and named[0] in ChatCompletionRequest.model_fields else None
    return ApiError(400, str(error), param=param)


def count_messages(body: bytes) -> int:
    """How many messages the body has; 0 where it is no request. Ten times as quick as parse_request."""
    try:
        data = _JSON.validate_json(body)
    except ValueError:
        return 0
    messages = data.get("messages") if isinstance(data, dict) else None
    return len(messages) if isinstance(messages, list) else 0


def parse_request(body: bytes) -> ChatCompletionRequest:
    """The request in `body`; ApiError (400) naming the field if anything in it cannot be honoured."""
    try:
        request = ChatCompletionRequest.model_validate_json(body)
    except ValidationError as error:
        raise _api_error(error) from None
    _check_extra(request, _UNAVAILABLE, _IGNORED, "")
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs is allowed only with logprobs=true", param="top_logprobs")
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options is allowed only with stream=true", param="stream_options")
    if (length := _length(request.chat_template_kwargs)) > MAX_TEMPLATE_CHARS:
        words = f"{length:,} characters; at most {MAX_TEMPLATE_CHARS:,} are allowed: shorten it"
        raise ApiError(400, f"chat_template_kwargs has {words}", param="chat_template_kwargs")
    for i, message in enumerate(request.messages):
        _check_extra(message, _MESSAGE_UNAVAILABLE, _MESSAGE_IGNORED, f"messages[{i}].")
    return request


def _length(value: Any) -> int:
    """About the characters that a JSON value has where a template writes it."""
    if isinstance(value, dict):
        return sum(len(key) + _length(item) for key, item in value.items())
    if isinstance(value, list):
        return sum(1 + _length(item) for item in value)
    return len(value) if isinstance(value, str) else len(str(value))


def _text(message: Message, where: str) -> str:
    """A message's text: a string, or text parts joined by line breaks."""
    content = message.content
    if isinstance(content, str):
        return content
    if content is None and message.role == "assistant":
        return ""
    if not isinstance(content, list):
        raise ApiError(400, f"{where}.content must be a string or a list of text parts", param=f"{where}.content")
    texts = []
    for i, part in enumerate(content):
        param = f"{where}.content[{i}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            named = f"of type {shown(kind)} " if isinstance(kind, str) else ""
            raise ApiError(400, f"{param}: a part {named}is not supported; this model reads text only", param=param)
        if not isinstance(part.get("text"), str):
            raise ApiError(400, f"{param}.text must be a string", param=f"{param}.text")
        texts.append(part["text"])
    return "\n".join(texts)


def _check_extra(model: BaseModel, unavailable: dict[str, tuple[Any, ...]], ignored: set[str], where: str) -> None:
    for name, value in (model.model_extra or {}).items():
        if value is None or name in ignored:
            continue
        if name in unavailable:
            if any(value == neutral and type(value) is type(neutral) for neutral in unavailable[name]):
                continue
            raise ApiError(
                400,
                f"{where}{name} is not supported by this server; leave it out",
                param=f"{where}{name}",
                code="unsupported_parameter",
            )
        near = difflib.get_close_matches(shortened(name), list(type(model).model_fields), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        field = where + name
        raise ApiError(400, f"unknown field {shown(field)}{hint}", param=field, code="unknown_parameter")


def _api_error(error: ValidationError) -> ApiError:
    """The first of pydantic's findings, in OpenAI's form."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first.get('ctx', {}).get('error')}")
    # A union reports each member's finding under the member's name; the field is what stands before it.
    param = _path([part for part in first["loc"] if not (isinstance(part, str) and part in ("str", "list[str]"))])
    value = first.get("input")
    got = "" if first["type"] == "missing" else f" (got {shown(value)})"
    message = first["msg"][:1].lower() + first["msg"][1:]
    return ApiError(400, f"{shortened(param) or 'body'}: {message}{got}", param=param or None)


def _path(parts: Sequence[int | str]) -> str:
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in parts).lstrip(".")
