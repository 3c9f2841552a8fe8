"""The API against the public OpenAI client: what a client sees of every ending, refusal and fault."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from openai import AsyncOpenAI

from app import openai_api
from app.openai_api import LONG_BODY, MAX_BODY, build_api
from app.security import Guard
from app.settings import Settings
from engine.engine_thread import EngineDead, EngineNotReady, QueueFull
from engine.status import LoadStatus
from tests.app.standin import StandInEngine, StandInTokenizer, served

HELLO: Any = [{"role": "user", "content": "hello"}]
PROMPT_TOKENS = len("user:hello")


@pytest.fixture
async def engine() -> StandInEngine:
    return StandInEngine()


def application(engine: StandInEngine, settings: Settings | None = None) -> FastAPI:
    settings = settings or Settings()
    app = FastAPI()
    app.mount("/v1", build_api(settings, engine, Guard(settings)))  # type: ignore[arg-type]
    return app


@pytest.fixture
async def address(engine: StandInEngine) -> AsyncIterator[str]:
    async with served(application(engine)) as address:
        yield address


@pytest.fixture
async def client(address: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"http://{address}/v1", api_key="unused", max_retries=0, timeout=10) as client:
        yield client


async def answered(engine: StandInEngine, call: Any, *texts: str, finish: str = "stop", **more: Any) -> Any:
    """Run `call` while the engine says `texts` to its request."""
    task = asyncio.ensure_future(call)
    request = await engine.next_request()
    for text in texts:
        request.say(text)
    request.say(finish_reason=finish, **more)
    return await task


async def test_models_lists_the_one_that_is_served(client: AsyncOpenAI) -> None:
    assert [m.id for m in (await client.models.list()).data] == ["standin"]
    assert (await client.models.retrieve("standin")).id == "standin"
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        await client.models.retrieve("gpt-9")


@pytest.mark.parametrize(
    "change",
    [
        {"model": "x" * 10**6},
        {"x" * 10**6: 1},
        {"temperature": "x" * 10**6},
        {"n": 10**4000},
        {"stop": "x" * 10**6},
        {"stop": ["ok", {"x" * 10**6: 1}]},
        {"logit_bias": {"x" * 10**6: 1}},
        {"logit_bias": {"x" * 10**6: "y"}},
        {"stop_token_ids": ["x" * 10**6]},
        {"messages": [{"role": "x" * 10**6, "content": ""}]},
        {"messages": [{"role": "user", "content": [{"type": "x" * 10**6}]}]},
        {"messages": [{"role": "user", "content": "", "x" * 10**6: 1}]},
    ],
)
async def test_a_refusal_is_not_as_long_as_what_it_refuses(address: str, change: dict[str, Any]) -> None:
    async with httpx.AsyncClient() as http:
        answer = await http.post(
            f"http://{address}/v1/chat/completions", json={"model": "standin", "messages": HELLO} | change
        )
        assert answer.status_code in (400, 404) and len(answer.content) < 1000, answer.content[:300]
        assert all(len(str(text)) < 400 for text in answer.json()["error"].values())


async def test_a_stop_string_that_is_too_long_is_refused_with_both_numbers(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"1,001 characters.*at most 1,000.*shorten it") as caught:
        await client.chat.completions.create(model="standin", messages=HELLO, stop=["ok", "x" * 1001])
    assert caught.value.param == "stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_that_is_not_served_is_not_found(
    stream: bool, engine: StandInEngine, client: AsyncOpenAI
) -> None:
    with pytest.raises(openai.NotFoundError, match=r"'gpt-9'.*'standin'") as caught:
        await client.chat.completions.create(model="gpt-9", messages=HELLO, stream=stream)
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    assert caught.value.type == "invalid_request_error"
    assert not engine.requests


async def test_a_whole_reply_has_text_reason_and_usage(engine: StandInEngine, client: AsyncOpenAI) -> None:
    call = asyncio.ensure_future(client.chat.completions.create(model="standin", messages=HELLO))
    request = await engine.next_request()
    request.figures["num_cached_tokens"] = 8
    request.say("Hi ")
    request.say("there", finish_reason="length")
    reply = await call
    assert reply.choices[0].message.content == "Hi there"
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (PROMPT_TOKENS, 8)
    assert reply.usage.total_tokens == PROMPT_TOKENS + 8
    assert reply.usage.prompt_tokens_details.cached_tokens == 8


async def test_a_stream_opens_with_the_role_and_ends_with_the_reason(
    engine: StandInEngine, client: AsyncOpenAI
) -> None:
    stream = await answered(
        engine, client.chat.completions.create(model="standin", messages=HELLO, stream=True), "", "Hé", "llo 你"
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].delta.content for c in chunks[1:-1]] == ["Hé", "llo 你"]
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({c.id for c in chunks}) == 1
    assert all(c.usage is None for c in chunks)


async def test_usage_comes_in_a_last_chunk_without_choices_when_asked_for(
    engine: StandInEngine, client: AsyncOpenAI
) -> None:
    call = client.chat.completions.create(
        model="standin", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    *others, last = [chunk async for chunk in await answered(engine, call, "four")]
    assert all(c.usage is None and c.choices for c in others)
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 4


async def test_the_raw_stream_is_events_closed_by_done(engine: StandInEngine, address: str) -> None:
    async with httpx.AsyncClient() as http:
        body = {"model": "standin", "messages": HELLO, "stream": True}
        response = await answered(engine, http.post(f"http://{address}/v1/chat/completions", json=body), "hi")
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(e.removeprefix("data: "))["object"] == "chat.completion.chunk" for e in events[:-2])
    assert "usage" not in json.loads(events[0].removeprefix("data: "))


async def test_every_sampling_field_reaches_the_engine(engine: StandInEngine, client: AsyncOpenAI) -> None:
    extra = {
        "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "stop_token_ids": [7], "ignore_eos": True, "min_tokens": 2,
    }  # fmt: skip
    await answered(
        engine,
        client.chat.completions.create(
            model="standin", messages=HELLO, temperature=0.5, top_p=0.9, presence_penalty=0.3, frequency_penalty=-0.4,
            seed=11, stop=["a", "b"], max_tokens=9, user="me", store=False, metadata={"k": "v"}, n=1, logprobs=False,
            tools=[], response_format={"type": "text"}, logit_bias={"50": -1, "7": 2.5}, extra_body=extra,
        ),
    )  # fmt: skip
    params = engine.requests[0].params
    got = {name: getattr(params, name) for name in extra}
    assert got == extra | {"stop_token_ids": (7,)}
    assert (params.temperature, params.top_p, params.presence_penalty, params.frequency_penalty) == (
        0.5,
        0.9,
        0.3,
        -0.4,
    )
    assert (params.seed, params.stop, params.max_tokens) == (11, ("a", "b"), 9)
    assert (params.n, params.logprobs, params.logit_bias) == (1, None, {50: -1, 7: 2.5})


async def test_a_client_that_leaves_everything_out_gets_openai_s_defaults(
    engine: StandInEngine, client: AsyncOpenAI
) -> None:
    nothing: Any = None
    await answered(engine, client.chat.completions.create(model="standin", messages=HELLO, temperature=nothing))
    params = engine.requests[0].params
    assert (params.temperature, params.top_p, params.stop, params.seed) == (1.0, 1.0, (), None)
    assert params.max_tokens == 100 - PROMPT_TOKENS  # the rest of the context


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_more_output_than_the_context_has_room_for_is_not_an_error(
    name: str, engine: StandInEngine, client: AsyncOpenAI
) -> None:
    limit: Any = {name: 10_000}
    reply = await answered(
        engine, client.chat.completions.create(model="standin", messages=HELLO, **limit), finish="length"
    )
    assert reply.choices[0].finish_reason == "length"
    assert engine.requests[0].params.max_tokens == 100 - PROMPT_TOKENS


async def test_a_negative_seed_is_as_good_as_any(engine: StandInEngine, client: AsyncOpenAI) -> None:
    await answered(engine, client.chat.completions.create(model="standin", messages=HELLO, seed=-5))
    assert engine.requests[0].params.seed == 2**63 - 5


async def test_text_parts_and_the_developer_role_are_understood(engine: StandInEngine, client: AsyncOpenAI) -> None:
    parts: Any = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages: Any = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    await answered(engine, client.chat.completions.create(model="standin", messages=messages))
    assert "".join(map(chr, engine.requests[0].prompt_ids)) == "system:be briefuser:one\ntwo"


async def test_a_reply_can_be_sent_back_as_the_client_dumps_it(engine: StandInEngine, client: AsyncOpenAI) -> None:
    first = await answered(engine, client.chat.completions.create(model="standin", messages=HELLO), "Hi")
    history: Any = [*HELLO, first.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
    await answered(engine, client.chat.completions.create(model="standin", messages=history))
    assert "assistant:Hi" in "".join(map(chr, engine.requests[1].prompt_ids))


BODY = {"model": "standin", "messages": HELLO}


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"model": None}, "model", "model"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "array"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "'wizard'"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0].role", "'tool'"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "required"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "string"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
            "'image_url'",
        ),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]", "text only"),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls",
            "not supported",
        ),
        ({"temperature": 2.5}, "temperature", "2"),
        ({"temperature": -0.1}, "temperature", "-0.1"),
        ({"temperature": "hot"}, "temperature", "'hot'"),
        ({"top_p": 1.5}, "top_p", "between 0.0 and 1.0"),
        ({"presence_penalty": 3}, "presence_penalty", "-2.0 and 2.0"),
        ({"top_k": -2}, "top_k", "-2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "between 0.001 and 1000"),
        ({"temperature": 10**400}, "temperature", ""),
        ({"logit_bias": {"1": 10**400}}, "logit_bias", ""),
        ({"max_tokens": 0}, "max_tokens", "0"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "-1"),
        ({"max_tokens": True}, "max_tokens", "True"),
        ({"seed": 2**64}, "seed", "seed"),
        ({"stop": ""}, "stop", "one character"),
        ({"stop": 5}, "stop", "5"),
        ({"stop": ["x"] * 17}, "stop", "17"),
        ({"n": 0}, "n", "between 1 and 16"),
        ({"n": 17}, "n", "between 1 and 16"),
        ({"logprobs": 5}, "logprobs", "5"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"min_tokens": -1}, "min_tokens", "-1"),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens", "between 0 and 5"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "between -100"),
        ({"logit_bias": {"hello": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"5": "much"}}, "logit_bias.5", "'much'"),
        ({"modalities": ["text", "audio"]}, "modalities", "not supported"),
        ({"chat_template_kwargs": {"a": [{"b": "y" * 50_000}]}}, "chat_template_kwargs", "50,003 characters; at most"),
        ({"temprature": 1}, "temprature", "'temperature'"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    change: dict[str, Any], param: str, words: str, engine: StandInEngine, address: str
) -> None:
    async with httpx.AsyncClient() as http:
        response = await http.post(f"http://{address}/v1/chat/completions", json=BODY | change)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert words in error["message"] and "\n" not in error["message"], error["message"]
    assert not engine.requests


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"x"', b"[" * 100_000, b"\xff{}", b'{"messages": [{"role": NaN}]}']
)
async def test_a_body_that_is_no_request_is_refused(body: bytes, address: str) -> None:
    async with httpx.AsyncClient() as http:
        response = await http.post(f"http://{address}/v1/chat/completions", content=body)
    assert response.status_code == 400 and response.json()["error"]["message"]


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_beyond_the_limit_gets_413(declared: bool, address: str) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(MAX_BODY // 2**20 + 1):
            yield b" " * 2**20

    content: Any = b" " * (MAX_BODY + 1) if declared else parts()
    async with httpx.AsyncClient() as http:
        response = await http.post(f"http://{address}/v1/chat/completions", content=content)
    assert response.status_code == 413
    assert f"{MAX_BODY:,}" in response.json()["error"]["message"]


async def test_too_long_a_prompt_is_refused_with_both_numbers(client: AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "x" * 200}]
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="standin", messages=messages)
    assert caught.value.code == "context_length_exceeded"
    assert "205 tokens" in caught.value.message and "100 tokens" in caught.value.message


async def test_more_messages_than_tokens_are_refused_before_they_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, client: AsyncOpenAI
) -> None:
    looked_at: list[Any] = []
    monkeypatch.setattr(openai_api, "parse_request", looked_at.append)
    monkeypatch.setattr(StandInTokenizer, "encode_chat", looked_at.append)
    messages: Any = [{"role": "user", "content": ""}] * 100
    with pytest.raises(openai.BadRequestError, match=r"at least 100 tokens.*takes 100.*shorten") as caught:
        await client.chat.completions.create(model="standin", messages=messages)
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")
    assert not looked_at


@pytest.mark.parametrize(
    ("change", "in_a_thread"),
    [
        ({}, False),
        ({"messages": HELLO * 20}, False),
        ({"messages": [{"role": "user", "content": ""}] * 500}, True),
        ({"messages": [{"role": "user", "content": "x" * LONG_BODY}]}, True),
        ({"chat_template_kwargs": {"x": "<|im_end|>" * 2000}}, True),
        ({"stop_token_ids": [1] * 10_000}, True),
    ],
    ids=["short", "some messages", "many messages", "long text", "template arguments", "stop ids"],
)
async def test_a_long_body_is_read_and_encoded_beside_the_event_loop(
    change: dict[str, Any], in_a_thread: bool, engine: StandInEngine, client: AsyncOpenAI, monkeypatch: Any
) -> None:
    engine.set(max_model_len=100_000, kv={"total": 100_000, "free": 0, "cached": 0, "active": 0})
    threads: dict[str, threading.Thread] = {}

    def noting(step: str, result: Any) -> Any:
        def run(*arguments: Any, **named: Any) -> Any:
            threads[step] = threading.current_thread()
            return result(*arguments, **named)

        return run

    monkeypatch.setattr(openai_api, "parse_request", noting("read", openai_api.parse_request))
    monkeypatch.setattr(StandInTokenizer, "encode_chat", noting("encode", lambda *_, **__: [1]))
    monkeypatch.setattr(StandInTokenizer, "least_tokens", noting("count", lambda *_: 0), raising=False)
    call: Any = client.chat.completions.create(model="standin", messages=HELLO, extra_body=change)
    await answered(engine, call, "hi")
    assert {"read", "encode"} <= set(threads)
    assert {thread is not threading.main_thread() for thread in threads.values()} == {in_a_thread}


async def test_a_prompt_beyond_the_pool_is_refused_with_both_numbers(
    engine: StandInEngine, client: AsyncOpenAI
) -> None:
    engine.set(kv={"total": 2, "free": 2, "cached": 0, "active": 0})
    with pytest.raises(openai.BadRequestError, match=rf"{PROMPT_TOKENS} tokens.*holds 8 tokens"):
        await client.chat.completions.create(model="standin", messages=HELLO)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "code", "retry"),
    [
        (QueueFull("9 requests are unfinished, the limit is 9"), 429, "queue_full", True),
        (EngineNotReady("not ready"), 503, "model_loading", True),
        (EngineDead("the engine has stopped: disk on fire"), 503, "engine_failed", False),
        (ValueError("prompt holds id 99"), 400, None, False),
    ],
)
async def test_the_engine_s_refusals_have_their_status(
    refusal: Exception, status: int, code: str | None, retry: bool, stream: bool, engine: StandInEngine, address: str
) -> None:
    engine.refuse = refusal
    async with httpx.AsyncClient() as http:
        response = await http.post(f"http://{address}/v1/chat/completions", json=BODY | {"stream": stream})
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert str(refusal) in response.json()["error"]["message"]
    assert ("retry-after" in response.headers) == retry


async def test_while_loading_it_says_how_far_and_when_to_come_back(engine: StandInEngine, address: str) -> None:
    engine.set(ready=False, model="default", load=LoadStatus("fetching the model", 42.0))
    async with httpx.AsyncClient() as http:
        body = BODY | {"model": "default"}
        response = await http.post(f"http://{address}/v1/chat/completions", json=body)
    assert response.status_code == 503 and int(response.headers["retry-after"]) > 0
    assert "fetching the model, 42 %" in response.json()["error"]["message"]


async def test_an_engine_that_is_down_tells_its_cause(engine: StandInEngine, client: AsyncOpenAI) -> None:
    engine.set(ready=False, error="OutOfMemoryError: no room")
    with pytest.raises(openai.InternalServerError, match="no room") as caught:
        await client.chat.completions.create(model="standin", messages=HELLO)
    assert caught.value.status_code == 503


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_fails_before_its_first_token_gets_an_error_status(
    stream: bool, engine: StandInEngine, client: AsyncOpenAI
) -> None:
    call: Any = client.chat.completions.create(model="standin", messages=HELLO, stream=stream)
    with pytest.raises(openai.InternalServerError, match="logits are not finite") as caught:
        await answered(engine, call, finish="error", error="the logits are not finite")
    assert caught.value.status_code == 500


async def test_an_engine_that_dies_in_mid_stream_ends_it_with_the_cause(
    engine: StandInEngine, client: AsyncOpenAI
) -> None:
    stream = await client_stream(engine, client, "partial")
    engine.set(ready=False, error="OutOfMemoryError: no room")
    engine.requests[0].say(finish_reason="error", error="OutOfMemoryError: no room")
    with pytest.raises(openai.APIError, match="no room"):
        async for _ in stream:
            pass


async def client_stream(engine: StandInEngine, client: AsyncOpenAI, text: str) -> Any:
    """A streamed reply that has begun with `text` and goes on."""
    call = asyncio.ensure_future(client.chat.completions.create(model="standin", messages=HELLO, stream=True))
    request = await engine.next_request()
    request.say(text)
    stream = await call
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            return stream
    raise AssertionError("the stream ended")


async def test_closing_a_stream_aborts_the_request_at_once(engine: StandInEngine, client: AsyncOpenAI) -> None:
    stream = await client_stream(engine, client, "some")
    await stream.close()
    await asyncio.wait_for(engine.requests[0].aborted.wait(), 5)


async def test_a_connection_dropped_in_mid_body_leaves_no_traceback(
    address: str, client: AsyncOpenAI, engine: StandInEngine, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = address.split(":")
    for _ in range(3):
        _, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
        writer.write(head.encode() + b"Content-Length: 4000\r\n\r\n" + b'{"model": "standin"')
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
    await asyncio.sleep(0.1)
    reply = await answered(engine, client.chat.completions.create(model="standin", messages=HELLO), "still here")
    assert reply.choices[0].message.content == "still here"
    assert not [r for r in caplog.records if r.exc_info or "Traceback" in r.getMessage()]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_connection_dropped_before_the_first_token_aborts_the_request_at_once(
    stream: bool, engine: StandInEngine, client: AsyncOpenAI
) -> None:
    call: Any = client.chat.completions.create(model="standin", messages=HELLO, stream=stream)
    task = asyncio.ensure_future(call)
    request = await engine.next_request()
    task.cancel()
    await asyncio.wait_for(request.aborted.wait(), 5)


async def test_a_request_that_ends_by_itself_is_not_aborted(engine: StandInEngine, client: AsyncOpenAI) -> None:
    await answered(engine, client.chat.completions.create(model="standin", messages=HELLO), "done")
    assert not engine.requests[0].aborted.is_set()


async def test_with_a_key_set_only_its_holder_gets_in(engine: StandInEngine) -> None:
    async with served(application(engine, Settings(api_key="s3cret"))) as address, httpx.AsyncClient() as http:
        url = f"http://{address}/v1"
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            for response in (
                await http.get(f"{url}/models", headers=headers),
                await http.post(f"{url}/chat/completions", json=BODY, headers=headers),
            ):
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
        right = {"Authorization": "Bearer s3cret"}
        assert (await http.get(f"{url}/models", headers=right)).status_code == 200


async def test_a_page_of_another_site_may_not_use_the_api(engine: StandInEngine, address: str) -> None:
    async with httpx.AsyncClient() as http:
        response = await http.post(
            f"http://{address}/v1/chat/completions", json=BODY, headers={"Origin": "https://elsewhere.example"}
        )
    assert response.status_code == 403 and not engine.requests
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nothing", 404), ("GET", "/chat/completions", 405)])
async def test_an_unknown_route_is_an_openai_error_too(method: str, path: str, status: int, address: str) -> None:
    async with httpx.AsyncClient() as http:
        response = await http.request(method, f"http://{address}/v1{path}")
    assert response.status_code == status and path in response.json()["error"]["message"]
