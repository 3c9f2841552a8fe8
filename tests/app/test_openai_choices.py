"""n choices and log-probabilities through the public OpenAI client: what it is told, streamed and whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from fastapi import FastAPI
from openai import AsyncOpenAI

from app.openai_api import build_api
from app.security import Guard
from app.settings import Settings
from byte_model import replying_engine
from engine.config import EngineConfig
from engine.engine_thread import EngineThread
from engine.outputs import TokenLogprobs
from tests.app.standin import StandInEngine, served

HELLO: Any = [{"role": "user", "content": "hello"}]


def application(engine: Any) -> FastAPI:
    app = FastAPI()
    app.mount("/v1", build_api(Settings(), engine, Guard(Settings())))
    return app


@pytest.fixture
async def engine() -> StandInEngine:
    return StandInEngine()


@pytest.fixture
async def client(engine: StandInEngine) -> AsyncIterator[AsyncOpenAI]:
    async with (
        served(application(engine)) as address,
        AsyncOpenAI(base_url=f"http://{address}/v1", api_key="unused", max_retries=0, timeout=10) as client,
    ):
        yield client


def entry(char: str, *others: str) -> TokenLogprobs:
    return TokenLogprobs(ord(char), -0.5, tuple((ord(c), -0.5 - i) for i, c in enumerate([char, *others])))


async def test_each_choice_has_its_text_and_its_reason(engine: StandInEngine, client: AsyncOpenAI) -> None:
    call = asyncio.ensure_future(client.chat.completions.create(model="standin", messages=HELLO, n=3))
    request = await engine.next_request()
    assert request.params.n == 3
    request.say("two", "length", index=1)
    request.say("ze", index=0)
    request.say("three", "stop", index=2)
    request.say("ro", "stop", index=0)
    reply = await call
    assert [(c.index, c.message.content, c.finish_reason) for c in reply.choices] == [
        (0, "zero", "stop"),
        (1, "two", "length"),
        (2, "three", "stop"),
    ]
    assert reply.usage is not None and reply.usage.completion_tokens == len("zerotwothree")
    assert reply.usage.prompt_tokens == len("user:hello")


async def test_a_stream_of_several_choices_opens_and_ends_each_of_them(
    engine: StandInEngine, client: AsyncOpenAI
) -> None:
    call = asyncio.ensure_future(client.chat.completions.create(model="standin", messages=HELLO, n=2, stream=True))
    request = await engine.next_request()
    for text, index, reason in (("a", 1, None), ("b", 0, "stop"), ("c", 1, "length")):
        request.say(text, reason, index=index)
    chunks = [chunk async for chunk in await call]
    told: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in chunks:
        (choice,) = chunk.choices
        told[choice.index].append((choice.delta.role, choice.delta.content, choice.finish_reason))
    assert told[0] == [("assistant", "", None), (None, "b", None), (None, None, "stop")]
    assert told[1] == [("assistant", "", None), (None, "a", None), (None, "c", None), (None, None, "length")]
    assert len({c.id for c in chunks}) == 1


async def test_logprobs_come_in_openais_shape(engine: StandInEngine, client: AsyncOpenAI) -> None:
    call = asyncio.ensure_future(
        client.chat.completions.create(model="standin", messages=HELLO, logprobs=True, top_logprobs=2)
    )
    request = await engine.next_request()
    assert request.params.logprobs == 2
    request.say("h", logprobs=[entry("h", "j")])
    request.say("é", "stop", logprobs=[TokenLogprobs(ord("é"), float("-inf"))])
    (choice,) = (await call).choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    first, second = choice.logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("h", -0.5, [104])
    assert [(t.token, t.logprob, t.bytes) for t in first.top_logprobs] == [("h", -0.5, [104]), ("j", -1.5, [106])]
    assert (second.token, second.logprob, second.bytes) == ("é", -9999.0, list("é".encode()))
    assert second.top_logprobs == []


async def test_a_stream_carries_logprobs_with_its_text(engine: StandInEngine, client: AsyncOpenAI) -> None:
    call = asyncio.ensure_future(
        client.chat.completions.create(model="standin", messages=HELLO, logprobs=True, stream=True)
    )
    request = await engine.next_request()
    assert request.params.logprobs == 0
    request.say("a", logprobs=[TokenLogprobs(97, -1.0)])
    request.say("", logprobs=[TokenLogprobs(98, -2.0)])
    request.say("", "stop", logprobs=[])
    chunks = [c.choices[0] async for c in await call]
    assert [
        [(t.token, t.logprob) for t in c.logprobs.content or ()] for c in chunks[1:-1] if c.logprobs is not None
    ] == [[("a", -1.0)], [("b", -2.0)]]
    assert chunks[0].logprobs is None and chunks[-1].logprobs is None


async def test_who_does_not_ask_gets_no_logprobs(engine: StandInEngine, client: AsyncOpenAI) -> None:
    call = asyncio.ensure_future(client.chat.completions.create(model="standin", messages=HELLO))
    request = await engine.next_request()
    assert request.params.logprobs is None
    request.say("hi", "stop")
    assert (await call).choices[0].logprobs is None


async def test_a_real_engine_serves_several_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second choice of this scripted model begins a letter later; a bias beyond its vocabulary is refused."""
    scripted = replying_engine(monkeypatch, "hello")
    monkeypatch.setattr("engine.llm_engine.LLMEngine", lambda config, progress: scripted)
    monkeypatch.setattr(
        type(scripted.tokenizer), "encode_chat", lambda self, messages, template_kwargs=None: [104, 105, 10]
    )
    thread = EngineThread(EngineConfig())
    thread.start()
    assert thread.wait_until_settled(10)
    try:
        async with (
            served(application(thread)) as address,
            AsyncOpenAI(base_url=f"http://{address}/v1", api_key="unused", max_retries=0, timeout=10) as client,
        ):
            reply = await client.chat.completions.create(model="stand-in", messages=HELLO, n=2)
            assert [c.message.content for c in reply.choices] == ["hello", "ello"]
            assert [c.finish_reason for c in reply.choices] == ["stop", "stop"]
            with pytest.raises(openai.BadRequestError, match="ids of this model go from 0 to 257") as caught:
                await client.chat.completions.create(model="stand-in", messages=HELLO, logit_bias={"999": 1})
            assert caught.value.param == "logit_bias"
    finally:
        thread.shutdown()
